// y = activation((x − shift)·scale + bias + residual), each step rounded to T.

template <typename T, Activation::Kind kKind, bool kResidual>
inline T normalized(const Channel<typename Storage<T>::Compute>& channel, T x, T residual) {
  using A = typename Storage<T>::Compute;
  A value = channel.apply(Storage<T>::load(x));
  if constexpr (kResidual) value = Storage<T>::load(Storage<T>::store(value)) + Storage<T>::load(residual);
  if constexpr (kKind == Activation::kReLU) {
    value = value <= 0 ? A(0) : value;
  } else if constexpr (kKind == Activation::kLeakyReLU) {
    value = Storage<T>::load(Storage<T>::store(value));
    value = value <= 0 ? value * channel.slope : value;
  }
  return Storage<T>::store(value);
}

template <typename T, Activation::Kind kKind, bool kResidual>
void normalize_rows(const T* x, const T* residual, Layout layout, int64_t c_begin, int64_t c_end,
                    const AffineView& affine, T* y) {
  using A = typename Storage<T>::Compute;
  for (int64_t o = 0; o < layout.outer; ++o) {
    for (int64_t c = c_begin; c < c_end; ++c) {
      const Channel<A> channel = channel_of<A>(affine, c);
      const int64_t start = (o * layout.channels + c) * layout.inner;
      const T* from = x + start;
      const T* residuals = kResidual ? residual + start : from;
      T* to = y + start;
      for (int64_t i = 0; i < layout.inner; ++i)
        to[i] = normalized<T, kKind, kResidual>(channel, from[i], residuals[i]);
    }
  }
}

template <typename T, Activation::Kind kKind, bool kResidual>
void normalize_columns(const T* x, const T* residual, Layout layout, int64_t c_begin, int64_t c_end,
                       const AffineView& affine, T* y) {
  using A = typename Storage<T>::Compute;
  for (int64_t c0 = c_begin; c0 < c_end; c0 += kChannelBlock) {
    const int64_t width = c_end - c0 < kChannelBlock ? c_end - c0 : kChannelBlock;
    const Columns<A> columns(affine, c0, width);
    for (int64_t o = 0; o < layout.outer; ++o) {
      const T* from = x + o * layout.channels + c0;
      const T* residuals = kResidual ? residual + o * layout.channels + c0 : from;
      T* to = y + o * layout.channels + c0;
      for (int64_t c = 0; c < width; ++c) to[c] = normalized<T, kKind, kResidual>(columns[c], from[c], residuals[c]);
    }
  }
}

template <typename T, Activation::Kind kKind, bool kResidual>
void normalize_as(const void* x, const void* residual, Layout layout, int64_t c_begin, int64_t c_end,
                  const AffineView& affine, void* y) {
  const auto pass = layout.inner == 1 ? normalize_columns<T, kKind, kResidual> : normalize_rows<T, kKind, kResidual>;
  pass(static_cast<const T*>(x), static_cast<const T*>(residual), layout, c_begin, c_end, affine, static_cast<T*>(y));
}

template <typename T>
void normalize_of(const void* x, const void* residual, Layout layout, int64_t c_begin, int64_t c_end,
                  const AffineView& affine, void* y) {
  switch (affine.activation.kind) {
    case Activation::kReLU:
      return (residual ? normalize_as<T, Activation::kReLU, true>
                       : normalize_as<T, Activation::kReLU, false>)(x, residual, layout, c_begin, c_end, affine, y);
    case Activation::kLeakyReLU:
      return (residual
                  ? normalize_as<T, Activation::kLeakyReLU, true>
                  : normalize_as<T, Activation::kLeakyReLU, false>)(x, residual, layout, c_begin, c_end, affine, y);
    default:
      return (residual ? normalize_as<T, Activation::kNone, true>
                       : normalize_as<T, Activation::kNone, false>)(x, residual, layout, c_begin, c_end, affine, y);
  }
}
