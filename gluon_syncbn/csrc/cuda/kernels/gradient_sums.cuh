// Σ dz and Σ dz·(v − shift), where dz is the gradient of z. From these come
// S1 = Σ dz = dβ and S2 = Σ dz·x̂ = dγ. Where there is a residual, dz is also its gradient, and y shows where the ReLU
// let it pass.

template <int S, bool kResidual>
struct GradientSumsPass {
  __device__ explicit GradientSumsPass(const GradientSumsArguments& arguments)
      : x(arguments.x),
        dy(arguments.dy),
        y(arguments.y),
        d_residual(arguments.d_residual),
        residual_request(arguments.residual_request) {
    affine.epilogue = epilogue_of(arguments);
#pragma unroll
    for (int s = 0; s < S; ++s) sum[s] = centred[s] = 0;
  }

  const value_t *x, *dy, *y;
  value_t* d_residual;
  int residual_request;
  Affine<S> affine;
  real_t sum[S], centred[S];

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    real_t values[kUnroll][V], gradients[kUnroll][V], outs[kUnroll][V];
    load_packs<V>(x + offset, stride, packs, values);
    load_packs<V>(dy + offset, stride, packs, gradients);
    if (kResidual) load_packs<V>(y + offset, stride, packs, outs);
    // Each chunk is added up on its own, which keeps the sums of long channels short.
    real_t sums[S], products[S];
#pragma unroll
    for (int s = 0; s < S; ++s) sums[s] = products[s] = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int s = S == 1 ? 0 : i;
        const real_t value = affine.epilogue.value(values[u][i]);
        real_t& gradient = gradients[u][i];
        if (kResidual) {
          gradient = outs[u][i] <= 0 ? real_t(0) : gradient;
        } else {
          gradient = affine.passed(s, value, gradient);
        }
        sums[s] += gradient;
        products[s] = multiply_add(gradient, value - affine.shift[s], products[s]);
      }
      if (kResidual) store_residual_gradient<V>(d_residual + offset + u * stride, gradients[u]);
    }
#pragma unroll
    for (int s = 0; s < S; ++s) {
      sum[s] += sums[s];
      centred[s] += products[s];
    }
  }

  template <int V>
  __device__ void store_residual_gradient(value_t* to, real_t (&gradient)[V]) const {
    if (residual_request == 0) return;
    if (residual_request == 3) {
      real_t before[V];
      Access<V>::load(to, before);
#pragma unroll
      for (int i = 0; i < V; ++i) gradient[i] += before[i];
    }
    Access<V>::store(to, gradient);
  }
};

__device__ inline void store_gradient(real_t* to, double value, int request) {
  if (request != 0) *to = static_cast<real_t>(request == 3 ? *to + value : value);
}

// `pass` on every thread of the block → dγ and dβ, and the message: S1[C], S2[C], the three numbers that the forward
// pass has left in `saved` (count, round_id, active_set), and in place for each channel whether another γ was taken.
template <int S, bool kResidual>
__device__ inline void finish_sums(const GradientSumsArguments& arguments, const Place& place,
                                   GradientSumsPass<S, kResidual>& pass, double* shared) {
  real_t* real_shared = reinterpret_cast<real_t*>(shared);
  const Shape shape = shape_of(arguments);
  double* const partials = arguments.partials;
  double* const message = arguments.message;
  const bool leads = place.position == 0;
  add_up<real_t, S>(real_shared, place, pass.sum);
  add_up<real_t, S>(real_shared, place, pass.centred);
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 c = place.channel + s;
    if (leads && c < shape.channels) {
      partials[partial_at(shape, 0, blockIdx.y, c)] = pass.sum[s];
      partials[partial_at(shape, 1, blockIdx.y, c)] = pass.centred[s];
    }
  }
  if (!is_last_of_tile(arguments.counters)) return;
  const volatile double* left = partials;
  double sums[S], centred[S];
#pragma unroll
  for (int s = 0; s < S; ++s) sums[s] = centred[s] = 0;
  for (int part = place.position; part < static_cast<int>(gridDim.y); part += place.size) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 c = place.channel + s;
      if (c < shape.channels) {
        sums[s] += left[partial_at(shape, 0, part, c)];
        centred[s] += left[partial_at(shape, 1, part, c)];
      }
    }
  }
  add_up<double, S>(shared, place, sums);
  add_up<double, S>(shared, place, centred);
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 c = place.channel + s;
    if (!leads || c >= shape.channels) continue;
    const Saved then(arguments, c);
    const double s2 =
        then.xhat_scale * (centred[s] - (then.center - static_cast<double>(pass.affine.shift[s])) * sums[s]);
    message[1 + c] = sums[s];
    message[1 + shape.channels + c] = s2;
    if (arguments.in_place) message[4 + 2 * shape.channels + c] = then.moved;
    store_gradient(arguments.d_beta + c, sums[s], arguments.beta_request);
    store_gradient(arguments.d_gamma + c, arguments.has_scale ? then.r * s2 + then.d * sums[s] : 0,
                   arguments.gamma_request);
    if (c == 0) {
      for (int i = 0; i < 3; ++i) message[1 + 2 * shape.channels + i] = call_of(arguments)[i];
    }
  }
  finish_tile(arguments.counters, message, arguments.ticket);
}

template <typename Threads, bool kResidual>
__device__ inline void run(const GradientSumsArguments& arguments) {
  constexpr int S = Threads::kChannels;
  __shared__ double shared[S * kThreads];
  const Place place = Threads::place();
  GradientSumsPass<S, kResidual> pass(arguments);
  affine_from_saved(arguments, place, pass.affine);
  hand_out(reinterpret_cast<real_t*>(shared), place, pass.affine);
  Threads::walk(shape_of(arguments), arguments.x, arguments.aligned, place, pass);
  finish_sums(arguments, place, pass, shared);
}
