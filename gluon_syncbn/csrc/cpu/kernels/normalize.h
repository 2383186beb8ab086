// y = activation((x − shift)·scale + bias + skip), each step rounded to T.

template <typename T, Activation::Kind kKind, bool kSkip>
inline T normalized(const Channel<typename Storage<T>::Compute>& channel, T x, T skip) {
  using A = typename Storage<T>::Compute;
  A value = channel.apply(Storage<T>::load(x));
  if constexpr (kSkip) value = Storage<T>::load(Storage<T>::store(value)) + Storage<T>::load(skip);
  if constexpr (kKind == Activation::kReLU) {
    value = value <= 0 ? A(0) : value;
  } else if constexpr (kKind == Activation::kLeakyReLU) {
    value = Storage<T>::load(Storage<T>::store(value));
    value = value <= 0 ? value * channel.slope : value;
  }
  return Storage<T>::store(value);
}

template <typename T, Activation::Kind kKind, bool kSkip>
void normalize_rows(const T* x, const T* skip, Layout layout, int64_t c_begin, int64_t c_end, const AffineView& affine,
                    T* y) {
  using A = typename Storage<T>::Compute;
  for (int64_t o = 0; o < layout.outer; ++o) {
    for (int64_t c = c_begin; c < c_end; ++c) {
      const Channel<A> channel = channel_of<A>(affine, c);
      const int64_t start = (o * layout.channels + c) * layout.inner;
      const T* from = x + start;
      const T* skips = kSkip ? skip + start : from;
      T* to = y + start;
      for (int64_t i = 0; i < layout.inner; ++i) to[i] = normalized<T, kKind, kSkip>(channel, from[i], skips[i]);
    }
  }
}

template <typename T, Activation::Kind kKind, bool kSkip>
void normalize_columns(const T* x, const T* skip, Layout layout, int64_t c_begin, int64_t c_end,
                       const AffineView& affine, T* y) {
  using A = typename Storage<T>::Compute;
  for (int64_t c0 = c_begin; c0 < c_end; c0 += kChannelBlock) {
    const int64_t width = c_end - c0 < kChannelBlock ? c_end - c0 : kChannelBlock;
    const Columns<A> columns(affine, c0, width);
    for (int64_t o = 0; o < layout.outer; ++o) {
      const T* from = x + o * layout.channels + c0;
      const T* skips = kSkip ? skip + o * layout.channels + c0 : from;
      T* to = y + o * layout.channels + c0;
      for (int64_t c = 0; c < width; ++c) to[c] = normalized<T, kKind, kSkip>(columns[c], from[c], skips[c]);
    }
  }
}

template <typename T, Activation::Kind kKind, bool kSkip>
void normalize_as(const void* x, const void* skip, Layout layout, int64_t c_begin, int64_t c_end,
                  const AffineView& affine, void* y) {
  const auto pass = layout.inner == 1 ? normalize_columns<T, kKind, kSkip> : normalize_rows<T, kKind, kSkip>;
  pass(static_cast<const T*>(x), static_cast<const T*>(skip), layout, c_begin, c_end, affine, static_cast<T*>(y));
}

template <typename T>
void normalize_of(const void* x, const void* skip, Layout layout, int64_t c_begin, int64_t c_end,
                  const AffineView& affine, void* y) {
  switch (affine.activation.kind) {
    case Activation::kReLU:
      return (skip ? normalize_as<T, Activation::kReLU, true>
                   : normalize_as<T, Activation::kReLU, false>)(x, skip, layout, c_begin, c_end, affine, y);
    case Activation::kLeakyReLU:
      return (skip ? normalize_as<T, Activation::kLeakyReLU, true>
                   : normalize_as<T, Activation::kLeakyReLU, false>)(x, skip, layout, c_begin, c_end, affine, y);
    default:
      return (skip ? normalize_as<T, Activation::kNone, true>
                   : normalize_as<T, Activation::kNone, false>)(x, skip, layout, c_begin, c_end, affine, y);
  }
}
