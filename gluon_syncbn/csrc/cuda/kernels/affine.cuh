// y = (x − shift)·scale + bias, then max(y, 0) if relu. Shift is the mean as real_t, and bias makes up for the rest.

template <int S>
struct Affine {
  real_t shift[S], scale[S], bias[S];
  int relu;

  __device__ void set(int s, double mean, double times, double beta) {
    shift[s] = static_cast<real_t>(mean);
    scale[s] = static_cast<real_t>(times);
    bias[s] = static_cast<real_t>(multiply_add(static_cast<double>(shift[s]) - mean, times, beta));
  }

  __device__ real_t apply(int s, real_t x) const { return multiply_add(x - shift[s], scale[s], bias[s]); }

  // dy masked by the ReLU: kept where the output for x was positive, or NaN, which must not be lost.
  __device__ real_t masked(int s, real_t x, real_t dy) const { return relu && apply(s, x) <= 0 ? real_t(0) : dy; }
};

// What each channel needs, from the thread that has computed it to those that share the channel.
template <int S>
__device__ inline void hand_out(real_t* shared, const Place& place, real_t* values) {
  const int me = thread_number(), first = me - place.position * place.stride;
  __syncthreads();
  if (place.position == 0) {
#pragma unroll
    for (int s = 0; s < S; ++s) shared[s * kThreads + me] = values[s];
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < S; ++s) values[s] = shared[s * kThreads + first];
}

template <int S>
__device__ inline void hand_out(real_t* shared, const Place& place, Affine<S>& affine) {
  hand_out<S>(shared, place, affine.shift);
  hand_out<S>(shared, place, affine.scale);
  hand_out<S>(shared, place, affine.bias);
}

// The same in both passes of the backward direction.
template <int S>
__device__ inline void affine_from_saved(const Shape& shape, const Place& place, const double* saved,
                                       const real_t* gamma, const real_t* beta, int has_scale, Affine<S>& affine) {
  if (place.position != 0) return;
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 c = place.channel + s;
    if (c < shape.channels) affine.set(s, saved[c], (has_scale ? gamma[c] : 1) * saved[shape.channels + c], beta[c]);
  }
}
