// Σ dz and Σ dz·(v − shift), and the gradient of a residual.

enum class ResidualGradient : int { kNone, kWrite, kAdd };

// Where the gradient of a residual goes.
template <typename T, ResidualGradient kResidual>
inline void store_residual_gradient(T* to, typename Storage<T>::Compute gradient) {
  if constexpr (kResidual == ResidualGradient::kWrite) *to = Storage<T>::store(gradient);
  if constexpr (kResidual == ResidualGradient::kAdd) *to = Storage<T>::store(Storage<T>::load(*to) + gradient);
}

template <typename T, Source kSource, ResidualGradient kResidual>
void gradient_sums_rows(const Inputs<T>& all, Layout layout, int64_t c_begin, int64_t c_end, const AffineView& affine,
                        T* d_residual, double* sums, double* centred) {
  using A = typename Storage<T>::Compute;
  using Read = Reader<T, kSource>;
  for (int64_t c = c_begin; c < c_end; ++c) sums[c] = centred[c] = 0;
  for (int64_t o = 0; o < layout.outer; ++o) {
    for (int64_t c = c_begin; c < c_end; ++c) {
      const Channel<A> channel(affine, c);
      for (int64_t begin = 0; begin < layout.inner; begin += kBlock) {
        const int64_t size = layout.inner - begin < kBlock ? layout.inner - begin : kBlock;
        const int64_t start = (o * layout.channels + c) * layout.inner + begin;
        const Inputs<T> input(all, start);
        T* to = kResidual == ResidualGradient::kNone ? nullptr : d_residual + start;
        A s[kLanes] = {}, p[kLanes] = {};
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) {
          for (int l = 0; l < kLanes; ++l) {
            const A value = Read::value(channel, input.values[i + l]);
            const A gradient = Read::gradient(channel, value, input.out[i + l], input.d_out[i + l]);
            store_residual_gradient<T, kResidual>(to + i + l, gradient);
            s[l] += gradient;
            p[l] += gradient * (value - channel.shift);
          }
        }
        for (int l = 0; i < size; ++i, ++l) {
          const A value = Read::value(channel, input.values[i]);
          const A gradient = Read::gradient(channel, value, input.out[i], input.d_out[i]);
          store_residual_gradient<T, kResidual>(to + i, gradient);
          s[l] += gradient;
          p[l] += gradient * (value - channel.shift);
        }
        double sum = 0, product = 0;
        for (int l = 0; l < kLanes; ++l) {
          sum += s[l];
          product += p[l];
        }
        sums[c] += sum;
        centred[c] += product;
      }
    }
  }
}

template <typename T, Source kSource, ResidualGradient kResidual>
void gradient_sums_columns(const Inputs<T>& all, Layout layout, int64_t c_begin, int64_t c_end,
                           const AffineView& affine, T* d_residual, double* sums, double* centred) {
  using A = typename Storage<T>::Compute;
  using Read = Reader<T, kSource>;
  for (int64_t c = c_begin; c < c_end; ++c) sums[c] = centred[c] = 0;
  for (int64_t c0 = c_begin; c0 < c_end; c0 += kChannelBlock) {
    const int64_t width = c_end - c0 < kChannelBlock ? c_end - c0 : kChannelBlock;
    const Columns<A> columns(affine, c0, width);
    A s[kChannelBlock], p[kChannelBlock];
    for (int64_t o0 = 0; o0 < layout.outer; o0 += kRowBlock) {
      const int64_t rows = layout.outer - o0 < kRowBlock ? layout.outer - o0 : kRowBlock;
      for (int64_t c = 0; c < width; ++c) s[c] = p[c] = 0;
      for (int64_t o = o0; o < o0 + rows; ++o) {
        const int64_t start = o * layout.channels + c0;
        const Inputs<T> input(all, start);
        T* to = kResidual == ResidualGradient::kNone ? nullptr : d_residual + start;
        for (int64_t c = 0; c < width; ++c) {
          const Channel<A> channel = columns[c];
          const A value = Read::value(channel, input.values[c]);
          const A gradient = Read::gradient(channel, value, input.out[c], input.d_out[c]);
          store_residual_gradient<T, kResidual>(to + c, gradient);
          s[c] += gradient;
          p[c] += gradient * (value - channel.shift);
        }
      }
      for (int64_t c = 0; c < width; ++c) {
        sums[c0 + c] += s[c];
        centred[c0 + c] += p[c];
      }
    }
  }
}

template <typename T, Source kSource, ResidualGradient kResidual>
void gradient_sums_as(const BackwardInput& input, Layout layout, int64_t c_begin, int64_t c_end,
                      const AffineView& affine, void* d_residual, double* sums, double* centred) {
  const auto pass =
      layout.inner == 1 ? gradient_sums_columns<T, kSource, kResidual> : gradient_sums_rows<T, kSource, kResidual>;
  pass(Inputs<T>(input), layout, c_begin, c_end, affine, static_cast<T*>(d_residual), sums, centred);
}

template <typename T>
void gradient_sums_of(const BackwardInput& input, Layout layout, int64_t c_begin, int64_t c_end,
                      const AffineView& affine, void* d_residual, bool add_to_residual, double* sums, double* centred) {
  constexpr auto kNone = ResidualGradient::kNone;
  auto pass = gradient_sums_as<T, Source::kInput, kNone>;
  switch (source_of(input, affine.activation.kind)) {
    case Source::kInputReLU:
      pass = gradient_sums_as<T, Source::kInputReLU, kNone>;
      break;
    case Source::kInputLeakyReLU:
      pass = gradient_sums_as<T, Source::kInputLeakyReLU, kNone>;
      break;
    case Source::kInputAndOutput:
      pass = !d_residual       ? gradient_sums_as<T, Source::kInputAndOutput, kNone>
             : add_to_residual ? gradient_sums_as<T, Source::kInputAndOutput, ResidualGradient::kAdd>
                               : gradient_sums_as<T, Source::kInputAndOutput, ResidualGradient::kWrite>;
      break;
    case Source::kOutputLeakyReLU:
      pass = gradient_sums_as<T, Source::kOutputLeakyReLU, kNone>;
      break;
    case Source::kInput:
    case Source::kOutput:  // the same, of other values
      break;
  }
  pass(input, layout, c_begin, c_end, affine, d_residual, sums, centred);
}
