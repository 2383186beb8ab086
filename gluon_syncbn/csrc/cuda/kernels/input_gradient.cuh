// dx = factor·dz + slope·(v − shift) + constant, with dz as in gradient_sums.cuh. `message` holds ΣS1[C] and ΣS2[C] of
// all devices, from place 1 on; they count only if `saved` says that the statistics depended on x.

template <int S, bool kResidual>
struct InputGradientPass {
  __device__ explicit InputGradientPass(const InputGradientArguments& arguments)
      : x(arguments.x), dy(arguments.dy), y(arguments.y), dx(arguments.dx), add(arguments.add) {
    affine.epilogue = epilogue_of(arguments);
  }

  const value_t *x, *dy, *y;
  value_t* dx;
  Affine<S> affine;
  real_t slope[S], constant[S];
  int add;

  // The affine map's scale is also the factor of dz.
  __device__ void prepare(const InputGradientArguments& arguments, const Place& place) {
    const Shape shape = shape_of(arguments);
    const double* const message = arguments.message;
    const double count = *call_of(arguments);
    if (place.position != 0) return;
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 c = place.channel + s;
      slope[s] = constant[s] = 0;
      if (c >= shape.channels || !(count > 0)) continue;
      const Saved then(arguments, c);
      const double factor = affine.scale[s];
      const double by = -factor * then.xhat_scale * (message[1 + shape.channels + c] / count);
      slope[s] = static_cast<real_t>(by);
      constant[s] = static_cast<real_t>(-factor * (message[1 + c] / count) -
                                        by * (then.center - static_cast<double>(affine.shift[s])));
    }
  }

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    real_t values[kUnroll][V], gradients[kUnroll][V], outs[kUnroll][V];
    load_packs<V>(x + offset, stride, packs, values);
    load_packs<V>(dy + offset, stride, packs, gradients);
    if (kResidual) load_packs<V>(y + offset, stride, packs, outs);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
      value_t* const to = dx + offset + u * stride;
      real_t before[V];
      if (add) Access<V>::load(to, before);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int s = S == 1 ? 0 : i;
        const real_t value = affine.epilogue.value(values[u][i]);
        const real_t gradient =
            kResidual ? (outs[u][i] <= 0 ? real_t(0) : gradients[u][i]) : affine.passed(s, value, gradients[u][i]);
        const real_t own = multiply_add(slope[s], value - affine.shift[s], constant[s]);
        values[u][i] = multiply_add(affine.scale[s], gradient, own);
        if (add) values[u][i] += before[i];
      }
      Access<V>::store(to, values[u]);
    }
  }
};

template <typename Threads, bool kResidual>
__device__ inline void run(const InputGradientArguments& arguments) {
  constexpr int S = Threads::kChannels;
  __shared__ real_t shared[S * kThreads];
  const Place place = Threads::place();
  InputGradientPass<S, kResidual> pass(arguments);
  affine_from_saved(arguments, place, pass.affine);
  pass.prepare(arguments, place);
  hand_out(shared, place, pass.affine);
  hand_out<S>(shared, place, pass.slope);
  hand_out<S>(shared, place, pass.constant);
  Threads::walk(shape_of(arguments), arguments.x, arguments.aligned, place, pass);
}
