// Σ dy and Σ dy·(x − shift), where dy is masked by the ReLU, if there is one. Of them S1 = Σ dy = dβ and S2 = Σ dy·x̂ = dγ.

template <int S>
struct GradientSumsPass {
  const value_t *x, *dy;
  Affine<S> affine;
  real_t sum[S], centred[S];

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    real_t values[kUnroll][V], gradients[kUnroll][V];
    load_packs<V>(x + offset, stride, packs, values);
    load_packs<V>(dy + offset, stride, packs, gradients);
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
        const real_t gradient = affine.masked(s, values[u][i], gradients[u][i]);
        sums[s] += gradient;
        products[s] = multiply_add(gradient, values[u][i] - affine.shift[s], products[s]);
      }
    }
#pragma unroll
    for (int s = 0; s < S; ++s) {
      sum[s] += sums[s];
      centred[s] += products[s];
    }
  }
};

// The arguments of `gradient_sums_*` behind x and dy. The message: S1[C], S2[C], and the three numbers that the forward
// pass has left in `saved` (count, round_id, active_set). Requests are MXNet's: 0 nothing, 3 add, else write.
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

  template <int S>
  __device__ void finish(const Shape& shape, const Place& place, GradientSumsPass<S>& pass, double* shared) const {
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
      const double mean = saved[c], invstd = saved[shape.channels + c];
      const double s2 = invstd * (centred[s] - (mean - static_cast<double>(pass.affine.shift[s])) * sums[s]);
      message[1 + c] = sums[s];
      message[1 + shape.channels + c] = s2;
      give(d_beta + c, sums[s], beta_request);
      give(d_gamma + c, has_scale ? s2 : 0, gamma_request);
      if (c == 0) {
        for (int i = 0; i < 3; ++i) message[1 + 2 * shape.channels + i] = saved[2 * shape.channels + i];
      }
    }
    finish_tile(counters, message, ticket);
  }

  template <int S>
  __device__ GradientSumsPass<S> start(const Shape& shape, const Place& place, const value_t* x, const value_t* dy,
                                       int relu, double* shared) const {
    GradientSumsPass<S> pass;
    pass.x = x;
    pass.dy = dy;
    pass.affine.relu = relu;
#pragma unroll
    for (int s = 0; s < S; ++s) pass.sum[s] = pass.centred[s] = 0;
    affine_from_saved(shape, place, saved, gamma, beta, has_scale, pass.affine);
    hand_out(reinterpret_cast<real_t*>(shared), place, pass.affine);
    return pass;
  }
};

KERNEL gradient_sums_rows(const value_t* x, const value_t* dy, const real_t* gamma, const real_t* beta,
                          const double* saved, double* partials, int* counters, double* message, real_t* d_gamma,
                          real_t* d_beta, int64 outer, int64 channels, int64 inner, int aligned, double ticket,
                          int has_scale, int relu, int gamma_request, int beta_request) {
  __shared__ double shared[kThreads];
  const Shape shape = {outer, channels, inner};
  const Sums sums = {gamma, beta, saved, partials, counters, message, d_gamma, d_beta, ticket, has_scale,
                     gamma_request, beta_request};
  const Place place = place_in_rows();
  GradientSumsPass<1> pass = sums.start<1>(shape, place, x, dy, relu, shared);
  over_rows(shape, x, aligned, place, pass);
  sums.finish(shape, place, pass, shared);
}

template <int V>
__device__ inline void gradient_sums_columns_by(const value_t* x, const value_t* dy, const Shape& shape,
                                                const Sums& sums, int relu) {
  __shared__ double shared[V * kThreads];
  const Place place = place_in_columns<V>();
  GradientSumsPass<V> pass = sums.template start<V>(shape, place, x, dy, relu, shared);
  over_columns<V>(shape, place, pass);
  sums.finish(shape, place, pass, shared);
}

KERNEL gradient_sums_columns(const value_t* x, const value_t* dy, const real_t* gamma, const real_t* beta,
                             const double* saved, double* partials, int* counters, double* message, real_t* d_gamma,
                             real_t* d_beta, int64 outer, int64 channels, int64 inner, int aligned, double ticket,
                             int has_scale, int relu, int gamma_request, int beta_request) {
  const Shape shape = {outer, channels, inner};
  const Sums sums = {gamma, beta, saved, partials, counters, message, d_gamma, d_beta, ticket, has_scale,
                     gamma_request, beta_request};
  if (aligned) {
    gradient_sums_columns_by<kPack>(x, dy, shape, sums, relu);
  } else {
    gradient_sums_columns_by<1>(x, dy, shape, sums, relu);
  }
}
