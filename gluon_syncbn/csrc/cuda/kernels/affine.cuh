// z = (x − shift)·scale + bias, then y = activation(z + residual). Shift is the mean as real_t, and bias makes up for
// the rest.

// What follows the affine map. The numbers are those of Activation::Kind.
struct Epilogue {
  int activation;  // 0 none, 1 ReLU, 2 leaky ReLU
  real_t slope;
  int in_place;  // backward passes find z in y

  // NaN stays. Rounded after each step, as if the activation were an operator of its own.
  __device__ real_t activate(real_t z) const {
    if (activation == 0) return z;
    const real_t value = widen(narrow(z));
    return value <= 0 ? (activation == 1 ? real_t(0) : value * slope) : value;
  }

  // v, of which the backward passes take x̂: x as it is, or z from y.
  __device__ real_t value(real_t stored) const {
    return in_place && activation == 2 && stored <= 0 ? stored / slope : stored;
  }
};

template <typename Arguments>
__device__ inline Epilogue epilogue_of(const Arguments& arguments) {
  const Epilogue epilogue = {arguments.activation, static_cast<real_t>(arguments.slope), arguments.in_place};
  return epilogue;
}

template <int S>
struct Affine {
  real_t shift[S], scale[S], bias[S];
  Epilogue epilogue;

  __device__ void set(int s, double center, double times, double beta) {
    shift[s] = static_cast<real_t>(center);
    scale[s] = static_cast<real_t>(times);
    bias[s] = static_cast<real_t>(multiply_add(static_cast<double>(shift[s]) - center, times, beta));
  }

  __device__ real_t apply(int s, real_t x) const { return multiply_add(x - shift[s], scale[s], bias[s]); }

  // The gradient of z. Where z was NaN that of y is kept, which must not be lost.
  __device__ real_t passed(int s, real_t v, real_t dy) const {
    if (epilogue.activation == 0) return dy;
    const bool negative = (epilogue.in_place ? v : apply(s, v)) <= 0;
    return negative ? (epilogue.activation == 1 ? real_t(0) : epilogue.slope * dy) : dy;
  }
};

// Passes what each channel needs from the thread that has computed it to those that share the channel.
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

// γ and β of the whole affine map of a channel: with r and d of Batch Renormalization, and as in_place.h has it. True
// if another γ was taken for that.
__device__ inline bool effective(int in_place, double r, double d, double& gamma, double& beta) {
  beta += gamma * d;
  gamma *= r;
  if (!in_place) return false;
  const double least = kLeastGamma * (fabs(beta) > 1 ? fabs(beta) : 1);
  if (fabs(gamma) >= least) return false;
  gamma = gamma < 0 ? -least : least;
  return true;
}

// What the backward passes know of a channel: (v − center)·xhat_scale is x̂.
struct Saved {
  double center, xhat_scale, invstd, gamma, beta, r, d;
  bool moved;  // whether another γ was taken

  template <typename Arguments>
  __device__ Saved(const Arguments& arguments, int64 c) {
    const int64 channels = arguments.channels;
    const double* const saved = arguments.saved;
    const int in_place = arguments.in_place;
    invstd = saved[channels + c];
    r = saved[2 * channels + c];
    d = saved[3 * channels + c];
    gamma = arguments.has_scale ? arguments.gamma[c] : 1;
    beta = arguments.beta[c];
    moved = effective(in_place, r, d, gamma, beta);
    center = in_place ? beta : saved[c];
    xhat_scale = in_place ? 1 / gamma : invstd;
  }
};

// After the four vectors of `saved`: count, round_id, active_set.
template <typename Arguments>
__device__ inline const double* call_of(const Arguments& arguments) {
  return arguments.saved + 4 * arguments.channels;
}

// The same in both passes of the backward direction.
template <typename Arguments, int S>
__device__ inline void affine_from_saved(const Arguments& arguments, const Place& place, Affine<S>& affine) {
  if (place.position != 0) return;
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 c = place.channel + s;
    if (c >= arguments.channels) continue;
    const Saved then(arguments, c);
    affine.set(s, then.center, then.gamma * then.invstd, then.beta);
  }
}
