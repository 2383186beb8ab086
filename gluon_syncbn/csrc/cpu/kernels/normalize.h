// y = (x − shift)·scale + bias, then max(y, 0) if relu.

template <typename T, bool kRelu>
void normalize_rows(const T* x, Layout layout, int64_t c_begin, int64_t c_end, const AffineView& affine, T* y) {
  using A = typename Storage<T>::Compute;
  for (int64_t o = 0; o < layout.outer; ++o) {
    for (int64_t c = c_begin; c < c_end; ++c) {
      const Channel<A> channel = channel_of<A>(affine, c);
      const int64_t start = (o * layout.channels + c) * layout.inner;
      const T* from = x + start;
      T* to = y + start;
      for (int64_t i = 0; i < layout.inner; ++i) {
        const A value = (Storage<T>::load(from[i]) - channel.shift) * channel.scale + channel.bias;
        to[i] = Storage<T>::store(kRelu && value <= 0 ? A(0) : value);
      }
    }
  }
}

template <typename T, bool kRelu>
void normalize_columns(const T* x, Layout layout, int64_t c_begin, int64_t c_end, const AffineView& affine, T* y) {
  using A = typename Storage<T>::Compute;
  for (int64_t c0 = c_begin; c0 < c_end; c0 += kChannelBlock) {
    const int64_t width = c_end - c0 < kChannelBlock ? c_end - c0 : kChannelBlock;
    const Columns<A> columns(affine, c0, width);
    for (int64_t o = 0; o < layout.outer; ++o) {
      const T* from = x + o * layout.channels + c0;
      T* to = y + o * layout.channels + c0;
      for (int64_t c = 0; c < width; ++c) {
        const A value = (Storage<T>::load(from[c]) - columns.shift[c]) * columns.scale[c] + columns.bias[c];
        to[c] = Storage<T>::store(kRelu && value <= 0 ? A(0) : value);
      }
    }
  }
}

template <typename T>
void normalize_of(const void* x, Layout layout, int64_t c_begin, int64_t c_end, const AffineView& affine, void* y) {
  const T* from = static_cast<const T*>(x);
  T* to = static_cast<T*>(y);
  if (layout.inner == 1) {
    (affine.relu ? normalize_columns<T, true> : normalize_columns<T, false>)(from, layout, c_begin, c_end, affine, to);
  } else {
    (affine.relu ? normalize_rows<T, true> : normalize_rows<T, false>)(from, layout, c_begin, c_end, affine, to);
  }
}
