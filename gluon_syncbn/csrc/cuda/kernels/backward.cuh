// The two passes of the backward direction.

// Σ dz and Σ dz·(v − shift), where dz is the gradient of z. They give S1 = Σ dz = dβ and S2 = Σ dz·x̂ = dγ. With a
// residual, dz is also the residual's gradient, and y shows where the ReLU let it pass.

template <int S>
struct GradientSumsPass : Tensors<kUnroll / 2, 2 + kResidual> {
  value_t* d_residual;
  int residual_request;
  real_t slope;
  const real_t* known;               // see Prepare
  real_t gradients[S], products[S];  // Σ dz and Σ dz·(v − shift)

  template <typename Loaded, typename Places>
  __device__ void take(const Loaded& loaded, const Places& at, int packs) {
    constexpr int V = Loaded::kValues;
    const Affine<S> affine(known);
    // A chunk has a sum of its own, so that fewer numbers are added one by one to the sum of a long channel.
    real_t sum[S], product[S];
#pragma unroll
    for (int s = 0; s < S; ++s) sum[s] = product[s] = 0;
#pragma unroll
    for (int n = 0; n < this->kAtOnce; ++n) {
      if (n >= packs) continue;
      real_t values[V], incoming[V], outs[V];
      loaded.of[0].raw[n].unpack(values);
      loaded.of[1].raw[n].unpack(incoming);
      if (kResidual) loaded.of[1 + kResidual].raw[n].unpack(outs);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int s = S == 1 ? 0 : i;
        const real_t value = value_of(values[i], slope);
        real_t& gradient = incoming[i];
        if (kResidual) {
          gradient = outs[i] <= 0 ? real_t(0) : gradient;
        } else {
          gradient = affine.passed(s, value, gradient, slope);
        }
        sum[s] += gradient;
        product[s] = multiply_add(gradient, value - affine.shift[s], product[s]);
      }
      if (kResidual) store_residual_gradient<V>(d_residual + at(n), incoming);
    }
#pragma unroll
    for (int s = 0; s < S; ++s) {
      gradients[s] += sum[s];
      products[s] += product[s];
    }
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

template <typename T>
struct Sums {
  enum { kCounts = 0 };
  T count, a, b;

  __device__ void merge(const Sums& other) {
    a += other.a;
    b += other.b;
  }
};

__device__ inline void store_gradient(real_t* to, double value, int request) {
  if (request != 0) *to = static_cast<real_t>(request == 3 ? *to + value : value);
}

template <typename Threads>
__device__ inline void run(const GradientSumsArguments& arguments) {
  constexpr int S = Threads::kColumns;
  const Shape& shape = arguments.shape;
  const SavedChannel<GradientSumsArguments> saved = {arguments};
  Prepare<Threads, 3, SavedChannel<GradientSumsArguments>> prepare(shape, saved);
  GradientSumsPass<S> pass;
  pass.tensors[1 + kResidual] = arguments.y;  // without a residual, dy takes this place
  pass.tensors[0] = arguments.x;
  pass.tensors[1] = arguments.dy;
  pass.d_residual = arguments.d_residual;
  pass.residual_request = arguments.residual_request;
  pass.slope = static_cast<real_t>(arguments.slope);
  pass.known = prepare.values;
#pragma unroll
  for (int s = 0; s < S; ++s) pass.gradients[s] = pass.products[s] = 0;
  Whole<Threads, false>::walk(shape, arguments.x, pass, prepare);

  if (!add_up<Sums, Threads>(shape, arguments.memory, 0, pass.gradients, pass.products)) return;
  // dγ and dβ, and the message: S1[C], S2[C], count, round_id and active_set from `saved`, and with FROM_OUTPUT for
  // each channel whether γ was clamped.
  const int64 c = first_channel(shape) + thread_number(), channels = shape.channels;
  double* const message = arguments.memory.message;
  const Saved then(arguments, c);
  const double s1 = total(0, thread_number());
  const double lost = then.center - static_cast<double>(static_cast<real_t>(then.center));
  const double s2 = then.xhat_scale * (total(1, thread_number()) - lost * s1);
  tell(message + c, s1);
  tell(message + channels + c, s2);
  for (int i = 0; i < 3 && c == 0; ++i) tell(message + 2 * channels + i, call_of(arguments)[i]);
  if (kFromOutput) tell(message + 2 * channels + 3 + c, then.moved);
  store_gradient(arguments.d_beta + c, s1, arguments.beta_request);
  store_gradient(arguments.d_gamma + c, arguments.gamma ? then.r * s2 + then.d * s1 : 0, arguments.gamma_request);
}

// dx = factor·dz + by·(v − shift) + constant, with dz as above. `message` holds ΣS1[C] and ΣS2[C] of all devices, which
// matter only if the count in `saved` says that the statistics depended on x.

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
