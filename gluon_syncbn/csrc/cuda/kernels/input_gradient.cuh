// dx = factor·dz + by·(v − shift) + constant, with dz as in gradient_sums.cuh. `message` holds ΣS1[C] and ΣS2[C] of all
// devices, which matter only if the count in `saved` says that the statistics depended on x.

template <int S>
struct InputGradientPass : Tensors<kUnroll / 2, 2 + kResidual> {
  value_t* dx;
  int add;
  real_t slope;
  const real_t* known;  // an affine map, whose scale is also the factor of dz; `by`; `constant`

  template <typename Loaded, typename Places>
  __device__ void take(const Loaded& loaded, const Places& at, int packs) const {
    constexpr int V = Loaded::kValues;
    const Affine<S> affine(known);
    const bool masks = kResidual && this->tensors[1 + kResidual];
#pragma unroll
    for (int n = 0; n < this->kAtOnce; ++n) {
      if (n >= packs) continue;
      value_t* const to = dx + at(n);
      real_t values[V], gradients[V], outs[V];
      Raw<V> before;
      if (add) before.load(to);
      loaded.of[0].raw[n].unpack(values);
      loaded.of[1].raw[n].unpack(gradients);
      if (masks) loaded.of[1 + kResidual].raw[n].unpack(outs);
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
        const real_t own = multiply_add(known[3 * S + s], value - affine.shift[s], known[4 * S + s]);
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

  __device__ void operator()(int64 c, bool, real_t* out) const {
    const int64 channels = arguments.shape.channels;
    const double* const message = arguments.memory.message;
    const double count = *call_of(arguments);
    const Saved then(arguments, c);
    then.affine(out);
    out[3] = out[4] = 0;
    if (!(count > 0)) return;
    const double factor = out[1];
    const double by = -factor * then.xhat_scale * (message[channels + c] / count);
    out[3] = static_cast<real_t>(by);
    out[4] = static_cast<real_t>(-factor * (message[c] / count) - by * (then.center - static_cast<double>(out[0])));
  }
};

template <typename Threads>
__device__ inline void run(const InputGradientArguments& arguments) {
  const InputGradientChannel channel = {arguments};
  Prepare<Threads, 5, InputGradientChannel> prepare(arguments.shape, channel);
  InputGradientPass<Threads::kColumns> pass;
  pass.tensors[1 + kResidual] = arguments.y;  // without a residual, dy takes this place
  pass.tensors[0] = arguments.x;
  pass.tensors[1] = arguments.dy;
  pass.dx = arguments.dx;
  pass.add = arguments.add;
  pass.slope = static_cast<real_t>(arguments.slope);
  pass.known = prepare.values;
  Whole<Threads, true>::walk(arguments.shape, arguments.x, pass, prepare);
}
