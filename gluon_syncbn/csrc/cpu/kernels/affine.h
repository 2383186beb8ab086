// What a channel's values are normalized with.

template <typename A>
struct Channel {
  A shift, scale, bias;
  bool relu;

  // dy masked by the ReLU: kept where the output for x was positive, or NaN, which must not be lost.
  inline A masked(A x, A dy) const { return relu && (x - shift) * scale + bias <= 0 ? A(0) : dy; }
};

template <typename A>
inline Channel<A> channel_of(const AffineView& affine, int64_t c) {
  return {static_cast<A>(affine.shift[c]), static_cast<A>(affine.scale[c]), static_cast<A>(affine.bias[c]),
          affine.relu};
}

// The same for channels that lie side by side.
template <typename A>
struct Columns {
  A shift[kChannelBlock], scale[kChannelBlock], bias[kChannelBlock];

  Columns(const AffineView& affine, int64_t first, int64_t width) {
    for (int64_t c = 0; c < width; ++c) {
      const Channel<A> channel = channel_of<A>(affine, first + c);
      shift[c] = channel.shift;
      scale[c] = channel.scale;
      bias[c] = channel.bias;
    }
  }
};
