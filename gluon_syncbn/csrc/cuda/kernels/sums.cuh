// Sums over the threads of a block, and over blocks.

// Every thread gets, for each of S sums, the sum over the threads that share its channels: first by shuffles over those
// of its warp, then over warps, always in the same order. `shared` has S * kThreads places. Called by all threads of a
// block.
template <typename T, int S>
__device__ inline void add_up(T* shared, const Place& place, T* values) {
  constexpr int kWarp = 32;
  const int span = place.size * place.stride, me = thread_number();
  for (int apart = place.stride; apart < kWarp && apart < span; apart *= 2) add_across<T, S>(values, apart);
  if (span <= kWarp) return;
  const int first = me - place.position * place.stride;
  const int apart = place.stride > kWarp ? place.stride : kWarp;
  __syncthreads();
#pragma unroll
  for (int s = 0; s < S; ++s) shared[s * kThreads + me] = values[s];
  __syncthreads();
#pragma unroll
  for (int s = 0; s < S; ++s) values[s] = 0;
  for (int from = 0; from < span; from += apart) {
#pragma unroll
    for (int s = 0; s < S; ++s) values[s] += shared[s * kThreads + first + from];
  }
}

// After the blocks of a tile have left their sums in global memory: true on all threads of the last block of this tile.
__device__ inline bool is_last_of_tile(int* counters) {
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (thread_number() == 0) {
    __threadfence();
    last = atomicAdd(counters + blockIdx.x, 1) == static_cast<int>(gridDim.y) - 1;
    __threadfence();
  }
  __syncthreads();
  return last != 0;
}

// Called by the last block of each tile, after its part of the message: the last of all leaves `ticket` before the
// message, for the host to see. Counters are back at 0 then, for the next launch.
__device__ inline void finish_tile(const BlockMemory& memory) {
  __threadfence_system();
  __syncthreads();
  if (thread_number() == 0) {
    memory.counters[blockIdx.x] = 0;
    __threadfence_system();
    if (atomicAdd(memory.counters + gridDim.x, 1) == static_cast<int>(gridDim.x) - 1) {
      memory.counters[gridDim.x] = 0;
      __threadfence_system();
      *static_cast<volatile double*>(memory.message) = memory.ticket;
    }
  }
}

// Number `which` of what block (tile, part) leaves for a channel.
__device__ inline int64 partial_at(const Shape& shape, int which, int part, int64 channel) {
  return (static_cast<int64>(which) * gridDim.y + part) * shape.channels + channel;
}

// Those that N parts of a tile, `step` apart, have left for the S channels of a thread.
template <int N, int S>
__device__ inline void load_parts(const double* partials, const Shape& shape, int which, int part, int step,
                                  int64 channel, double (&to)[N][S]) {
  const volatile double* const left = partials;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 c = channel + s;
      to[n][s] = c < shape.channels ? left[partial_at(shape, which, part + n * step, c)] : 0;
    }
  }
}

// Calls add.take for the parts of a tile that are this thread's, several at a time, so that their loads are under way
// together; of many channels fewer, which already are many loads.
template <int S, typename Add>
__device__ inline void over_parts(const Place& place, Add& add) {
  constexpr int kAtOnce = S > 1 ? 2 : 4;
  const int parts = static_cast<int>(gridDim.y);
  int part = place.position;
  for (; part + (kAtOnce - 1) * place.size < parts; part += kAtOnce * place.size) {
    add.template take<kAtOnce>(part, place.size);
  }
  for (; part < parts; part += place.size) add.template take<1>(part, place.size);
}
