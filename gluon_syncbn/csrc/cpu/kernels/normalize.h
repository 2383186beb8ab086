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
void normalize_as(const void* x, const void* residual, Layout layout, int64_t c_begin, int64_t c_end,
                  const AffineView& affine, void* y) {
  using A = typename Storage<T>::Compute;
  over_runs<Channel<A>, Columns<A>>(layout, c_begin, c_end, affine,
                                    [=](int64_t start, int64_t size, const auto& channels) {
                                      const T* from = static_cast<const T*>(x) + start;
                                      const T* residuals = kResidual ? static_cast<const T*>(residual) + start : from;
                                      T* to = static_cast<T*>(y) + start;
                                      for (int64_t i = 0; i < size; ++i)
                                        to[i] = normalized<T, kKind, kResidual>(channels[i], from[i], residuals[i]);
                                    });
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
