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
    real_t values[kUnroll][V];
    load_packs<V>(x + offset, stride, packs, values);
    constexpr int kPerChannel = S == 1 ? V : 1;  // of a pack
    const real_t size = static_cast<real_t>(packs * kPerChannel);
    const real_t share = 1 / size;
    count += size;
    const real_t weight = size / count;
    real_t sum[S], squares[S];
#pragma unroll
    for (int s = 0; s < S; ++s) sum[s] = squares[s] = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
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

// `pass` on every thread of the block → the message: mean[C] and M2[C], and if they are wanted, for Batch
// Renormalization, the running mean[C] and variance[C].
template <int S>
__device__ inline void finish_moments(const MomentsArguments& arguments, const Place& place,
                                      const MomentsPass<S>& pass) {
  __shared__ double shared[S * kThreads];
  real_t* real_shared = reinterpret_cast<real_t*>(shared);
  const Shape shape = shape_of(arguments);
  double* const partials = arguments.partials;
  double* const message = arguments.message;
  const bool leads = place.position == 0;
  const int parts = static_cast<int>(gridDim.y);

  real_t count[1] = {pass.count}, mean[S], m2[S];
  add_up<real_t, 1>(real_shared, place, count);
#pragma unroll
  for (int s = 0; s < S; ++s) mean[s] = count[0] > 0 ? pass.mean[s] * (pass.count / count[0]) : 0;
  add_up<real_t, S>(real_shared, place, mean);
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const real_t distance = pass.mean[s] - mean[s];
    m2[s] = pass.count > 0 ? multiply_add(pass.count * distance, distance, pass.m2[s]) : 0;
  }
  add_up<real_t, S>(real_shared, place, m2);
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 channel = place.channel + s;
    if (leads && channel < shape.channels) {
      partials[partial_at(shape, 0, blockIdx.y, channel)] = count[0];
      partials[partial_at(shape, 1, blockIdx.y, channel)] = mean[s];
      partials[partial_at(shape, 2, blockIdx.y, channel)] = m2[s];
    }
  }
  if (!is_last_of_tile(arguments.counters)) return;

  const volatile double* left = partials;
  double total[1] = {0}, sums[S];
#pragma unroll
  for (int s = 0; s < S; ++s) sums[s] = 0;
  for (int part = place.position; part < parts; part += place.size) {
    if (place.channel < shape.channels) total[0] += left[partial_at(shape, 0, part, place.channel)];
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 channel = place.channel + s;
      if (channel < shape.channels) {
        sums[s] += left[partial_at(shape, 0, part, channel)] * left[partial_at(shape, 1, part, channel)];
      }
    }
  }
  add_up<double, 1>(shared, place, total);
  add_up<double, S>(shared, place, sums);
  double squares[S];
#pragma unroll
  for (int s = 0; s < S; ++s) {
    sums[s] /= total[0];  // the mean now
    squares[s] = 0;
  }
  for (int part = place.position; part < parts; part += place.size) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 channel = place.channel + s;
      if (channel < shape.channels) {
        const double distance = left[partial_at(shape, 1, part, channel)] - sums[s];
        squares[s] +=
            left[partial_at(shape, 2, part, channel)] + left[partial_at(shape, 0, part, channel)] * distance * distance;
      }
    }
  }
  add_up<double, S>(shared, place, squares);
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 channel = place.channel + s;
    if (leads && channel < shape.channels) {
      message[1 + channel] = pass.origin[s] + sums[s];
      message[1 + shape.channels + channel] = squares[s];
      if (arguments.wants_running) {
        message[1 + 2 * shape.channels + channel] = arguments.running_mean[channel];
        message[1 + 3 * shape.channels + channel] = arguments.running_var[channel];
      }
    }
  }
  finish_tile(arguments.counters, message, arguments.ticket);
}

template <int S>
__device__ inline MomentsPass<S> start_moments(const Shape& shape, const Place& place, const value_t* x) {
  MomentsPass<S> pass;
  pass.x = x;
  pass.count = 0;
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 channel = place.channel + s;
    pass.origin[s] = channel < shape.channels ? widen(x[channel * shape.inner]) : 0;
    pass.mean[s] = pass.m2[s] = 0;
  }
  return pass;
}

template <typename Threads, bool kResidual>
__device__ inline void run(const MomentsArguments& arguments) {
  const Shape shape = shape_of(arguments);
  const Place place = Threads::place();
  MomentsPass<Threads::kChannels> pass = start_moments<Threads::kChannels>(shape, place, arguments.x);
  Threads::walk(shape, arguments.x, arguments.aligned, place, pass);
  finish_moments(arguments, place, pass);
}
