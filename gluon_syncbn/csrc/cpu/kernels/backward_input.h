// What the backward passes read: v and dz (see BackwardInput).

enum class Source : int {
  kInput,           // v = x, no activation
  kInputReLU,       // v = x
  kInputLeakyReLU,  // v = x
  kInputAndOutput,  // v = x, and y shows what the ReLU after a residual did
  kOutput,          // v = y, no activation
  kOutputLeakyReLU  // v = z, from y
};

inline Source source_of(const BackwardInput& input, Activation::Kind kind) {
  if (input.in_place) return kind == Activation::kLeakyReLU ? Source::kOutputLeakyReLU : Source::kOutput;
  if (input.out && kind == Activation::kReLU) return Source::kInputAndOutput;
  if (kind == Activation::kReLU) return Source::kInputReLU;
  return kind == Activation::kLeakyReLU ? Source::kInputLeakyReLU : Source::kInput;
}

// Gradients where z was NaN are kept: they must not be lost.
template <typename T, Source kSource>
struct Reader {
  using A = typename Storage<T>::Compute;

  static inline A value(const Channel<A>& channel, T stored) {
    A v = Storage<T>::load(stored);
    if constexpr (kSource == Source::kOutputLeakyReLU) v = v <= 0 ? v / channel.slope : v;
    return v;
  }

  static inline A gradient(const Channel<A>& channel, A v, T out, T d_out) {
    const A dy = Storage<T>::load(d_out);
    if constexpr (kSource == Source::kInputReLU) return channel.apply(v) <= 0 ? A(0) : dy;
    if constexpr (kSource == Source::kInputLeakyReLU) return channel.apply(v) <= 0 ? channel.slope * dy : dy;
    if constexpr (kSource == Source::kInputAndOutput) return Storage<T>::load(out) <= 0 ? A(0) : dy;
    if constexpr (kSource == Source::kOutputLeakyReLU) return v <= 0 ? channel.slope * dy : dy;
    return dy;
  }
};

// Where one row, or the channels of one place, begin.
template <typename T>
struct Inputs {
  const T *values, *out, *d_out;

  explicit Inputs(const BackwardInput& input)
      : values(static_cast<const T*>(input.values)),
        out(static_cast<const T*>(input.out ? input.out : input.values)),
        d_out(static_cast<const T*>(input.d_out)) {}
  Inputs(const Inputs& all, int64_t start)
      : values(all.values + start), out(all.out + start), d_out(all.d_out + start) {}
};
