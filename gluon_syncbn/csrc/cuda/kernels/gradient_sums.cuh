// Σ dz and Σ dz·(v − shift), where dz is the gradient of z. From these come
// S1 = Σ dz = dβ and S2 = Σ dz·x̂ = dγ. Where there is a residual, dz is also its gradient, and y shows where the ReLU
// let it pass.

template <int S>
struct GradientSumsPass {
  const value_t *x, *dy, *y;
  value_t* d_residual;
  int residual_request;
  real_t slope;
  Affine<S> affine;
  real_t sums[2 * S];  // Σ dz, then Σ dz·(v − shift)

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    const Packs<V> loaded(x + offset, stride, packs);
    const Packs<V> incoming(dy + offset, stride, packs);
    const Packs<V> outputs(y + offset, stride, kResidual ? packs : 0);
    // Each chunk is added up on its own, which keeps the sums of long channels short.
    real_t chunk[2 * S];
#pragma unroll
    for (int s = 0; s < 2 * S; ++s) chunk[s] = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
      real_t values[V], gradients[V], outs[V];
      loaded.raw[u].unpack(values);
      incoming.raw[u].unpack(gradients);
      if (kResidual) outputs.raw[u].unpack(outs);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int s = S == 1 ? 0 : i;
        const real_t value = value_of(values[i], slope);
        real_t& gradient = gradients[i];
        if (kResidual) {
          gradient = outs[i] <= 0 ? real_t(0) : gradient;
        } else {
          gradient = affine.passed(s, value, gradient, slope);
        }
        chunk[s] += gradient;
        chunk[S + s] = multiply_add(gradient, value - affine.shift[s], chunk[S + s]);
      }
      if (kResidual) store_residual_gradient<V>(d_residual + offset + u * stride, gradients);
    }
#pragma unroll
    for (int s = 0; s < 2 * S; ++s) sums[s] += chunk[s];
  }

  template <int V>
  __device__ void store_residual_gradient(value_t* to, real_t (&gradient)[V]) const {
    if (residual_request == 0) return;
    if (residual_request == 3) {
      Raw<V> before;
      real_t values[V];
      before.load(to);
      before.unpack(values);
#pragma unroll
      for (int i = 0; i < V; ++i) gradient[i] += values[i];
    }
    Raw<V>::store(to, gradient);
  }
};

// What the blocks of a tile have left for the channels of a thread.
template <int S>
struct GradientParts {
  const double* partials;
  const Shape& shape;
  int64 channel;
  double sums[2 * S];

  template <int N>
  __device__ void take(int part, int step) {
    double gradients[N][S], products[N][S];
    load_parts(partials, shape, 0, part, step, channel, gradients);
    load_parts(partials, shape, 1, part, step, channel, products);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int s = 0; s < S; ++s) {
        sums[s] += gradients[n][s];
        sums[S + s] += products[n][s];
      }
    }
  }
};

__device__ inline void store_gradient(real_t* to, double value, int request) {
  if (request != 0) *to = static_cast<real_t>(request == 3 ? *to + value : value);
}

// `pass` on every thread of the block → dγ and dβ, and the message: S1[C], S2[C], the three numbers that the forward
// pass has left in `saved` (count, round_id, active_set), and in place for each channel whether another γ was taken.
template <int S>
__device__ inline void finish_sums(const GradientSumsArguments& arguments, const Place& place,
                                   GradientSumsPass<S>& pass) {
  __shared__ double shared[2 * S * kThreads];
  const Shape& shape = arguments.shape;
  double* const partials = arguments.memory.partials;
  double* const message = arguments.memory.message;
  const bool leads = place.position == 0;
  add_up<real_t, 2 * S>(reinterpret_cast<real_t*>(shared), place, pass.sums);
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 c = place.channel + s;
    if (leads && c < shape.channels) {
      partials[partial_at(shape, 0, blockIdx.y, c)] = pass.sums[s];
      partials[partial_at(shape, 1, blockIdx.y, c)] = pass.sums[S + s];
    }
  }
  if (!is_last_of_tile(arguments.memory.counters)) return;
  GradientParts<S> whole = {partials, shape, place.channel, {}};
  over_parts<S>(place, whole);
  add_up<double, 2 * S>(shared, place, whole.sums);
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 c = place.channel + s;
    if (!leads || c >= shape.channels) continue;
    const Saved then(arguments, c);
    const double s1 = whole.sums[s];
    const double s2 =
        then.xhat_scale * (whole.sums[S + s] - (then.center - static_cast<double>(pass.affine.shift[s])) * s1);
    message[1 + c] = s1;
    message[1 + shape.channels + c] = s2;
    if (kInPlace) message[4 + 2 * shape.channels + c] = then.moved;
    store_gradient(arguments.d_beta + c, s1, arguments.beta_request);
    store_gradient(arguments.d_gamma + c, arguments.gamma ? then.r * s2 + then.d * s1 : 0, arguments.gamma_request);
    if (c == 0) {
      for (int i = 0; i < 3; ++i) message[1 + 2 * shape.channels + i] = call_of(arguments)[i];
    }
  }
  finish_tile(arguments.memory);
}

template <typename Threads>
__device__ inline void run(const GradientSumsArguments& arguments) {
  constexpr int S = Threads::kChannels;
  const Shape& shape = arguments.shape;
  const Place place = Threads::place();
  prefetch_first<Threads, false>(shape, place, arguments.x, arguments.dy, kResidual ? arguments.y : nullptr);
  GradientSumsPass<S> pass;
  pass.x = arguments.x;
  pass.dy = arguments.dy;
  pass.y = arguments.y;
  pass.d_residual = arguments.d_residual;
  pass.residual_request = arguments.residual_request;
  pass.slope = static_cast<real_t>(arguments.slope);
  SavedChannel<GradientSumsArguments> compute = {arguments};
  real_t known[3 * S];
  prepare<S, 3, false>(shape, arguments.memory, place, compute, known);
  pass.affine.take(known);
#pragma unroll
  for (int s = 0; s < 2 * S; ++s) pass.sums[s] = 0;
  Threads::template walk<false, false>(shape, pass.x, place, pass);
  finish_sums(arguments, place, pass);
}
