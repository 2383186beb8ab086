// The arithmetic of one GPU: the same four passes as kernels.h, for the compiler that MXNet has at run time (NVRTC, from
// CUDA 10.1 on, which needs --std=c++11). No header is included, because there may be none. Compiled once per type of
// the activations:
//
//   VALUE_TYPE  0 float32, 1 float64, 2 float16 (MXNet's type flags)
//
// Sums, parameters and statistics are float64 for float64 activations and float32 else; what leaves the GPU is float64.
//
// Tensors are (outer, channels, inner), dense. There are two ways to lay threads over them:
//
//   rows     inner > 1 (NCHW): a channel is `outer` runs of `inner` neighbours. blockDim = (threads on one channel,
//            channels of the block). Runs are cut into pieces, and the blocks of a channel take pieces in turn. Single
//            values at the ends of a run want a thread each: blockDim.x >= kPack - 1 where there are any.
//   columns  inner = 1 (channel-last, and (N, C)): channels are neighbours. blockDim = (threads side by side, rows).
//            Each thread keeps its channels and walks down the rows.
//
// gridDim.x blocks share out the channels (a block's channels are its tile), gridDim.y blocks share one tile. launch.h
// chooses the numbers. A thread reads packs of 16 bytes, kUnroll of them at a time so that many are under way; where a
// run is not aligned its first and last values are read singly, and with `aligned` = 0 all are.
//
// The two passes that reduce end on the GPU: the last block of a tile adds up what the others have left, in a fixed
// order, so that results are the same bits every time; the last of those says in host memory that all is there.

#if VALUE_TYPE == 1
typedef double value_t;
typedef double real_t;
#elif VALUE_TYPE == 2
typedef unsigned short value_t;
typedef float real_t;
#else
typedef float value_t;
typedef float real_t;
#endif
typedef long long int64;

#define KERNEL extern "C" __global__ void __launch_bounds__(kThreads)

// Both as in launch.h; benchmarks/gpu.py tries others.
#ifndef THREADS
#define THREADS 256
#endif
#ifndef UNROLL
#define UNROLL 4
#endif
constexpr int kThreads = THREADS;  // in a block
constexpr int kUnroll = UNROLL;
constexpr int kPack = 16 / static_cast<int>(sizeof(value_t));

// ---------------------------------------------------------------------------------------------------------------------
// Values

#ifdef __CUDACC__
// cuda_fp16.h is not there at run time.
__device__ inline float half_to_float(unsigned short half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
__device__ inline unsigned short float_to_half(float value) {
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

// 16 bytes at once. In plain C++ it is left to the compiler, and NVRTC 11 makes up to four accesses of it, of 4 bytes each.
__device__ inline uint4 load_pack(const void* from) {
  uint4 bits;
  asm volatile("{ .reg .u64 at; cvta.to.global.u64 at, %4; ld.global.v4.u32 {%0, %1, %2, %3}, [at]; }"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(from));
  return bits;
}
__device__ inline void store_pack(void* to, const uint4& bits) {
  asm volatile("{ .reg .u64 at; cvta.to.global.u64 at, %0; st.global.v4.u32 [at], {%1, %2, %3, %4}; }"
               :
               : "l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
}
#endif

__device__ inline real_t widen(value_t value) {
#if VALUE_TYPE == 2
  return half_to_float(value);
#else
  return value;
#endif
}

__device__ inline value_t narrow(real_t value) {
#if VALUE_TYPE == 2
  return float_to_half(value);
#else
  return value;
#endif
}

// One rounding, here and there the same: whether an output was positive must not depend on the pass that asks.
__device__ inline float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }

// The values of 16 bytes, and back.
__device__ inline void unpack(const uint4& bits, real_t* values) {
  const unsigned words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
#if VALUE_TYPE == 1
    values[i] = __hiloint2double(static_cast<int>(words[2 * i + 1]), static_cast<int>(words[2 * i]));
#elif VALUE_TYPE == 2
    values[i] = half_to_float(static_cast<unsigned short>(words[i / 2] >> (16 * (i % 2))));
#else
    values[i] = __uint_as_float(words[i]);
#endif
  }
}

__device__ inline uint4 pack(const real_t* values) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if VALUE_TYPE == 1
    words[i] = static_cast<unsigned>(i % 2 ? __double2hiint(values[i / 2]) : __double2loint(values[i / 2]));
#elif VALUE_TYPE == 2
    words[i] = float_to_half(values[2 * i]) | static_cast<unsigned>(float_to_half(values[2 * i + 1])) << 16;
#else
    words[i] = __float_as_uint(values[i]);
#endif
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// V values at a time: 1 or kPack.
template <int V>
struct Access {
  __device__ static void load(const value_t* from, real_t* to) { unpack(load_pack(from), to); }
  __device__ static void store(value_t* to, const real_t* from) { store_pack(to, pack(from)); }
};
template <>
struct Access<1> {
  __device__ static void load(const value_t* from, real_t* to) { *to = widen(*from); }
  __device__ static void store(value_t* to, const real_t* from) { *to = narrow(*from); }
};

// Up to kUnroll of them, so that all are under way before the first is used.
template <int V>
__device__ inline void load_packs(const value_t* from, int64 stride, int packs, real_t (&to)[kUnroll][V]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (u < packs) Access<V>::load(from + u * stride, to[u]);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Threads over a tensor

struct Shape {
  int64 outer, channels, inner;
};

// Where a thread stands: among those that share its channels (position of size), which lie `stride` threads apart.
struct Place {
  int position, size, stride;
  int64 channel;  // the first of its channels
};

__device__ inline int thread_number() { return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); }

__device__ inline Place place_in_rows() {
  Place place = {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), 1,
                 static_cast<int64>(blockIdx.x) * blockDim.y + threadIdx.y};
  return place;
}

template <int V>
__device__ inline Place place_in_columns() {
  Place place = {static_cast<int>(threadIdx.y), static_cast<int>(blockDim.y), static_cast<int>(blockDim.x),
                 (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * V};
  return place;
}

// Calls pass.take<V>(offset, stride, packs) for everything that is this thread's: up to kUnroll packs of V values, the
// first at `offset`, each `stride` values behind the last. `address` is that of a tensor, for its alignment; all tensors
// of a call are aligned alike, or `aligned` is 0.
template <typename Pass>
__device__ inline void over_rows(const Shape& shape, const value_t* address, int aligned, const Place& place,
                                 Pass& pass) {
  if (place.channel >= shape.channels) return;
  const int64 width = aligned ? kPack : 1;
  const int64 piece = width * kUnroll * place.size;
  const int64 pieces = (shape.inner + piece - 1) / piece;
  // Piece number blockIdx.y, then every gridDim.y-th, without a division (of 64 bits, dear on a GPU) for each.
  const int64 runs_on = gridDim.y / pieces, pieces_on = gridDim.y - runs_on * pieces;
  int64 run = blockIdx.y / pieces, number = blockIdx.y - run * pieces;
  while (run < shape.outer) {
    const int64 begin = number * piece;
    const int64 offset = (run * shape.channels + place.channel) * shape.inner + begin;
    const int64 size = shape.inner - begin < piece ? shape.inner - begin : piece;
    run += runs_on;
    number += pieces_on;
    if (number >= pieces) {
      number -= pieces;
      ++run;
    }
    if (!aligned) {
      int packs = 0;
      while (packs < kUnroll && place.position + packs * place.size < size) ++packs;
      if (packs > 0) pass.template take<1>(offset + place.position, place.size, packs);
      continue;
    }
    // Values before the first whole pack; every piece of a run begins as far from one.
    const int64 from_pack = (reinterpret_cast<unsigned long long>(address + offset) & 15) / sizeof(value_t);
    int64 head = from_pack ? kPack - from_pack : 0;
    if (head > size) head = size;
    const int64 whole = (size - head) / kPack, tail = size - head - whole * kPack;
    int packs = 0;
    while (packs < kUnroll && place.position + packs * place.size < whole) ++packs;
    if (packs > 0) {
      pass.template take<kPack>(offset + head + place.position * kPack, static_cast<int64>(place.size) * kPack, packs);
    }
    if (place.position < head) pass.template take<1>(offset + place.position, 0, 1);
    if (place.position < tail) pass.template take<1>(offset + head + whole * kPack + place.position, 0, 1);
  }
}

template <int V, typename Pass>
__device__ inline void over_columns(const Shape& shape, const Place& place, Pass& pass) {
  if (place.channel >= shape.channels) return;
  const int64 step = static_cast<int64>(place.size) * gridDim.y;
  for (int64 row = static_cast<int64>(blockIdx.y) * place.size + place.position; row < shape.outer;
       row += step * kUnroll) {
    int packs = 1;
    while (packs < kUnroll && row + packs * step < shape.outer) ++packs;
    pass.template take<V>(row * shape.channels + place.channel, step * shape.channels, packs);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums over threads and blocks

// Every thread gets, for each of its S channels, the sum over the threads that share them. `shared` has S * kThreads
// places. Called by all threads of a block.
template <typename T, int S>
__device__ inline void add_up(T* shared, const Place& place, T* values) {
  const int me = thread_number();
  __syncthreads();
#pragma unroll
  for (int s = 0; s < S; ++s) shared[s * kThreads + me] = values[s];
  __syncthreads();
  for (int half = place.size / 2; half > 0; half /= 2) {
    if (place.position < half) {
#pragma unroll
      for (int s = 0; s < S; ++s) shared[s * kThreads + me] += shared[s * kThreads + me + half * place.stride];
    }
    __syncthreads();
  }
  const int first = me - place.position * place.stride;
#pragma unroll
  for (int s = 0; s < S; ++s) values[s] = shared[s * kThreads + first];
}

// Behind what its blocks have left in global memory: true on all threads of the last block of this tile.
__device__ inline bool is_last_of_tile(int* counters) {
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (thread_number() == 0) {
    last = atomicAdd(counters + blockIdx.x, 1) == static_cast<int>(gridDim.y) - 1;
    __threadfence();
  }
  __syncthreads();
  return last != 0;
}

// By the last block of each tile, behind its part of the message: the last of all leaves `ticket` in front of it, for
// the host to see. Counters are back at 0 then, for the next launch.
__device__ inline void finish_tile(int* counters, double* message, double ticket) {
  __threadfence_system();
  __syncthreads();
  if (thread_number() == 0) {
    counters[blockIdx.x] = 0;
    if (atomicAdd(counters + gridDim.x, 1) == static_cast<int>(gridDim.x) - 1) {
      counters[gridDim.x] = 0;
      __threadfence_system();
      *static_cast<volatile double*>(message) = ticket;
    }
  }
}

// Number `which` of what block (tile, part) leaves for a channel.
__device__ inline int64 partial_at(const Shape& shape, int which, int part, int64 channel) {
  return (static_cast<int64>(which) * gridDim.y + part) * shape.channels + channel;
}

// ---------------------------------------------------------------------------------------------------------------------
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

// `pass` on every thread of the block → the message: mean[C] and M2[C].
template <int S>
__device__ inline void finish_moments(const Shape& shape, const Place& place, MomentsPass<S>& pass, double* partials,
                                      int* counters, double* message, double ticket) {
  __shared__ double shared[S * kThreads];
  real_t* real_shared = reinterpret_cast<real_t*>(shared);
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
  if (!is_last_of_tile(counters)) return;

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
        squares[s] += left[partial_at(shape, 2, part, channel)] +
                      left[partial_at(shape, 0, part, channel)] * distance * distance;
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
    }
  }
  finish_tile(counters, message, ticket);
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

KERNEL moments_rows(const value_t* x, double* partials, int* counters, double* message, int64 outer, int64 channels,
                    int64 inner, int aligned, double ticket) {
  const Shape shape = {outer, channels, inner};
  const Place place = place_in_rows();
  MomentsPass<1> pass = start_moments<1>(shape, place, x);
  over_rows(shape, x, aligned, place, pass);
  finish_moments<1>(shape, place, pass, partials, counters, message, ticket);
}

template <int V>
__device__ inline void moments_columns_by(const value_t* x, double* partials, int* counters, double* message,
                                          const Shape& shape, double ticket) {
  const Place place = place_in_columns<V>();
  MomentsPass<V> pass = start_moments<V>(shape, place, x);
  over_columns<V>(shape, place, pass);
  finish_moments<V>(shape, place, pass, partials, counters, message, ticket);
}

KERNEL moments_columns(const value_t* x, double* partials, int* counters, double* message, int64 outer,
                       int64 channels, int64 inner, int aligned, double ticket) {
  const Shape shape = {outer, channels, inner};
  if (aligned) {
    moments_columns_by<kPack>(x, partials, counters, message, shape, ticket);
  } else {
    moments_columns_by<1>(x, partials, counters, message, shape, ticket);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
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

  // What of dy passes the relu, whose output for x was positive (or NaN, which must not be lost).
  __device__ real_t passed(int s, real_t x, real_t dy) const { return relu && apply(s, x) <= 0 ? real_t(0) : dy; }
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
  double epsilon, momentum, count, number, taking_part;
  int training, has_scale, wants_saved;

  template <int S>
  __device__ void prepare(const Shape& shape, const Place& place, Affine<S>& affine) const {
    if (place.position != 0) return;
    // All are read before anything is written, so that the ways over the bus are gone at the same time.
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
          saved[2 * shape.channels + 1] = number;
          saved[2 * shape.channels + 2] = taking_part;
        }
      }
    }
  }
};

// Running statistics need no order among blocks: in prediction mode none writes them, and in training mode only the block
// that writes those of a channel reads them.
KERNEL normalize_rows(const value_t* x, value_t* y, const real_t* gamma, const real_t* beta, real_t* running_mean,
                      real_t* running_var, double* saved, const double* message, int64 outer, int64 channels,
                      int64 inner, int aligned, double epsilon, double momentum, double count, double number,
                      double taking_part, int training, int has_scale, int relu, int wants_y, int wants_saved) {
  __shared__ real_t shared[kThreads];
  const Shape shape = {outer, channels, inner};
  const Norm norm = {gamma, beta, running_mean, running_var, saved, message, epsilon, momentum, count, number,
                     taking_part, training, has_scale, wants_saved};
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
                         int64 inner, int aligned, double epsilon, double momentum, double count, double number,
                         double taking_part, int training, int has_scale, int relu, int wants_y, int wants_saved) {
  const Shape shape = {outer, channels, inner};
  const Norm norm = {gamma, beta, running_mean, running_var, saved, message, epsilon, momentum, count, number,
                     taking_part, training, has_scale, wants_saved};
  if (aligned) {
    normalize_columns_by<kPack>(x, y, shape, norm, relu, wants_y);
  } else {
    normalize_columns_by<1>(x, y, shape, norm, relu, wants_y);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Σ dy and Σ dy·(x − shift), where dy is what passes the relu. Of them S1 = Σ dy = dβ and S2 = Σ dy·x̂ = dγ.

// The same in both passes of the backward direction.
template <int S>
__device__ inline void remember_affine(const Shape& shape, const Place& place, const double* saved,
                                       const real_t* gamma, const real_t* beta, int has_scale, Affine<S>& affine) {
  if (place.position != 0) return;
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64 c = place.channel + s;
    if (c < shape.channels) affine.set(s, saved[c], (has_scale ? gamma[c] : 1) * saved[shape.channels + c], beta[c]);
  }
}

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
        const real_t passed = affine.passed(s, values[u][i], gradients[u][i]);
        sums[s] += passed;
        products[s] = multiply_add(passed, values[u][i] - affine.shift[s], products[s]);
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
// pass has left in `saved` (count, number, taking_part). Requests are MXNet's: 0 nothing, 3 add, else write.
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
    remember_affine(shape, place, saved, gamma, beta, has_scale, pass.affine);
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

// ---------------------------------------------------------------------------------------------------------------------
// dx = factor·dy + slope·(x − shift) + constant, with dy as above. `message` holds ΣS1[C] and ΣS2[C] of all devices, from
// place 1 on; they count only if `saved` says that the statistics depended on x.

template <int S>
struct InputGradientPass {
  const value_t *x, *dy;
  value_t* dx;
  Affine<S> affine;
  real_t slope[S], constant[S];
  int add;

  // Of the affine, scale is also the factor of dy.
  __device__ void prepare(const Shape& shape, const Place& place, const double* saved, const double* message) {
    const double count = saved[2 * shape.channels];
    if (place.position != 0) return;
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 c = place.channel + s;
      slope[s] = constant[s] = 0;
      if (c >= shape.channels || !(count > 0)) continue;
      const double mean = saved[c], invstd = saved[shape.channels + c];
      const double factor = affine.scale[s];
      const double by = -factor * invstd * (message[1 + shape.channels + c] / count);
      slope[s] = static_cast<real_t>(by);
      constant[s] = static_cast<real_t>(-factor * (message[1 + c] / count) -
                                        by * (mean - static_cast<double>(affine.shift[s])));
    }
  }

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    real_t values[kUnroll][V], gradients[kUnroll][V];
    load_packs<V>(x + offset, stride, packs, values);
    load_packs<V>(dy + offset, stride, packs, gradients);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= packs) continue;
      value_t* const to = dx + offset + u * stride;
      real_t before[V];
      if (add) Access<V>::load(to, before);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int s = S == 1 ? 0 : i;
        const real_t passed = affine.passed(s, values[u][i], gradients[u][i]);
        const real_t own = multiply_add(slope[s], values[u][i] - affine.shift[s], constant[s]);
        values[u][i] = multiply_add(affine.scale[s], passed, own);
        if (add) values[u][i] += before[i];
      }
      Access<V>::store(to, values[u]);
    }
  }
};

template <int S>
__device__ inline InputGradientPass<S> start_input_gradient(const Shape& shape, const Place& place, real_t* shared,
                                                            const value_t* x, const value_t* dy, value_t* dx,
                                                            const real_t* gamma, const real_t* beta,
                                                            const double* saved, const double* message, int has_scale,
                                                            int relu, int add) {
  InputGradientPass<S> pass;
  pass.x = x;
  pass.dy = dy;
  pass.dx = dx;
  pass.affine.relu = relu;
  pass.add = add;
  remember_affine(shape, place, saved, gamma, beta, has_scale, pass.affine);
  pass.prepare(shape, place, saved, message);
  hand_out(shared, place, pass.affine);
  hand_out<S>(shared, place, pass.slope);
  hand_out<S>(shared, place, pass.constant);
  return pass;
}

KERNEL input_gradient_rows(const value_t* x, const value_t* dy, value_t* dx, const real_t* gamma, const real_t* beta,
                           const double* saved, const double* message, int64 outer, int64 channels, int64 inner,
                           int aligned, int has_scale, int relu, int add) {
  __shared__ real_t shared[kThreads];
  const Shape shape = {outer, channels, inner};
  const Place place = place_in_rows();
  InputGradientPass<1> pass = start_input_gradient<1>(shape, place, shared, x, dy, dx, gamma, beta, saved, message,
                                                      has_scale, relu, add);
  over_rows(shape, x, aligned, place, pass);
}

template <int V>
__device__ inline void input_gradient_columns_by(const Shape& shape, const value_t* x, const value_t* dy, value_t* dx,
                                                 const real_t* gamma, const real_t* beta, const double* saved,
                                                 const double* message, int has_scale, int relu, int add) {
  __shared__ real_t shared[V * kThreads];
  const Place place = place_in_columns<V>();
  InputGradientPass<V> pass = start_input_gradient<V>(shape, place, shared, x, dy, dx, gamma, beta, saved, message,
                                                      has_scale, relu, add);
  over_columns<V>(shape, place, pass);
}

KERNEL input_gradient_columns(const value_t* x, const value_t* dy, value_t* dx, const real_t* gamma,
                              const real_t* beta, const double* saved, const double* message, int64 outer,
                              int64 channels, int64 inner, int aligned, int has_scale, int relu, int add) {
  const Shape shape = {outer, channels, inner};
  if (aligned) {
    input_gradient_columns_by<kPack>(shape, x, dy, dx, gamma, beta, saved, message, has_scale, relu, add);
  } else {
    input_gradient_columns_by<1>(shape, x, dy, dx, gamma, beta, saved, message, has_scale, relu, add);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// NaN everywhere: what remains of an output whose devices did not meet.

KERNEL lose(value_t* values, int64 size) {
  const real_t nothing = sqrt(real_t(-1));
  for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < size;
       i += static_cast<int64>(gridDim.x) * blockDim.x) {
    values[i] = narrow(nothing);
  }
}
