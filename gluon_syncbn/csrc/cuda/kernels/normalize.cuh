// y, the running statistics, and what the backward pass will want to know.

template <int S>
struct NormalizePass {
  const value_t* x;
  value_t* y;
  Affine<S> affine;

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    real_t values[kUnroll][V];
    load_packs<V>(x + offset, stride, packs, values);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const real_t out = affine.apply(S == 1 ? 0 : i, values[u][i]);
        values[u][i] = affine.relu && out < 0 ? real_t(0) : out;  // NaN stays
      }
      Access<V>::store(y + offset + u * stride, values[u]);
    }
  }
};

// The arguments of `normalize_*` behind x and y. In training mode `message` holds mean[C] and variance[C] of all
// devices, from place 1 on; `saved` gets mean[C], invstd[C], and what the backward pass will want to know of this call.
struct Norm {
  const real_t *gamma, *beta;
  real_t *running_mean, *running_var;
  double* saved;
  const double* message;
  double epsilon, momentum, count, round_id, active_set;
  int training, has_scale, wants_saved;

  template <int S>
  __device__ void prepare(const Shape& shape, const Place& place, Affine<S>& affine) const {
    if (place.position != 0) return;
    // All reads over the bus are issued first, so that their latencies overlap.
    double times[S], bias[S], mean[S], variance[S];
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 c = place.channel + s < shape.channels ? place.channel + s : shape.channels - 1;
      mean[s] = training ? message[1 + c] : running_mean[c];
      variance[s] = training ? message[1 + shape.channels + c] : running_var[c];
      times[s] = has_scale ? gamma[c] : 1;
      bias[s] = beta[c];
    }
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 c = place.channel + s;
      if (c >= shape.channels) continue;
      const double invstd = 1 / sqrt(variance[s] + epsilon);
      affine.set(s, mean[s], times[s] * invstd, bias[s]);
      if (blockIdx.y != 0) continue;  // once per channel
      if (training) {
        running_mean[c] = static_cast<real_t>(running_mean[c] * momentum + mean[s] * (1 - momentum));
        running_var[c] = static_cast<real_t>(running_var[c] * momentum + variance[s] * (1 - momentum));
      }
      if (wants_saved) {
        saved[c] = mean[s];
        saved[shape.channels + c] = invstd;
        if (c == 0) {
          saved[2 * shape.channels] = count;
          saved[2 * shape.channels + 1] = round_id;
          saved[2 * shape.channels + 2] = active_set;
        }
      }
    }
  }
};

// Running statistics need no order among blocks: in prediction mode none writes them, and in training mode only the block
// that writes those of a channel reads them.
KERNEL normalize_rows(const value_t* x, value_t* y, const real_t* gamma, const real_t* beta, real_t* running_mean,
                      real_t* running_var, double* saved, const double* message, int64 outer, int64 channels,
                      int64 inner, int aligned, double epsilon, double momentum, double count, double round_id,
                      double active_set, int training, int has_scale, int relu, int wants_y, int wants_saved) {
  __shared__ real_t shared[kThreads];
  const Shape shape = {outer, channels, inner};
  const Norm norm = {gamma, beta, running_mean, running_var, saved, message, epsilon, momentum, count, round_id,
                     active_set, training, has_scale, wants_saved};
  const Place place = place_in_rows();
  NormalizePass<1> pass;
  pass.x = x;
  pass.y = y;
  pass.affine.relu = relu;
  norm.prepare(shape, place, pass.affine);
  hand_out(shared, place, pass.affine);
  if (wants_y) over_rows(shape, x, aligned, place, pass);
}

template <int V>
__device__ inline void normalize_columns_by(const value_t* x, value_t* y, const Shape& shape, const Norm& norm,
                                            int relu, int wants_y) {
  __shared__ real_t shared[V * kThreads];
  const Place place = place_in_columns<V>();
  NormalizePass<V> pass;
  pass.x = x;
  pass.y = y;
  pass.affine.relu = relu;
  norm.prepare(shape, place, pass.affine);
  hand_out(shared, place, pass.affine);
  if (wants_y) over_columns<V>(shape, place, pass);
}

KERNEL normalize_columns(const value_t* x, value_t* y, const real_t* gamma, const real_t* beta, real_t* running_mean,
                         real_t* running_var, double* saved, const double* message, int64 outer, int64 channels,
                         int64 inner, int aligned, double epsilon, double momentum, double count, double round_id,
                         double active_set, int training, int has_scale, int relu, int wants_y, int wants_saved) {
  const Shape shape = {outer, channels, inner};
  const Norm norm = {gamma, beta, running_mean, running_var, saved, message, epsilon, momentum, count, round_id,
                     active_set, training, has_scale, wants_saved};
  if (aligned) {
    normalize_columns_by<kPack>(x, y, shape, norm, relu, wants_y);
  } else {
    normalize_columns_by<1>(x, y, shape, norm, relu, wants_y);
  }
}
