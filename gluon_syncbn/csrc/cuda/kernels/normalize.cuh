// Computes y, the running statistics, and what the backward pass needs.

template <int S, bool kResidual>
struct NormalizePass {
  __device__ explicit NormalizePass(const NormalizeArguments& arguments)
      : x(arguments.x), residual(arguments.residual), y(arguments.y) {
    affine.epilogue = epilogue_of(arguments);
  }

  const value_t *x, *residual;
  value_t* y;
  Affine<S> affine;

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    real_t values[kUnroll][V], residuals[kUnroll][V];
    load_packs<V>(x + offset, stride, packs, values);
    if (kResidual) load_packs<V>(residual + offset, stride, packs, residuals);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const real_t z = affine.apply(S == 1 ? 0 : i, values[u][i]);
        values[u][i] = affine.epilogue.activate(kResidual ? widen(narrow(z)) + residuals[u][i] : z);
      }
      Access<V>::store(y + offset + u * stride, values[u]);
    }
  }
};

// The affine map of this thread's channels; and once per channel, the running statistics and `saved`. In training mode
// `message` holds mean[C] and variance[C] of all devices, from place 1 on, and with `renorm` r[C] and d[C].
//
// Running statistics need no order among blocks: in prediction mode none writes them, and in training mode only the
// block that writes those of a channel reads them.
template <int S>
__device__ inline void prepare(const NormalizeArguments& arguments, const Place& place, Affine<S>& affine) {
  const Shape shape = shape_of(arguments);
  const double* const message = arguments.message;
  real_t* const running_mean = arguments.running_mean;
  real_t* const running_var = arguments.running_var;
  double* const saved = arguments.saved;
  const double momentum = arguments.momentum;
  const int training = arguments.training, renorm = arguments.renorm, wants_saved = arguments.wants_saved;
  if (place.position != 0) return;
  // All reads over the bus are issued first, so that their latencies overlap.
  double times[S], bias[S], mean[S], variance[S], r[S], d[S];
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 c = place.channel + s < shape.channels ? place.channel + s : shape.channels - 1;
    mean[s] = training ? message[1 + c] : running_mean[c];
    variance[s] = training ? message[1 + shape.channels + c] : running_var[c];
    r[s] = renorm ? message[1 + 2 * shape.channels + c] : 1;
    d[s] = renorm ? message[1 + 3 * shape.channels + c] : 0;
    times[s] = arguments.has_scale ? arguments.gamma[c] : 1;
    bias[s] = arguments.beta[c];
  }
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 c = place.channel + s;
    if (c >= shape.channels) continue;
    const double invstd = 1 / sqrt(variance[s] + arguments.epsilon);
    effective((training || wants_saved) && arguments.in_place, r[s], d[s], times[s], bias[s]);
    affine.set(s, mean[s], times[s] * invstd, bias[s]);
    if (blockIdx.y != 0) continue;  // once per channel
    if (training) {
      running_mean[c] = static_cast<real_t>(running_mean[c] * momentum + mean[s] * (1 - momentum));
      running_var[c] = static_cast<real_t>(running_var[c] * momentum + variance[s] * (1 - momentum));
    }
    if (wants_saved) {
      saved[c] = mean[s];
      saved[shape.channels + c] = invstd;
      saved[2 * shape.channels + c] = r[s];
      saved[3 * shape.channels + c] = d[s];
      if (c == 0) {
        saved[4 * shape.channels] = arguments.count;
        saved[4 * shape.channels + 1] = arguments.round_id;
        saved[4 * shape.channels + 2] = arguments.active_set;
      }
    }
  }
}

template <typename Threads, bool kResidual>
__device__ inline void run(const NormalizeArguments& arguments) {
  constexpr int S = Threads::kChannels;
  __shared__ real_t shared[S * kThreads];
  const Place place = Threads::place();
  NormalizePass<S, kResidual> pass(arguments);
  prepare(arguments, place, pass.affine);
  hand_out(shared, place, pass.affine);
  if (arguments.wants_y) Threads::walk(shape_of(arguments), arguments.x, arguments.aligned, place, pass);
}
