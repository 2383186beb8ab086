// dx = factor·dz + slope·(v − shift) + constant, with dz as in gradient_sums.cuh. `message` holds ΣS1[C] and ΣS2[C] of
// all devices, from place 1 on; they count only if `saved` says that the statistics depended on x.

template <int S, bool kSkip>
struct InputGradientPass {
  const value_t *x, *dy, *y;
  value_t* dx;
  Affine<S> affine;
  real_t slope[S], constant[S];
  int add;

  // Of the affine, scale is also the factor of dz.
  __device__ void prepare(const Shape& shape, const Place& place, const real_t* gamma, const real_t* beta,
                          const double* saved, const double* message, int has_scale) {
    const double count = *call_of(shape, saved);
    if (place.position != 0) return;
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 c = place.channel + s;
      slope[s] = constant[s] = 0;
      if (c >= shape.channels || !(count > 0)) continue;
      const Saved then(shape, saved, gamma, beta, has_scale, affine.behind.in_place, c);
      const double factor = affine.scale[s];
      const double by = -factor * then.per * (message[1 + shape.channels + c] / count);
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
    if (kSkip) load_packs<V>(y + offset, stride, packs, outs);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
      value_t* const to = dx + offset + u * stride;
      real_t before[V];
      if (add) Access<V>::load(to, before);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int s = S == 1 ? 0 : i;
        const real_t value = affine.behind.value(values[u][i]);
        const real_t gradient =
            kSkip ? (outs[u][i] <= 0 ? real_t(0) : gradients[u][i]) : affine.passed(s, value, gradients[u][i]);
        const real_t own = multiply_add(slope[s], value - affine.shift[s], constant[s]);
        values[u][i] = multiply_add(affine.scale[s], gradient, own);
        if (add) values[u][i] += before[i];
      }
      Access<V>::store(to, values[u]);
    }
  }
};

// The arguments of `input_gradient_*`.
struct InputGradient {
  const value_t *x, *dy, *y;
  value_t* dx;
  const real_t *gamma, *beta;
  const double *saved, *message;
  int has_scale, add;

  template <int S, bool kSkip>
  __device__ InputGradientPass<S, kSkip> start(const Shape& shape, const Place& place, const Behind& behind,
                                               real_t* shared) const {
    InputGradientPass<S, kSkip> pass;
    pass.x = x;
    pass.dy = dy;
    pass.y = y;
    pass.dx = dx;
    pass.affine.behind = behind;
    pass.add = add;
    affine_from_saved(shape, place, saved, gamma, beta, has_scale, pass.affine);
    pass.prepare(shape, place, gamma, beta, saved, message, has_scale);
    hand_out(shared, place, pass.affine);
    hand_out<S>(shared, place, pass.slope);
    hand_out<S>(shared, place, pass.constant);
    return pass;
  }
};

template <bool kSkip>
__device__ inline void input_gradient_rows_of(const InputGradient& arguments, const Shape& shape, int aligned,
                                              const Behind& behind) {
  __shared__ real_t shared[kThreads];
  const Place place = place_in_rows();
  InputGradientPass<1, kSkip> pass = arguments.template start<1, kSkip>(shape, place, behind, shared);
  over_rows(shape, arguments.x, aligned, place, pass);
}

template <int V, bool kSkip>
__device__ inline void input_gradient_columns_by(const InputGradient& arguments, const Shape& shape,
                                                 const Behind& behind) {
  __shared__ real_t shared[V * kThreads];
  const Place place = place_in_columns<V>();
  InputGradientPass<V, kSkip> pass = arguments.template start<V, kSkip>(shape, place, behind, shared);
  over_columns<V>(shape, place, pass);
}

template <bool kSkip>
__device__ inline void input_gradient_columns_of(const InputGradient& arguments, const Shape& shape, int aligned,
                                                 const Behind& behind) {
  if (aligned) {
    input_gradient_columns_by<kPack, kSkip>(arguments, shape, behind);
  } else {
    input_gradient_columns_by<1, kSkip>(arguments, shape, behind);
  }
}

KERNEL input_gradient_rows(const value_t* x, const value_t* dy, value_t* dx, const real_t* gamma, const real_t* beta,
                           const double* saved, const double* message, int64 outer, int64 channels, int64 inner,
                           int aligned, double slope, int has_scale, int activation, int in_place, int add) {
  input_gradient_rows_of<false>({x, dy, x, dx, gamma, beta, saved, message, has_scale, add}, {outer, channels, inner},
                                aligned, {activation, static_cast<real_t>(slope), in_place});
}

KERNEL input_gradient_columns(const value_t* x, const value_t* dy, value_t* dx, const real_t* gamma, const real_t* beta,
                              const double* saved, const double* message, int64 outer, int64 channels, int64 inner,
                              int aligned, double slope, int has_scale, int activation, int in_place, int add) {
  input_gradient_columns_of<false>({x, dy, x, dx, gamma, beta, saved, message, has_scale, add},
                                   {outer, channels, inner}, aligned,
                                   {activation, static_cast<real_t>(slope), in_place});
}

KERNEL input_gradient_skip_rows(const value_t* x, const value_t* dy, const value_t* y, value_t* dx, const real_t* gamma,
                                const real_t* beta, const double* saved, const double* message, int64 outer,
                                int64 channels, int64 inner, int aligned, int has_scale, int add) {
  input_gradient_rows_of<true>({x, dy, y, dx, gamma, beta, saved, message, has_scale, add}, {outer, channels, inner},
                               aligned, {1, 0, 0});
}

KERNEL input_gradient_skip_columns(const value_t* x, const value_t* dy, const value_t* y, value_t* dx,
                                   const real_t* gamma, const real_t* beta, const double* saved, const double* message,
                                   int64 outer, int64 channels, int64 inner, int aligned, int has_scale, int add) {
  input_gradient_columns_of<true>({x, dy, y, dx, gamma, beta, saved, message, has_scale, add}, {outer, channels, inner},
                                  aligned, {1, 0, 0});
}
