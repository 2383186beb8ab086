// What a channel's values are normalized with.

template <typename A>
struct Channel {
  A shift, scale, bias, slope;

  inline A apply(A x) const { return (x - shift) * scale + bias; }
};

template <typename A>
inline Channel<A> channel_of(const AffineView& affine, int64_t c) {
  return {static_cast<A>(affine.shift[c]), static_cast<A>(affine.scale[c]), static_cast<A>(affine.bias[c]),
          static_cast<A>(affine.activation.slope)};
}

// What channels that lie side by side are normalized with.
template <typename A>
struct Columns {
  A shift[kChannelBlock], scale[kChannelBlock], bias[kChannelBlock], slope;

  Columns(const AffineView& affine, int64_t first, int64_t width) : slope(static_cast<A>(affine.activation.slope)) {
    for (int64_t c = 0; c < width; ++c) {
      const Channel<A> channel = channel_of<A>(affine, first + c);
      shift[c] = channel.shift;
      scale[c] = channel.scale;
      bias[c] = channel.bias;
    }
  }

  inline Channel<A> operator[](int64_t c) const { return {shift[c], scale[c], bias[c], slope}; }
};
