// y, the running statistics, and what the backward pass will want to know.

template <int S, bool kSkip>
struct NormalizePass {
  const value_t *x, *skip;
  value_t* y;
  Affine<S> affine;

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    real_t values[kUnroll][V], skips[kUnroll][V];
    load_packs<V>(x + offset, stride, packs, values);
    if (kSkip) load_packs<V>(skip + offset, stride, packs, skips);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const real_t z = affine.apply(S == 1 ? 0 : i, values[u][i]);
        values[u][i] = affine.behind.activate(kSkip ? widen(narrow(z)) + skips[u][i] : z);
      }
      Access<V>::store(y + offset + u * stride, values[u]);
    }
  }
};

// The arguments of `normalize_*` behind x, skip and y. In training mode `message` holds mean[C] and variance[C] of all
// devices, from place 1 on, and with `renorm` r[C] and d[C]. `saved` gets mean[C], invstd[C], r[C], d[C], and what the
// backward pass will want to know of this call.
struct Norm {
  const real_t *gamma, *beta;
  real_t *running_mean, *running_var;
  double* saved;
  const double* message;
  double epsilon, momentum, count, round_id, active_set;
  int training, has_scale, renorm, wants_saved;

  template <int S>
  __device__ void prepare(const Shape& shape, const Place& place, Affine<S>& affine) const {
    if (place.position != 0) return;
    // All reads over the bus are issued first, so that their latencies overlap.
    double times[S], bias[S], mean[S], variance[S], r[S], d[S];
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 c = place.channel + s < shape.channels ? place.channel + s : shape.channels - 1;
      mean[s] = training ? message[1 + c] : running_mean[c];
      variance[s] = training ? message[1 + shape.channels + c] : running_var[c];
      r[s] = renorm ? message[1 + 2 * shape.channels + c] : 1;
      d[s] = renorm ? message[1 + 3 * shape.channels + c] : 0;
      times[s] = has_scale ? gamma[c] : 1;
      bias[s] = beta[c];
    }
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 c = place.channel + s;
      if (c >= shape.channels) continue;
      const double invstd = 1 / sqrt(variance[s] + epsilon);
      effective((training || wants_saved) && affine.behind.in_place, r[s], d[s], times[s], bias[s]);
      affine.set(s, mean[s], times[s] * invstd, bias[s]);
      if (blockIdx.y != 0) continue;  // once per channel
      if (training) {
        running_mean[c] = static_cast<real_t>(running_mean[c] * momentum + mean[s] * (1 - momentum));
        running_var[c] = static_cast<real_t>(running_var[c] * momentum + variance[s] * (1 - momentum));
      }
      if (wants_saved) {
        saved[c] = mean[s];
        saved[shape.channels + c] = invstd;
        saved[2 * shape.channels + c] = r[s];
        saved[3 * shape.channels + c] = d[s];
        if (c == 0) {
          saved[4 * shape.channels] = count;
          saved[4 * shape.channels + 1] = round_id;
          saved[4 * shape.channels + 2] = active_set;
        }
      }
    }
  }
};

// Running statistics need no order among blocks: in prediction mode none writes them, and in training mode only the
// block that writes those of a channel reads them.
template <bool kSkip>
__device__ inline void normalize_rows_of(const value_t* x, const value_t* skip, value_t* y, const Shape& shape,
                                         int aligned, const Norm& norm, const Behind& behind, int wants_y) {
  __shared__ real_t shared[kThreads];
  const Place place = place_in_rows();
  NormalizePass<1, kSkip> pass;
  pass.x = x;
  pass.skip = skip;
  pass.y = y;
  pass.affine.behind = behind;
  norm.prepare(shape, place, pass.affine);
  hand_out(shared, place, pass.affine);
  if (wants_y) over_rows(shape, x, aligned, place, pass);
}

template <int V, bool kSkip>
__device__ inline void normalize_columns_by(const value_t* x, const value_t* skip, value_t* y, const Shape& shape,
                                            const Norm& norm, const Behind& behind, int wants_y) {
  __shared__ real_t shared[V * kThreads];
  const Place place = place_in_columns<V>();
  NormalizePass<V, kSkip> pass;
  pass.x = x;
  pass.skip = skip;
  pass.y = y;
  pass.affine.behind = behind;
  norm.prepare(shape, place, pass.affine);
  hand_out(shared, place, pass.affine);
  if (wants_y) over_columns<V>(shape, place, pass);
}

template <bool kSkip>
__device__ inline void normalize_columns_of(const value_t* x, const value_t* skip, value_t* y, const Shape& shape,
                                            int aligned, const Norm& norm, const Behind& behind, int wants_y) {
  if (aligned) {
    normalize_columns_by<kPack, kSkip>(x, skip, y, shape, norm, behind, wants_y);
  } else {
    normalize_columns_by<1, kSkip>(x, skip, y, shape, norm, behind, wants_y);
  }
}

KERNEL normalize_rows(const value_t* x, value_t* y, const real_t* gamma, const real_t* beta, real_t* running_mean,
                      real_t* running_var, double* saved, const double* message, int64 outer, int64 channels,
                      int64 inner, int aligned, double epsilon, double momentum, double count, double round_id,
                      double active_set, double slope, int training, int has_scale, int activation, int in_place,
                      int renorm, int wants_y, int wants_saved) {
  const Norm norm = {gamma, beta,     running_mean, running_var, saved,     message, epsilon,    momentum,
                     count, round_id, active_set,   training,    has_scale, renorm,  wants_saved};
  normalize_rows_of<false>(x, x, y, {outer, channels, inner}, aligned, norm,
                           {activation, static_cast<real_t>(slope), in_place}, wants_y);
}

KERNEL normalize_skip_rows(const value_t* x, const value_t* skip, value_t* y, const real_t* gamma, const real_t* beta,
                           real_t* running_mean, real_t* running_var, double* saved, const double* message, int64 outer,
                           int64 channels, int64 inner, int aligned, double epsilon, double momentum, double count,
                           double round_id, double active_set, double slope, int training, int has_scale,
                           int activation, int in_place, int renorm, int wants_y, int wants_saved) {
  const Norm norm = {gamma, beta,     running_mean, running_var, saved,     message, epsilon,    momentum,
                     count, round_id, active_set,   training,    has_scale, renorm,  wants_saved};
  normalize_rows_of<true>(x, skip, y, {outer, channels, inner}, aligned, norm,
                          {activation, static_cast<real_t>(slope), in_place}, wants_y);
}

KERNEL normalize_columns(const value_t* x, value_t* y, const real_t* gamma, const real_t* beta, real_t* running_mean,
                         real_t* running_var, double* saved, const double* message, int64 outer, int64 channels,
                         int64 inner, int aligned, double epsilon, double momentum, double count, double round_id,
                         double active_set, double slope, int training, int has_scale, int activation, int in_place,
                         int renorm, int wants_y, int wants_saved) {
  const Norm norm = {gamma, beta,     running_mean, running_var, saved,     message, epsilon,    momentum,
                     count, round_id, active_set,   training,    has_scale, renorm,  wants_saved};
  normalize_columns_of<false>(x, x, y, {outer, channels, inner}, aligned, norm,
                              {activation, static_cast<real_t>(slope), in_place}, wants_y);
}

KERNEL normalize_skip_columns(const value_t* x, const value_t* skip, value_t* y, const real_t* gamma,
                              const real_t* beta, real_t* running_mean, real_t* running_var, double* saved,
                              const double* message, int64 outer, int64 channels, int64 inner, int aligned,
                              double epsilon, double momentum, double count, double round_id, double active_set,
                              double slope, int training, int has_scale, int activation, int in_place, int renorm,
                              int wants_y, int wants_saved) {
  const Norm norm = {gamma, beta,     running_mean, running_var, saved,     message, epsilon,    momentum,
                     count, round_id, active_set,   training,    has_scale, renorm,  wants_saved};
  normalize_columns_of<true>(x, skip, y, {outer, channels, inner}, aligned, norm,
                             {activation, static_cast<real_t>(slope), in_place}, wants_y);
}
