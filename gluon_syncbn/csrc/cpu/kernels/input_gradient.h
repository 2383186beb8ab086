// dx = factor·dz + slope·(v − shift) + constant.

struct InputGradientView {
  const AffineView& affine;
  const GradientView& gradient;
};

template <typename A>
struct Correction {
  Channel<A> channel;
  A factor, slope, constant;

  inline Correction(Channel<A> channel, A factor, A slope, A constant)
      : channel(channel), factor(factor), slope(slope), constant(constant) {}
  inline Correction(const InputGradientView& all, int64_t c)
      : channel(all.affine, c),
        factor(static_cast<A>(all.gradient.factor[c])),
        slope(static_cast<A>(all.gradient.slope[c])),
        constant(static_cast<A>(all.gradient.constant[c])) {}

  inline A apply(A value, A gradient) const { return factor * gradient + (slope * (value - channel.shift) + constant); }
};

template <typename A>
struct Corrections {
  Columns<A> columns;
  A factor[kChannelBlock], slope[kChannelBlock], constant[kChannelBlock];

  Corrections(const InputGradientView& all, int64_t first, int64_t width) : columns(all.affine, first, width) {
    for (int64_t c = 0; c < width; ++c) {
      const Correction<A> correction(all, first + c);
      factor[c] = correction.factor;
      slope[c] = correction.slope;
      constant[c] = correction.constant;
    }
  }

  inline Correction<A> operator[](int64_t c) const { return {columns[c], factor[c], slope[c], constant[c]}; }
};

template <typename T, Source kSource, bool kAdd>
void input_gradient_as(const BackwardInput& input, Layout layout, int64_t c_begin, int64_t c_end,
                       const AffineView& affine, const GradientView& gradient, void* dx) {
  using A = typename Storage<T>::Compute;
  using Read = Reader<T, kSource>;
  const Inputs<T> all(input);
  over_runs<Correction<A>, Corrections<A>>(
      layout, c_begin, c_end, InputGradientView{affine, gradient},
      [=](int64_t start, int64_t size, const auto& corrections) {
        const Inputs<T> input(all, start);
        T* to = static_cast<T*>(dx) + start;
        for (int64_t i = 0; i < size; ++i) {
          const Correction<A> correction = corrections[i];
          const A value = Read::value(correction.channel, input.values[i]);
          const A dz = Read::gradient(correction.channel, value, input.out[i], input.d_out[i]);
          const A result = correction.apply(value, dz);
          to[i] = Storage<T>::store(kAdd ? Storage<T>::load(to[i]) + result : result);
        }
      });
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
