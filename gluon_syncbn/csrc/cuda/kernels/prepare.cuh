// What a pass must know of each channel before it begins, as kVectors numbers. It is computed once per tile, from a
// message that lies in the host's memory and in float64: by the block of the tile that comes first, which leaves it for
// the others in `partials` and then says so in `tickets`. They wait for that; the first one waits for nobody, so the
// wait ends whatever else the GPU does. Where there is no message (kShares is false) each block computes it.

// Counters of a launch: two per tile, of blocks that are through, and of blocks that have come, and one of tiles.
__device__ inline int* arrivals(const BlockMemory& memory) { return memory.counters + gridDim.x + 1; }

// `values[v * S + s]` on all threads of the block: number v of channel s of the thread. `compute(c, is_first, out)`
// fills out[v] for a channel.
template <int S, int kVectors, bool kShares, typename Compute>
__device__ inline void prepare(const Shape& shape, const BlockMemory& memory, const Place& place, Compute& compute,
                               real_t* values) {
  __shared__ real_t shared[kVectors * kThreads];
  __shared__ int number;
  const bool shares = SHARE && kShares && gridDim.y > 1;
  double* const left = memory.partials;
  volatile double* const said = memory.tickets + blockIdx.x;
  if (shares && thread_number() == 0) {
    int* const arrived = arrivals(memory) + blockIdx.x;
    number = atomicAdd(arrived, 1);
    if (number == static_cast<int>(gridDim.y) - 1) *arrived = 0;
    if (number != 0) {
      while (*said != memory.ticket) wait_for_block();
      __threadfence();
    }
  }
  __syncthreads();
  const bool is_first = shares ? number == 0 : blockIdx.y == 0;
  if (place.position == 0) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const int64 c = place.channel + s;
      real_t* const out = shared + (place.lead + s) * kVectors;
      if (c >= shape.channels) {
        for (int v = 0; v < kVectors; ++v) out[v] = 0;
      } else if (!shares || is_first) {
        compute(c, is_first, out);
        if (shares) {
          for (int v = 0; v < kVectors; ++v) left[c * kVectors + v] = out[v];
        }
      } else {
        const volatile double* const found = left + c * kVectors;
        for (int v = 0; v < kVectors; ++v) out[v] = static_cast<real_t>(found[v]);
      }
    }
  }
  if (shares && is_first) __threadfence();
  __syncthreads();
  if (shares && is_first && thread_number() == 0) {
    __threadfence();
    *said = memory.ticket;
  }
#pragma unroll
  for (int s = 0; s < S; ++s) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) values[v * S + s] = shared[(place.lead + s) * kVectors + v];
  }
}
