// dx = factor·dy + slope·(x − shift) + constant, with dy as in gradient_sums.h.

template <typename T, bool kRelu, bool kAdd>
void input_gradient_rows(const T* x, const T* dy, Layout layout, int64_t c_begin, int64_t c_end,
                         const AffineView& affine, const GradientView& gradient, T* dx) {
  using A = typename Storage<T>::Compute;
  for (int64_t o = 0; o < layout.outer; ++o) {
    for (int64_t c = c_begin; c < c_end; ++c) {
      Channel<A> channel = channel_of<A>(affine, c);
      channel.relu = kRelu;
      const A factor = static_cast<A>(gradient.factor[c]);
      const A slope = static_cast<A>(gradient.slope[c]);
      const A constant = static_cast<A>(gradient.constant[c]);
      const int64_t start = (o * layout.channels + c) * layout.inner;
      const T* values = x + start;
      const T* gradients = dy + start;
      T* to = dx + start;
      for (int64_t i = 0; i < layout.inner; ++i) {
        const A value = Storage<T>::load(values[i]);
        const A gradient = channel.masked(value, Storage<T>::load(gradients[i]));
        const A result = factor * gradient + (slope * (value - channel.shift) + constant);
        to[i] = Storage<T>::store(kAdd ? Storage<T>::load(to[i]) + result : result);
      }
    }
  }
}

template <typename T, bool kRelu, bool kAdd>
void input_gradient_columns(const T* x, const T* dy, Layout layout, int64_t c_begin, int64_t c_end,
                            const AffineView& affine, const GradientView& gradient, T* dx) {
  using A = typename Storage<T>::Compute;
  for (int64_t c0 = c_begin; c0 < c_end; c0 += kChannelBlock) {
    const int64_t width = c_end - c0 < kChannelBlock ? c_end - c0 : kChannelBlock;
    const Columns<A> columns(affine, c0, width);
    A factor[kChannelBlock], slope[kChannelBlock], constant[kChannelBlock];
    for (int64_t c = 0; c < width; ++c) {
      factor[c] = static_cast<A>(gradient.factor[c0 + c]);
      slope[c] = static_cast<A>(gradient.slope[c0 + c]);
      constant[c] = static_cast<A>(gradient.constant[c0 + c]);
    }
    for (int64_t o = 0; o < layout.outer; ++o) {
      const T* values = x + o * layout.channels + c0;
      const T* gradients = dy + o * layout.channels + c0;
      T* to = dx + o * layout.channels + c0;
      for (int64_t c = 0; c < width; ++c) {
        const Channel<A> channel{columns.shift[c], columns.scale[c], columns.bias[c], kRelu};
        const A value = Storage<T>::load(values[c]);
        const A gradient = channel.masked(value, Storage<T>::load(gradients[c]));
        const A result = factor[c] * gradient + (slope[c] * (value - channel.shift) + constant[c]);
        to[c] = Storage<T>::store(kAdd ? Storage<T>::load(to[c]) + result : result);
      }
    }
  }
}

template <typename T, bool kAdd>
void input_gradient_of(const void* x, const void* dy, Layout layout, int64_t c_begin, int64_t c_end,
                       const AffineView& affine, const GradientView& gradient, void* dx) {
  const auto pass = layout.inner == 1
                        ? (affine.relu ? input_gradient_columns<T, true, kAdd> : input_gradient_columns<T, false, kAdd>)
                        : (affine.relu ? input_gradient_rows<T, true, kAdd> : input_gradient_rows<T, false, kAdd>);
  pass(static_cast<const T*>(x), static_cast<const T*>(dy), layout, c_begin, c_end, affine, gradient,
       static_cast<T*>(dx));
}
