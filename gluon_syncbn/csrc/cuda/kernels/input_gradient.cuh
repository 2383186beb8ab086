// dx = factor·dz + by·(v − shift) + constant, with dz as in gradient_sums.cuh. `message` holds ΣS1[C] and ΣS2[C] of all
// devices, from place 1 on; they count only if `saved` says that the statistics depended on x.

template <int S>
struct InputGradientPass {
  const value_t *x, *dy, *y;
  value_t* dx;
  int add;
  real_t slope;
  Affine<S> affine;  // its scale is also the factor of dz
  real_t by[S], constant[S];

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    const Packs<V> loaded(x + offset, stride, packs);
    const Packs<V> incoming(dy + offset, stride, packs);
    const bool masks = kResidual && y;
    const Packs<V> outputs(y + offset, stride, masks ? packs : 0);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
      value_t* const to = dx + offset + u * stride;
      real_t values[V], gradients[V], outs[V];
      Raw<V> before;
      if (add) before.load(to);
      loaded.raw[u].unpack(values);
      incoming.raw[u].unpack(gradients);
      if (masks) outputs.raw[u].unpack(outs);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int s = S == 1 ? 0 : i;
        const real_t value = value_of(values[i], slope);
        real_t gradient = gradients[i];
        if (kResidual) {
          gradient = masks && outs[i] <= 0 ? real_t(0) : gradient;
        } else {
          gradient = affine.passed(s, value, gradient, slope);
        }
        const real_t own = multiply_add(by[s], value - affine.shift[s], constant[s]);
        values[i] = multiply_add(affine.scale[s], gradient, own);
      }
      if (add) {
        before.unpack(gradients);
#pragma unroll
        for (int i = 0; i < V; ++i) values[i] += gradients[i];
      }
      Raw<V>::store(to, values);
    }
  }
};

struct InputGradientChannel {
  const InputGradientArguments& arguments;

  __device__ void operator()(int64 c, bool is_first, real_t* out) const {
    const int64 channels = arguments.shape.channels;
    const double* const message = arguments.memory.message;
    const double count = *call_of(arguments);
    const Saved then(arguments, c);
    SavedChannel<InputGradientArguments> affine = {arguments};
    affine(c, is_first, out);
    out[3] = out[4] = 0;
    if (!(count > 0)) return;
    const double factor = out[1];
    const double by = -factor * then.xhat_scale * (message[1 + channels + c] / count);
    out[3] = static_cast<real_t>(by);
    out[4] = static_cast<real_t>(-factor * (message[1 + c] / count) - by * (then.center - static_cast<double>(out[0])));
  }
};

template <typename Threads>
__device__ inline void run(const InputGradientArguments& arguments) {
  constexpr int S = Threads::kChannels;
  const Shape& shape = arguments.shape;
  const Place place = Threads::place();
  const value_t* const masking = kResidual ? arguments.y : nullptr;
  prefetch_first<Threads, kBackwards>(shape, place, arguments.x, arguments.dy, masking);
  InputGradientChannel compute = {arguments};
  real_t known[5 * S];
  prepare<S, 5, true>(shape, arguments.memory, place, compute, known);
  InputGradientPass<S> pass;
  pass.x = arguments.x;
  pass.dy = arguments.dy;
  pass.y = masking;
  pass.dx = arguments.dx;
  pass.add = arguments.add;
  pass.slope = static_cast<real_t>(arguments.slope);
  pass.affine.take(known);
#pragma unroll
  for (int s = 0; s < S; ++s) {
    pass.by[s] = known[3 * S + s];
    pass.constant[s] = known[4 * S + s];
  }
  Threads::template walk<kBackwards, false>(shape, pass.x, place, pass);
}
