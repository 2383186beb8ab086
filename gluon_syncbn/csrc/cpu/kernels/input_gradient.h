// dx = factor·dz + slope·(v − shift) + constant.

template <typename A>
struct Correction {
  A factor, slope, constant;

  inline A apply(const Channel<A>& channel, A value, A gradient) const {
    return factor * gradient + (slope * (value - channel.shift) + constant);
  }
};

template <typename A>
inline Correction<A> correction_of(const GradientView& gradient, int64_t c) {
  return {static_cast<A>(gradient.factor[c]), static_cast<A>(gradient.slope[c]), static_cast<A>(gradient.constant[c])};
}

template <typename T, Source kSource, bool kAdd>
void input_gradient_rows(const Inputs<T>& all, Layout layout, int64_t c_begin, int64_t c_end, const AffineView& affine,
                         const GradientView& vectors, T* dx) {
  using A = typename Storage<T>::Compute;
  using Read = Reader<T, kSource>;
  for (int64_t o = 0; o < layout.outer; ++o) {
    for (int64_t c = c_begin; c < c_end; ++c) {
      const Channel<A> channel = channel_of<A>(affine, c);
      const Correction<A> correction = correction_of<A>(vectors, c);
      const int64_t start = (o * layout.channels + c) * layout.inner;
      const Inputs<T> input(all, start);
      T* to = dx + start;
      for (int64_t i = 0; i < layout.inner; ++i) {
        const A value = Read::value(channel, input.values[i]);
        const A gradient = Read::gradient(channel, value, input.out[i], input.d_out[i]);
        const A result = correction.apply(channel, value, gradient);
        to[i] = Storage<T>::store(kAdd ? Storage<T>::load(to[i]) + result : result);
      }
    }
  }
}

template <typename T, Source kSource, bool kAdd>
void input_gradient_columns(const Inputs<T>& all, Layout layout, int64_t c_begin, int64_t c_end,
                            const AffineView& affine, const GradientView& vectors, T* dx) {
  using A = typename Storage<T>::Compute;
  using Read = Reader<T, kSource>;
  for (int64_t c0 = c_begin; c0 < c_end; c0 += kChannelBlock) {
    const int64_t width = c_end - c0 < kChannelBlock ? c_end - c0 : kChannelBlock;
    const Columns<A> columns(affine, c0, width);
    A factor[kChannelBlock], slope[kChannelBlock], constant[kChannelBlock];
    for (int64_t c = 0; c < width; ++c) {
      const Correction<A> correction = correction_of<A>(vectors, c0 + c);
      factor[c] = correction.factor;
      slope[c] = correction.slope;
      constant[c] = correction.constant;
    }
    for (int64_t o = 0; o < layout.outer; ++o) {
      const int64_t start = o * layout.channels + c0;
      const Inputs<T> input(all, start);
      T* to = dx + start;
      for (int64_t c = 0; c < width; ++c) {
        const Channel<A> channel = columns[c];
        const A value = Read::value(channel, input.values[c]);
        const A gradient = Read::gradient(channel, value, input.out[c], input.d_out[c]);
        const A result = Correction<A>{factor[c], slope[c], constant[c]}.apply(channel, value, gradient);
        to[c] = Storage<T>::store(kAdd ? Storage<T>::load(to[c]) + result : result);
      }
    }
  }
}

template <typename T, Source kSource, bool kAdd>
void input_gradient_as(const BackwardInput& input, Layout layout, int64_t c_begin, int64_t c_end,
                       const AffineView& affine, const GradientView& vectors, void* dx) {
  const auto pass =
      layout.inner == 1 ? input_gradient_columns<T, kSource, kAdd> : input_gradient_rows<T, kSource, kAdd>;
  pass(Inputs<T>(input), layout, c_begin, c_end, affine, vectors, static_cast<T*>(dx));
}

template <typename T, bool kAdd>
void input_gradient_of(const BackwardInput& input, Layout layout, int64_t c_begin, int64_t c_end,
                       const AffineView& affine, const GradientView& vectors, void* dx) {
  auto pass = input_gradient_as<T, Source::kInput, kAdd>;
  switch (source_of(input, affine.activation.kind)) {
    case Source::kInputReLU:
      pass = input_gradient_as<T, Source::kInputReLU, kAdd>;
      break;
    case Source::kInputLeakyReLU:
      pass = input_gradient_as<T, Source::kInputLeakyReLU, kAdd>;
      break;
    case Source::kInputAndOutput:
      pass = input_gradient_as<T, Source::kInputAndOutput, kAdd>;
      break;
    case Source::kOutputLeakyReLU:
      pass = input_gradient_as<T, Source::kOutputLeakyReLU, kAdd>;
      break;
    case Source::kInput:
    case Source::kOutput:  // the same, of other values
      break;
  }
  pass(input, layout, c_begin, c_end, affine, vectors, dx);
}
