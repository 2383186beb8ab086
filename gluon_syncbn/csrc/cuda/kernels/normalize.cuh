// Computes y, the running statistics, and what the backward pass needs.

template <int S>
struct NormalizePass {
  const value_t *x, *residual;
  value_t* y;
  real_t slope;
  Affine<S> affine;

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    const Packs<V> loaded(x + offset, stride, packs);
    const Packs<V> added(residual + offset, stride, kResidual ? packs : 0);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
      real_t values[V], residuals[V];
      loaded.raw[u].unpack(values);
      if (kResidual) added.raw[u].unpack(residuals);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const real_t z = affine.apply(S == 1 ? 0 : i, values[i]);
        values[i] = activate(kResidual ? widen(narrow(z)) + residuals[i] : z, slope);
      }
      Raw<V>::store(y + offset + u * stride, values);
    }
  }
};

// The affine map of a channel; and once, the running statistics and `saved`. In training mode `message` holds mean[C]
// and variance[C] of all devices, from place 1 on, and with `renorm` r[C] and d[C].
//
// Running statistics need no order among blocks: in prediction mode none writes them, and in training mode only the
// block that writes those of a channel reads them.
struct NormalizeChannel {
  const NormalizeArguments& arguments;

  __device__ void operator()(int64 c, bool is_first, real_t* out) const {
    const int64 channels = arguments.shape.channels;
    const double* const message = arguments.memory.message;
    const bool training = arguments.training, renorm = arguments.renorm;
    const double mean = training ? message[1 + c] : arguments.running_mean[c];
    const double variance = training ? message[1 + channels + c] : arguments.running_var[c];
    const double r = renorm ? message[1 + 2 * channels + c] : 1;
    const double d = renorm ? message[1 + 3 * channels + c] : 0;
    double gamma = arguments.gamma ? arguments.gamma[c] : 1, beta = arguments.beta[c];
    const double invstd = 1 / sqrt(variance + arguments.epsilon);
    effective(kInPlace && (training || arguments.saved), r, d, gamma, beta);
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
  constexpr int S = Threads::kChannels;
  const Shape& shape = arguments.shape;
  const Place place = Threads::place();
  const value_t* const residual = kResidual ? arguments.residual : nullptr;
  if (arguments.y) prefetch_first<Threads, kBackwards>(shape, place, arguments.x, residual, nullptr);
  NormalizeChannel compute = {arguments};
  real_t known[3 * S];
  prepare<S, 3, true>(shape, arguments.memory, place, compute, known);
  if (!arguments.y) return;
  NormalizePass<S> pass;
  pass.x = arguments.x;
  pass.residual = arguments.residual;
  pass.y = arguments.y;
  pass.slope = static_cast<real_t>(arguments.slope);
  pass.affine.take(known);
  Threads::template walk<kBackwards, false>(shape, pass.x, place, pass);
}
