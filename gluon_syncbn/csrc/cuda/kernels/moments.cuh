// Moments: one pass over x. Every chunk in registers has its mean and centred squares taken (two passes over
// registers), and is merged into the thread's (Chan, Golub and LeVeque, 1979). x counts from the channel's first value,
// so that a mean that is large against the deviation costs no digits.

template <int S>
struct MomentsPass {
  const value_t* x;
  real_t origin[S];
  real_t count, mean[S], m2[S];

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    const Packs<V> loaded(x + offset, stride, packs);
    constexpr int kPerChannel = S == 1 ? V : 1;  // of a pack
    const real_t size = static_cast<real_t>(packs * kPerChannel);
    const real_t share = 1 / size;
    count += size;
    const real_t weight = size / count;
    real_t values[kUnroll][V], sum[S], squares[S];
#pragma unroll
    for (int s = 0; s < S; ++s) sum[s] = squares[s] = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
      loaded.raw[u].unpack(values[u]);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int s = S == 1 ? 0 : i;
        values[u][i] -= origin[s];
        sum[s] += values[u][i];
      }
    }
#pragma unroll
    for (int s = 0; s < S; ++s) sum[s] *= share;  // the mean now
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int s = S == 1 ? 0 : i;
        const real_t distance = values[u][i] - sum[s];
        squares[s] = multiply_add(distance, distance, squares[s]);
      }
    }
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const real_t distance = sum[s] - mean[s];
      mean[s] = multiply_add(distance, weight, mean[s]);
      m2[s] += multiply_add(distance * (count - size), distance * weight, squares[s]);
    }
  }
};

// What the blocks of a tile have left for the channels of a thread: first means, weighted by counts, and counts.
template <int S>
struct CountsAndMeans {
  const double* partials;
  const Shape& shape;
  int64 channel;
  double sums[S + 1];  // the last: the count

  template <int N>
  __device__ void take(int part, int step) {
    double counts[N][1], means[N][S];
    load_parts(partials, shape, 0, part, step, channel, counts);
    load_parts(partials, shape, 1, part, step, channel, means);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      sums[S] += counts[n][0];
#pragma unroll
      for (int s = 0; s < S; ++s) sums[s] += counts[n][0] * means[n][s];
    }
  }
};

// Then squares about the mean of all.
template <int S>
struct Squares {
  const double* partials;
  const Shape& shape;
  int64 channel;
  const double* mean;
  double sums[S];

  template <int N>
  __device__ void take(int part, int step) {
    double counts[N][1], means[N][S], squares[N][S];
    load_parts(partials, shape, 0, part, step, channel, counts);
    load_parts(partials, shape, 1, part, step, channel, means);
    load_parts(partials, shape, 2, part, step, channel, squares);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int s = 0; s < S; ++s) {
        const double distance = means[n][s] - mean[s];
        sums[s] += squares[n][s] + counts[n][0] * distance * distance;
      }
    }
  }
};

// `pass` on every thread of the block → the message: mean[C] and M2[C], and if they are wanted, for Batch
// Renormalization, the running mean[C] and variance[C].
template <int S>
__device__ inline void finish_moments(const MomentsArguments& arguments, const Place& place,
                                      const MomentsPass<S>& pass) {
  __shared__ double shared[(S + 1) * kThreads];
  real_t* real_shared = reinterpret_cast<real_t*>(shared);
  const Shape& shape = arguments.shape;
  double* const partials = arguments.memory.partials;
  double* const message = arguments.memory.message;
  const bool leads = place.position == 0;

  real_t sums[S + 1], m2[S];  // of sums the last is the count
#pragma unroll
  for (int s = 0; s < S; ++s) sums[s] = pass.count * pass.mean[s];
  sums[S] = pass.count;
  add_up<real_t, S + 1>(real_shared, place, sums);
  const real_t count = sums[S];
#pragma unroll
  for (int s = 0; s < S; ++s) {
    sums[s] = count > 0 ? sums[s] / count : 0;  // the mean now
    const real_t distance = pass.mean[s] - sums[s];
    m2[s] = pass.count > 0 ? multiply_add(pass.count * distance, distance, pass.m2[s]) : 0;
  }
  add_up<real_t, S>(real_shared, place, m2);
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 channel = place.channel + s;
    if (leads && channel < shape.channels) {
      partials[partial_at(shape, 0, blockIdx.y, channel)] = count;
      partials[partial_at(shape, 1, blockIdx.y, channel)] = sums[s];
      partials[partial_at(shape, 2, blockIdx.y, channel)] = m2[s];
    }
  }
  if (!is_last_of_tile(arguments.memory.counters)) return;

  CountsAndMeans<S> whole = {partials, shape, place.channel, {}};
  over_parts<S>(place, whole);
  add_up<double, S + 1>(shared, place, whole.sums);
#pragma unroll
  for (int s = 0; s < S; ++s) whole.sums[s] /= whole.sums[S];  // the mean now
  Squares<S> squares = {partials, shape, place.channel, whole.sums, {}};
  over_parts<S>(place, squares);
  add_up<double, S>(shared, place, squares.sums);
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 channel = place.channel + s;
    if (leads && channel < shape.channels) {
      message[1 + channel] = pass.origin[s] + whole.sums[s];
      message[1 + shape.channels + channel] = squares.sums[s];
      if (arguments.running_mean) {
        message[1 + 2 * shape.channels + channel] = arguments.running_mean[channel];
        message[1 + 3 * shape.channels + channel] = arguments.running_var[channel];
      }
    }
  }
  finish_tile(arguments.memory);
}

template <typename Threads>
__device__ inline void run(const MomentsArguments& arguments) {
  constexpr int S = Threads::kChannels;
  const Shape& shape = arguments.shape;
  const Place place = Threads::place();
  MomentsPass<S> pass;
  pass.x = arguments.x;
  pass.count = 0;
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 channel = place.channel + s;
    pass.origin[s] = channel < shape.channels ? widen(pass.x[channel * shape.inner]) : 0;
    pass.mean[s] = pass.m2[s] = 0;
  }
  Threads::template walk<false, false>(shape, pass.x, place, pass);
  finish_moments(arguments, place, pass);
}
