// The two passes of the forward direction.

// The moments of x, in one pass over memory. A thread computes mean and centred squares of each chunk by two passes
// over registers, and merges them into its own (Chan, Golub and LeVeque, 1979). It subtracts the channel's first value
// from all values, so that a mean that is large against the deviation costs no digits.

template <typename T>
struct Moments {
  enum { kCounts = 1 };
  T count, a, b;  // mean and M2

  __device__ void merge(const Moments& other) {
    if (!(other.count > 0)) return;
    const T total = count + other.count, distance = other.a - a;
    // The first moments that are merged keep every bit.
    const T share = count > 0 ? quotient(static_cast<real_t>(other.count), static_cast<real_t>(total)) : T(1);
    a = multiply_add(distance, share, a);
    b += multiply_add(distance * count, distance * share, other.b);
    count = total;
  }
};

template <int S>
struct MomentsPass : Tensors<kUnroll, 1> {
  real_t origin[S];
  real_t count, mean[S], m2[S];

  template <typename Loaded, typename Places>
  __device__ void take(const Loaded& loaded, const Places&, int packs) {
    constexpr int V = Loaded::kValues;
    constexpr int kPerChannel = S == 1 ? V : 1;  // of a pack
    const real_t size = static_cast<real_t>(packs * kPerChannel);
    const real_t share = 1 / size;
    real_t sum[S], squares[S];
#pragma unroll
    for (int s = 0; s < S; ++s) sum[s] = squares[s] = 0;
#pragma unroll
    for (int n = 0; n < this->kAtOnce; ++n) {
      if (n >= packs) continue;
      real_t values[V];
      loaded.of[0].raw[n].unpack(values);
#pragma unroll
      for (int i = 0; i < V; ++i) sum[S == 1 ? 0 : i] += values[i] - origin[S == 1 ? 0 : i];
    }
#pragma unroll
    for (int s = 0; s < S; ++s) sum[s] *= share;  // now the mean
#pragma unroll
    for (int n = 0; n < this->kAtOnce; ++n) {
      if (n >= packs) continue;
      real_t values[V];
      loaded.of[0].raw[n].unpack(values);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int s = S == 1 ? 0 : i;
        const real_t distance = values[i] - origin[s] - sum[s];
        squares[s] = multiply_add(distance, distance, squares[s]);
      }
    }
    const real_t before = count;
    count += size;
    const real_t weight = size / count;
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const real_t distance = sum[s] - mean[s];
      mean[s] = multiply_add(distance, weight, mean[s]);
      m2[s] += multiply_add(distance * before, distance * weight, squares[s]);
    }
  }
};

template <typename Threads>
__device__ inline void run(const MomentsArguments& arguments) {
  constexpr int S = Threads::kColumns;
  const Shape& shape = arguments.shape;
  const value_t* const x = arguments.x;
  const int64 c = first_channel(shape) + thread_number();  // this thread may have to tell its moments
  const double origin = has_channel(shape, thread_number()) ? widen(x[c * shape.inner]) : 0;
  MomentsPass<S> pass;
  pass.tensors[0] = x;
  pass.count = 0;
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 own = first_channel(shape) + Threads::channel(shape, s);
    pass.origin[s] = own < shape.channels ? widen(x[own * shape.inner]) : 0;
    pass.mean[s] = pass.m2[s] = 0;
  }
  Nothing nothing;
  Whole<Threads, false>::walk(shape, x, pass, nothing);

  if (!add_up<Moments, Threads>(shape, arguments.memory, pass.count, pass.mean, pass.m2)) return;
  // The message: mean[C] and M2[C], and for Batch Renormalization the running mean[C] and variance[C].
  double* const message = arguments.memory.message;
  tell(message + c, origin + total(0, thread_number()));
  tell(message + shape.channels + c, total(1, thread_number()));
  if (arguments.running_mean) {
    tell(message + 2 * shape.channels + c, arguments.running_mean[c]);
    tell(message + 3 * shape.channels + c, arguments.running_var[c]);
  }
}

// Computes y, the running statistics, and `saved` for the backward pass.

template <int S>
struct NormalizePass : Tensors<kResidual ? kUnroll / 2 : kUnroll, 1 + kResidual> {
  value_t* y;
  real_t slope;
  const real_t* known;  // see Prepare

  template <typename Loaded, typename Places>
  __device__ void take(const Loaded& loaded, const Places& at, int packs) const {
    constexpr int V = Loaded::kValues;
    const Affine<S> affine(known);
#pragma unroll
    for (int n = 0; n < this->kAtOnce; ++n) {
      if (n >= packs) continue;
      real_t values[V], residuals[V];
      loaded.of[0].raw[n].unpack(values);
      if (kResidual) loaded.of[kResidual].raw[n].unpack(residuals);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const real_t z = affine.apply(S == 1 ? 0 : i, values[i]);
        values[i] = activate(kResidual ? widen(narrow(z)) + residuals[i] : z, slope);
      }
      Raw<V>::store(y + at(n), values);
    }
  }
};

// Computes the affine map of a channel and, once, the running statistics and `saved`. In training mode `message` holds
// mean[C] and variance[C] of all devices, and with `renorm` r[C] and d[C].
//
// Running statistics need no order among blocks: in prediction mode no block writes them, and in training mode only one
// block reads and writes the statistics of a channel.
struct NormalizeChannel {
  const NormalizeArguments& arguments;

  __device__ void operator()(int64 c, bool is_first, real_t* out) const {
    const int64 channels = arguments.shape.channels;
    const double* const message = arguments.memory.message;
    const bool training = arguments.training, renorm = arguments.renorm;
    const double mean = training ? message[c] : arguments.running_mean[c];
    const double variance = training ? message[channels + c] : arguments.running_var[c];
    const double r = renorm ? message[2 * channels + c] : 1;
    const double d = renorm ? message[3 * channels + c] : 0;
    double gamma = arguments.gamma ? arguments.gamma[c] : 1, beta = arguments.beta[c];
    const double invstd = 1 / sqrt(variance + arguments.epsilon);
    effective(kFromOutput && (training || arguments.saved), r, d, gamma, beta);
    set_affine(mean, gamma * invstd, beta, out);
    if (!is_first) return;
    if (training) {
      const double momentum = arguments.momentum;
      arguments.running_mean[c] = static_cast<real_t>(arguments.running_mean[c] * momentum + mean * (1 - momentum));
      arguments.running_var[c] = static_cast<real_t>(arguments.running_var[c] * momentum + variance * (1 - momentum));
    }
    double* const saved = arguments.saved;
    if (!saved) return;
    saved[c] = mean;
    saved[channels + c] = invstd;
    saved[2 * channels + c] = r;
    saved[3 * channels + c] = d;
    if (c == 0) {
      saved[4 * channels] = arguments.count;
      saved[4 * channels + 1] = arguments.round_id;
      saved[4 * channels + 2] = arguments.active_set;
    }
  }
};

template <typename Threads>
__device__ inline void run(const NormalizeArguments& arguments) {
  const NormalizeChannel channel = {arguments};
  Prepare<Threads, 3, NormalizeChannel> prepare(arguments.shape, channel);
  if (!arguments.y) return prepare();
  NormalizePass<Threads::kColumns> pass;
  pass.tensors[kResidual] = arguments.residual;  // without a residual, x takes this place
  pass.tensors[0] = arguments.x;
  pass.y = arguments.y;
  pass.slope = static_cast<real_t>(arguments.slope);
  pass.known = prepare.values;
  Whole<Threads, true>::walk(arguments.shape, arguments.x, pass, prepare);
}
