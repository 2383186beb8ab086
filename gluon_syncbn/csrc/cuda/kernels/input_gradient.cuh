// dx = factor·dy + slope·(x − shift) + constant, with dy as above. `message` holds ΣS1[C] and ΣS2[C] of all devices, from
// place 1 on; they count only if `saved` says that the statistics depended on x.

template <int S>
struct InputGradientPass {
  const value_t *x, *dy;
  value_t* dx;
  Affine<S> affine;
  real_t slope[S], constant[S];
  int add;

  // Of the affine, scale is also the factor of dy.
  __device__ void prepare(const Shape& shape, const Place& place, const double* saved, const double* message) {
    const double count = saved[2 * shape.channels];
    if (place.position != 0) return;
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 c = place.channel + s;
      slope[s] = constant[s] = 0;
      if (c >= shape.channels || !(count > 0)) continue;
      const double mean = saved[c], invstd = saved[shape.channels + c];
      const double factor = affine.scale[s];
      const double by = -factor * invstd * (message[1 + shape.channels + c] / count);
      slope[s] = static_cast<real_t>(by);
      constant[s] = static_cast<real_t>(-factor * (message[1 + c] / count) -
                                        by * (mean - static_cast<double>(affine.shift[s])));
    }
  }

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    real_t values[kUnroll][V], gradients[kUnroll][V];
    load_packs<V>(x + offset, stride, packs, values);
    load_packs<V>(dy + offset, stride, packs, gradients);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
      value_t* const to = dx + offset + u * stride;
      real_t before[V];
      if (add) Access<V>::load(to, before);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int s = S == 1 ? 0 : i;
        const real_t gradient = affine.masked(s, values[u][i], gradients[u][i]);
        const real_t own = multiply_add(slope[s], values[u][i] - affine.shift[s], constant[s]);
        values[u][i] = multiply_add(affine.scale[s], gradient, own);
        if (add) values[u][i] += before[i];
      }
      Access<V>::store(to, values[u]);
    }
  }
};

template <int S>
__device__ inline InputGradientPass<S> start_input_gradient(const Shape& shape, const Place& place, real_t* shared,
                                                            const value_t* x, const value_t* dy, value_t* dx,
                                                            const real_t* gamma, const real_t* beta,
                                                            const double* saved, const double* message, int has_scale,
                                                            int relu, int add) {
  InputGradientPass<S> pass;
  pass.x = x;
  pass.dy = dy;
  pass.dx = dx;
  pass.affine.relu = relu;
  pass.add = add;
  affine_from_saved(shape, place, saved, gamma, beta, has_scale, pass.affine);
  pass.prepare(shape, place, saved, message);
  hand_out(shared, place, pass.affine);
  hand_out<S>(shared, place, pass.slope);
  hand_out<S>(shared, place, pass.constant);
  return pass;
}

KERNEL input_gradient_rows(const value_t* x, const value_t* dy, value_t* dx, const real_t* gamma, const real_t* beta,
                           const double* saved, const double* message, int64 outer, int64 channels, int64 inner,
                           int aligned, int has_scale, int relu, int add) {
  __shared__ real_t shared[kThreads];
  const Shape shape = {outer, channels, inner};
  const Place place = place_in_rows();
  InputGradientPass<1> pass = start_input_gradient<1>(shape, place, shared, x, dy, dx, gamma, beta, saved, message,
                                                      has_scale, relu, add);
  over_rows(shape, x, aligned, place, pass);
}

template <int V>
__device__ inline void input_gradient_columns_by(const Shape& shape, const value_t* x, const value_t* dy, value_t* dx,
                                                 const real_t* gamma, const real_t* beta, const double* saved,
                                                 const double* message, int has_scale, int relu, int add) {
  __shared__ real_t shared[V * kThreads];
  const Place place = place_in_columns<V>();
  InputGradientPass<V> pass = start_input_gradient<V>(shape, place, shared, x, dy, dx, gamma, beta, saved, message,
                                                      has_scale, relu, add);
  over_columns<V>(shape, place, pass);
}

KERNEL input_gradient_columns(const value_t* x, const value_t* dy, value_t* dx, const real_t* gamma,
                              const real_t* beta, const double* saved, const double* message, int64 outer,
                              int64 channels, int64 inner, int aligned, int has_scale, int relu, int add) {
  const Shape shape = {outer, channels, inner};
  if (aligned) {
    input_gradient_columns_by<kPack>(shape, x, dy, dx, gamma, beta, saved, message, has_scale, relu, add);
  } else {
    input_gradient_columns_by<1>(shape, x, dy, dx, gamma, beta, saved, message, has_scale, relu, add);
  }
}
