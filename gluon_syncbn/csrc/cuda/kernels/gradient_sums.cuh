// Σ dz and Σ dz·(v − shift), where dz is the gradient of z. Of them S1 = Σ dz = dβ and S2 = Σ dz·x̂ = dγ. Behind a skip
// dz is also the skip's gradient, and y tells where its ReLU let it pass.

template <int S, bool kSkip>
struct GradientSumsPass {
  const value_t *x, *dy, *y;
  value_t* d_skip;
  int skip_request;
  Affine<S> affine;
  real_t sum[S], centred[S];

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    real_t values[kUnroll][V], gradients[kUnroll][V], outs[kUnroll][V];
    load_packs<V>(x + offset, stride, packs, values);
    load_packs<V>(dy + offset, stride, packs, gradients);
    if (kSkip) load_packs<V>(y + offset, stride, packs, outs);
    // Chunks are added up for themselves, which keeps the sums of long channels short.
    real_t sums[S], products[S];
#pragma unroll
    for (int s = 0; s < S; ++s) sums[s] = products[s] = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int s = S == 1 ? 0 : i;
        const real_t value = affine.behind.value(values[u][i]);
        real_t& gradient = gradients[u][i];
        if (kSkip) {
          gradient = outs[u][i] <= 0 ? real_t(0) : gradient;
        } else {
          gradient = affine.passed(s, value, gradient);
        }
        sums[s] += gradient;
        products[s] = multiply_add(gradient, value - affine.shift[s], products[s]);
      }
      if (kSkip) give_skip<V>(d_skip + offset + u * stride, gradients[u]);
    }
#pragma unroll
    for (int s = 0; s < S; ++s) {
      sum[s] += sums[s];
      centred[s] += products[s];
    }
  }

  template <int V>
  __device__ void give_skip(value_t* to, real_t (&gradient)[V]) const {
    if (skip_request == 0) return;
    if (skip_request == 3) {
      real_t before[V];
      Access<V>::load(to, before);
#pragma unroll
      for (int i = 0; i < V; ++i) gradient[i] += before[i];
    }
    Access<V>::store(to, gradient);
  }
};

// The arguments of `gradient_sums_*` behind the tensors. The message: S1[C], S2[C], the three numbers that the forward
// pass has left in `saved` (count, round_id, active_set), and in place for each channel whether another γ was taken.
// Requests are MXNet's: 0 nothing, 3 add, else write.
struct Sums {
  const real_t *gamma, *beta;
  const double* saved;
  double* partials;
  int* counters;
  double* message;
  real_t *d_gamma, *d_beta;
  double ticket;
  int has_scale, gamma_request, beta_request;

  __device__ static void give(real_t* to, double value, int request) {
    if (request != 0) *to = static_cast<real_t>(request == 3 ? *to + value : value);
  }

  template <int S, bool kSkip>
  __device__ void finish(const Shape& shape, const Place& place, GradientSumsPass<S, kSkip>& pass,
                         double* shared) const {
    real_t* real_shared = reinterpret_cast<real_t*>(shared);
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
    if (!is_last_of_tile(counters)) return;
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
      const int in_place = pass.affine.behind.in_place;
      const Saved then(shape, saved, gamma, beta, has_scale, in_place, c);
      const double s2 = then.per * (centred[s] - (then.center - static_cast<double>(pass.affine.shift[s])) * sums[s]);
      message[1 + c] = sums[s];
      message[1 + shape.channels + c] = s2;
      if (in_place) message[4 + 2 * shape.channels + c] = then.moved;
      give(d_beta + c, sums[s], beta_request);
      give(d_gamma + c, has_scale ? then.r * s2 + then.d * sums[s] : 0, gamma_request);
      if (c == 0) {
        for (int i = 0; i < 3; ++i) message[1 + 2 * shape.channels + i] = call_of(shape, saved)[i];
      }
    }
    finish_tile(counters, message, ticket);
  }

  template <int S, bool kSkip>
  __device__ void start(const Shape& shape, const Place& place, const Behind& behind, double* shared,
                        GradientSumsPass<S, kSkip>& pass) const {
    pass.affine.behind = behind;
#pragma unroll
    for (int s = 0; s < S; ++s) pass.sum[s] = pass.centred[s] = 0;
    affine_from_saved(shape, place, saved, gamma, beta, has_scale, pass.affine);
    hand_out(reinterpret_cast<real_t*>(shared), place, pass.affine);
  }
};

// The tensors; d_skip has a gradient for the skip asked for by `skip_request`.
struct Gradients {
  const value_t *x, *dy, *y;
  value_t* d_skip;
  int skip_request;

  template <int S, bool kSkip>
  __device__ GradientSumsPass<S, kSkip> pass() const {
    GradientSumsPass<S, kSkip> made;
    made.x = x;
    made.dy = dy;
    made.y = y;
    made.d_skip = d_skip;
    made.skip_request = skip_request;
    return made;
  }
};

template <bool kSkip>
__device__ inline void gradient_sums_rows_of(const Gradients& tensors, const Shape& shape, int aligned,
                                             const Sums& sums, const Behind& behind) {
  __shared__ double shared[kThreads];
  const Place place = place_in_rows();
  GradientSumsPass<1, kSkip> pass = tensors.template pass<1, kSkip>();
  sums.start(shape, place, behind, shared, pass);
  over_rows(shape, tensors.x, aligned, place, pass);
  sums.finish(shape, place, pass, shared);
}

template <int V, bool kSkip>
__device__ inline void gradient_sums_columns_by(const Gradients& tensors, const Shape& shape, const Sums& sums,
                                                const Behind& behind) {
  __shared__ double shared[V * kThreads];
  const Place place = place_in_columns<V>();
  GradientSumsPass<V, kSkip> pass = tensors.template pass<V, kSkip>();
  sums.start(shape, place, behind, shared, pass);
  over_columns<V>(shape, place, pass);
  sums.finish(shape, place, pass, shared);
}

template <bool kSkip>
__device__ inline void gradient_sums_columns_of(const Gradients& tensors, const Shape& shape, int aligned,
                                                const Sums& sums, const Behind& behind) {
  if (aligned) {
    gradient_sums_columns_by<kPack, kSkip>(tensors, shape, sums, behind);
  } else {
    gradient_sums_columns_by<1, kSkip>(tensors, shape, sums, behind);
  }
}

KERNEL gradient_sums_rows(const value_t* x, const value_t* dy, const real_t* gamma, const real_t* beta,
                          const double* saved, double* partials, int* counters, double* message, real_t* d_gamma,
                          real_t* d_beta, int64 outer, int64 channels, int64 inner, int aligned, double ticket,
                          double slope, int has_scale, int activation, int in_place, int gamma_request,
                          int beta_request) {
  const Sums sums = {gamma,   beta,   saved,  partials,  counters,      message,
                     d_gamma, d_beta, ticket, has_scale, gamma_request, beta_request};
  gradient_sums_rows_of<false>({x, dy, x, 0, 0}, {outer, channels, inner}, aligned, sums,
                               {activation, static_cast<real_t>(slope), in_place});
}

KERNEL gradient_sums_columns(const value_t* x, const value_t* dy, const real_t* gamma, const real_t* beta,
                             const double* saved, double* partials, int* counters, double* message, real_t* d_gamma,
                             real_t* d_beta, int64 outer, int64 channels, int64 inner, int aligned, double ticket,
                             double slope, int has_scale, int activation, int in_place, int gamma_request,
                             int beta_request) {
  const Sums sums = {gamma,   beta,   saved,  partials,  counters,      message,
                     d_gamma, d_beta, ticket, has_scale, gamma_request, beta_request};
  gradient_sums_columns_of<false>({x, dy, x, 0, 0}, {outer, channels, inner}, aligned, sums,
                                  {activation, static_cast<real_t>(slope), in_place});
}

KERNEL gradient_sums_skip_rows(const value_t* x, const value_t* dy, const value_t* y, value_t* d_skip,
                               const real_t* gamma, const real_t* beta, const double* saved, double* partials,
                               int* counters, double* message, real_t* d_gamma, real_t* d_beta, int64 outer,
                               int64 channels, int64 inner, int aligned, double ticket, int has_scale,
                               int gamma_request, int beta_request, int skip_request) {
  const Sums sums = {gamma,   beta,   saved,  partials,  counters,      message,
                     d_gamma, d_beta, ticket, has_scale, gamma_request, beta_request};
  gradient_sums_rows_of<true>({x, dy, y, d_skip, skip_request}, {outer, channels, inner}, aligned, sums, {1, 0, 0});
}

KERNEL gradient_sums_skip_columns(const value_t* x, const value_t* dy, const value_t* y, value_t* d_skip,
                                  const real_t* gamma, const real_t* beta, const double* saved, double* partials,
                                  int* counters, double* message, real_t* d_gamma, real_t* d_beta, int64 outer,
                                  int64 channels, int64 inner, int aligned, double ticket, int has_scale,
                                  int gamma_request, int beta_request, int skip_request) {
  const Sums sums = {gamma,   beta,   saved,  partials,  counters,      message,
                     d_gamma, d_beta, ticket, has_scale, gamma_request, beta_request};
  gradient_sums_columns_of<true>({x, dy, y, d_skip, skip_request}, {outer, channels, inner}, aligned, sums, {1, 0, 0});
}
