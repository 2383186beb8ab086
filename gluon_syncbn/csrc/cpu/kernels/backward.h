// The two passes of the backward direction. Both read v and dz (see BackwardInput):
//
//   gradient sums    Σ dz and Σ dz·(v − shift), and the gradient of a residual
//   input gradient   dx = scale·dz + by·(v − shift) + constant

enum class Source : int {
  kInput,           // v = x, or y from_output, no activation
  kInputReLU,       // v = x
  kInputLeakyReLU,  // v = x
  kInputAndOutput,  // v = x, and y shows where the ReLU after a residual was 0
  kOutputLeakyReLU  // v = z, from y
};

template <typename T, T kValue>
struct Constant {
  static constexpr T value = kValue;
};

// Calls `pass` with the source as a constant.
template <typename Pass>
inline void with_source(const BackwardInput& input, Activation::Kind kind, const Pass& pass) {
  if (kind == Activation::kLeakyReLU && input.from_output) return pass(Constant<Source, Source::kOutputLeakyReLU>());
  if (kind == Activation::kLeakyReLU) return pass(Constant<Source, Source::kInputLeakyReLU>());
  if (kind == Activation::kReLU && input.out) return pass(Constant<Source, Source::kInputAndOutput>());
  if (kind == Activation::kReLU) return pass(Constant<Source, Source::kInputReLU>());
  pass(Constant<Source, Source::kInput>());
}

template <typename T, Source kSource>
struct Reader {
  using A = typename Storage<T>::Compute;

  const T *values, *out, *d_out;

  Reader(const BackwardInput& input, int64_t start)
      : values(static_cast<const T*>(input.values) + start),
        out(static_cast<const T*>(input.out ? input.out : input.values) + start),
        d_out(static_cast<const T*>(input.d_out) + start) {}

  inline A value(const ChannelTerms<A>& channel, int64_t at) const {
    A v = Storage<T>::load(values[at]);
    if constexpr (kSource == Source::kOutputLeakyReLU) v = v <= 0 ? v / channel.slope : v;
    return v;
  }

  // Gradients where z was NaN are kept: they must not be lost.
  inline A gradient(const ChannelTerms<A>& channel, A v, int64_t at) const {
    const A dy = Storage<T>::load(d_out[at]);
    if constexpr (kSource == Source::kInputReLU) return channel.normalize(v) <= 0 ? A(0) : dy;
    if constexpr (kSource == Source::kInputLeakyReLU) return channel.normalize(v) <= 0 ? channel.slope * dy : dy;
    if constexpr (kSource == Source::kInputAndOutput) return Storage<T>::load(out[at]) <= 0 ? A(0) : dy;
    if constexpr (kSource == Source::kOutputLeakyReLU) return v <= 0 ? channel.slope * dy : dy;
    return dy;
  }
};

// Writes a gradient, or adds it to the stored one.
template <typename T, bool kAdd>
inline void store_gradient(T* to, typename Storage<T>::Compute gradient) {
  *to = Storage<T>::store(kAdd ? Storage<T>::load(*to) + gradient : gradient);
}

template <typename T, Source kSource, bool kResidual, bool kAdd>
void gradient_sums_as(const BackwardInput& input, Layout layout, int64_t c_begin, int64_t c_end, const View& view,
                      void* d_residual, double* sums, double* centred) {
  using A = typename Storage<T>::Compute;
  for (int64_t c = c_begin; c < c_end; ++c) sums[c] = centred[c] = 0;
  over_tiles<A, 3, Rows::kTogether>(
      layout, c_begin, c_end, view, [=](const auto& tile, const auto& channels) __attribute__((always_inline)) {
        const Reader<T, kSource> read(input, tile.start);
        T* to = kResidual ? static_cast<T*>(d_residual) + tile.start : nullptr;
        tile.template sum<A>(
            [&](int64_t at, int64_t i, A & sum, A & product) __attribute__((always_inline)) {
              const ChannelTerms<A> channel = channels[i];
              const A value = read.value(channel, at), gradient = read.gradient(channel, value, at);
              if constexpr (kResidual) store_gradient<T, kAdd>(to + at, gradient);
              sum += gradient;
              product += gradient * (value - channel.shift);
            },
            [&](int64_t c, double sum, double product) {
              sums[tile.first + c] += sum;
              centred[tile.first + c] += product;
            });
      });
}

template <typename T>
void gradient_sums_of(const BackwardInput& input, Layout layout, int64_t c_begin, int64_t c_end, const View& view,
                      void* d_residual, bool add_to_residual, double* sums, double* centred) {
  with_source(input, view.activation.kind, [=](auto source) {
    auto pass = gradient_sums_as<T, source.value, false, false>;
    if constexpr (source.value == Source::kInputAndOutput) {
      if (d_residual) {
        pass = add_to_residual ? gradient_sums_as<T, source.value, true, true>
                               : gradient_sums_as<T, source.value, true, false>;
      }
    }
    pass(input, layout, c_begin, c_end, view, d_residual, sums, centred);
  });
}

template <typename T, Source kSource, bool kAdd>
void input_gradient_as(const BackwardInput& input, Layout layout, int64_t c_begin, int64_t c_end, const View& view,
                       void* dx) {
  using A = typename Storage<T>::Compute;
  over_tiles<A, 5, Rows::kOneByOne>(
      layout, c_begin, c_end, view, [=](const auto& tile, const auto& channels) __attribute__((always_inline)) {
        const Reader<T, kSource> read(input, tile.start);
        T* to = static_cast<T*>(dx) + tile.start;
        tile.for_each([&](int64_t at, int64_t i) __attribute__((always_inline)) {
          const ChannelTerms<A> channel = channels[i];
          const A value = read.value(channel, at);
          store_gradient<T, kAdd>(to + at, channel.correct(value, read.gradient(channel, value, at)));
        });
      });
}

template <typename T>
void input_gradient_of(const BackwardInput& input, Layout layout, int64_t c_begin, int64_t c_end, const View& view,
                       void* dx, bool add) {
  with_source(input, view.activation.kind, [=](auto source) {
    const auto pass = add ? input_gradient_as<T, source.value, true> : input_gradient_as<T, source.value, false>;
    pass(input, layout, c_begin, c_end, view, dx);
  });
}
