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
