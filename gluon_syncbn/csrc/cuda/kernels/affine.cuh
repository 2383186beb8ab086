// z = (x − shift)·scale + bias, then y = activation(z + residual). Shift is the mean rounded to real_t, and bias makes
// up for the rounding.

constexpr int kActivation = ACTIVATION;  // 0 none, 1 ReLU, 2 leaky ReLU, as Activation::Kind
constexpr bool kResidual = RESIDUAL;
constexpr bool kFromOutput = FROM_OUTPUT;  // backward passes compute z from y

// Keeps NaN. Rounds after each step, as if the activation were an operator of its own.
__device__ inline real_t activate(real_t z, real_t slope) {
  if (kActivation == 0) return z;
  const real_t value = widen(narrow(z));
  return value <= 0 ? (kActivation == 1 ? real_t(0) : value * slope) : value;
}

// v, from which the backward passes compute x̂: x itself, or z from y.
__device__ inline real_t value_of(real_t stored, real_t slope) {
  return kFromOutput && kActivation == 2 && stored <= 0 ? stored / slope : stored;
}

// Shift, scale and bias of a channel.
__device__ inline void set_affine(double center, double times, double beta, real_t* out) {
  out[0] = static_cast<real_t>(center);
  out[1] = static_cast<real_t>(times);
  out[2] = static_cast<real_t>(multiply_add(static_cast<double>(out[0]) - center, times, beta));
}

template <int S>
struct Affine {
  real_t shift[S], scale[S], bias[S];

  // All shifts, then all scales, then all biases.
  __device__ explicit Affine(const real_t* known) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      shift[s] = known[s];
      scale[s] = known[S + s];
      bias[s] = known[2 * S + s];
    }
  }

  __device__ real_t apply(int s, real_t x) const { return multiply_add(x - shift[s], scale[s], bias[s]); }

  // The gradient of z, without a residual. Where z is NaN, this is dy, which must not be lost.
  __device__ real_t passed(int s, real_t v, real_t dy, real_t slope) const {
    if (kActivation == 0) return dy;
    const bool negative = (kFromOutput ? v : apply(s, v)) <= 0;
    return negative ? (kActivation == 1 ? real_t(0) : slope * dy) : dy;
  }
};

// Puts r and d of Batch Renormalization into γ and β and, if `clamps`, keeps γ away from 0 as least_gamma.h says.
// Returns whether that changed γ.
__device__ inline bool effective(bool clamps, double r, double d, double& gamma, double& beta) {
  beta += gamma * d;
  gamma *= r;
  if (!clamps) return false;
  const double least = 1.0 / INVERSE_LEAST_GAMMA * (fabs(beta) > 1 ? fabs(beta) : 1);
  if (fabs(gamma) >= least) return false;
  gamma = gamma < 0 ? -least : least;
  return true;
}

// The saved statistics of a channel, for the backward passes: x̂ = (v − center)·xhat_scale.
struct Saved {
  double center, xhat_scale, invstd, gamma, beta, r, d;
  bool moved;  // whether γ was clamped

  template <typename Arguments>
  __device__ Saved(const Arguments& arguments, int64 c) {
    const int64 channels = arguments.shape.channels;
    const double* const saved = arguments.saved;
    invstd = saved[channels + c];
    r = saved[2 * channels + c];
    d = saved[3 * channels + c];
    gamma = arguments.gamma ? arguments.gamma[c] : 1;
    beta = arguments.beta[c];
    moved = effective(kFromOutput, r, d, gamma, beta);
    center = kFromOutput ? beta : saved[c];
    xhat_scale = kFromOutput ? 1 / gamma : invstd;
  }

  __device__ void affine(real_t* out) const { set_affine(center, gamma * invstd, beta, out); }
};

// The affine map of a channel in the backward passes.
template <typename Arguments>
struct SavedChannel {
  const Arguments& arguments;

  __device__ void operator()(int64 c, bool, real_t* out) const { Saved(arguments, c).affine(out); }
};

// After the four vectors of `saved`: count, round_id, active_set.
template <typename Arguments>
__device__ inline const double* call_of(const Arguments& arguments) {
  return arguments.saved + 4 * arguments.shape.channels;
}

// Prepares kVectors numbers for each channel, which a pass needs before it begins. Each block computes them for its
// tile, one thread for each channel, in float64, from a message in the host's memory.
//
// `compute(c, is_first, out)` fills out[v] for a channel; `is_first` is true in one block.
template <typename Threads, int kVectors, typename Compute>
struct Prepare {
  static constexpr int S = Threads::kColumns;
  const Shape& shape;
  Compute compute;
  real_t values[kVectors * S];  // values[v * S + s] is number v of column s of this thread

  __device__ Prepare(const Shape& shape, const Compute& compute) : shape(shape), compute(compute) {}

  __device__ void operator()() {
    __shared__ real_t table[kVectors][kMostChannels];
    const int k = thread_number();
    const int64 c = first_channel(shape) + k;
    if (has_channel(shape, k)) {
      real_t out[kVectors];
      compute(c, blockIdx.y == 0, out);
      for (int v = 0; v < kVectors; ++v) table[v][k] = out[v];
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int channel = Threads::channel(shape, s);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) values[v * S + s] = table[v][channel];
    }
  }
};
