// y = activation((x − shift)·scale + bias + residual), each step rounded to T.

template <typename T, Activation::Kind kKind, bool kResidual>
inline T normalized(const ChannelTerms<typename Storage<T>::Compute>& channel, T x, T residual) {
  using A = typename Storage<T>::Compute;
  A value = channel.normalize(Storage<T>::load(x));
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
void normalize_as(const void* x, const void* residual, Layout layout, int64_t c_begin, int64_t c_end, const View& view,
                  void* y) {
  over_tiles<typename Storage<T>::Compute, 3, Rows::kOneByOne>(
      layout, c_begin, c_end, view, [=](const auto& tile, const auto& channels) __attribute__((always_inline)) {
        const T* from = static_cast<const T*>(x) + tile.start;
        const T* residuals = kResidual ? static_cast<const T*>(residual) + tile.start : from;
        T* to = static_cast<T*>(y) + tile.start;
        tile.for_each([&](int64_t at, int64_t i) __attribute__((always_inline)) {
          to[at] = normalized<T, kKind, kResidual>(channels[i], from[at], residuals[at]);
        });
      });
}

template <typename T>
void normalize_of(const void* x, const void* residual, Layout layout, int64_t c_begin, int64_t c_end, const View& view,
                  void* y) {
  auto pass = residual ? normalize_as<T, Activation::kNone, true> : normalize_as<T, Activation::kNone, false>;
  if (view.activation.kind == Activation::kReLU) {
    pass = residual ? normalize_as<T, Activation::kReLU, true> : normalize_as<T, Activation::kReLU, false>;
  } else if (view.activation.kind == Activation::kLeakyReLU) {
    pass = residual ? normalize_as<T, Activation::kLeakyReLU, true> : normalize_as<T, Activation::kLeakyReLU, false>;
  }
  pass(x, residual, layout, c_begin, c_end, view, y);
}
