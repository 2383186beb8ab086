// What a channel's values are normalized with.

template <typename A>
struct Channel {
  A shift, scale, bias, slope;

  Channel() = default;
  inline Channel(A shift, A scale, A bias, A slope) : shift(shift), scale(scale), bias(bias), slope(slope) {}
  inline Channel(const AffineView& affine, int64_t c)
      : shift(static_cast<A>(affine.shift[c])),
        scale(static_cast<A>(affine.scale[c])),
        bias(static_cast<A>(affine.bias[c])),
        slope(static_cast<A>(affine.activation.slope)) {}

  inline A apply(A x) const { return (x - shift) * scale + bias; }
};

// What channels that lie side by side are normalized with.
template <typename A>
struct Columns {
  A shift[kChannelBlock], scale[kChannelBlock], bias[kChannelBlock], slope;

  Columns(const AffineView& affine, int64_t first, int64_t width) : slope(static_cast<A>(affine.activation.slope)) {
    for (int64_t c = 0; c < width; ++c) {
      const Channel<A> channel(affine, first + c);
      shift[c] = channel.shift;
      scale[c] = channel.scale;
      bias[c] = channel.bias;
    }
  }

  inline Channel<A> operator[](int64_t c) const { return {shift[c], scale[c], bias[c], slope}; }
};

// One channel for all of a run of neighbours.
template <typename View>
struct Same {
  View view;

  inline View operator[](int64_t) const { return view; }
};

// Calls run(start, size, channels) for each run of neighbours: the values of one channel where there is a row per
// channel, else those of channels that lie side by side. `channels[i]` is what `View` knows of the i-th value's
// channel, and `Views` holds that of kChannelBlock channels; both are made of `source`.
template <typename View, typename Views, typename From, typename Run>
inline void over_runs(Layout layout, int64_t c_begin, int64_t c_end, const From& source, const Run& run) {
  if (layout.inner > 1) {
    for (int64_t o = 0; o < layout.outer; ++o) {
      for (int64_t c = c_begin; c < c_end; ++c) {
        run((o * layout.channels + c) * layout.inner, layout.inner, Same<View>{View(source, c)});
      }
    }
    return;
  }
  for (int64_t first = c_begin; first < c_end; first += kChannelBlock) {
    const int64_t width = c_end - first < kChannelBlock ? c_end - first : kChannelBlock;
    const Views views(source, first, width);
    for (int64_t o = 0; o < layout.outer; ++o) run(o * layout.channels + first, width, views);
  }
}
