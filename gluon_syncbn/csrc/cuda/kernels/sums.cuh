// Sums over the threads of a block, and over blocks.

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

// After the blocks of a tile have left their sums in global memory: true on all threads of the last block of this tile.
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

// Called by the last block of each tile, after its part of the message: the last of all leaves `ticket` before the
// message, for the host to see. Counters are back at 0 then, for the next launch.
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
