// Prepares kVectors numbers for each channel, which a pass needs before it begins. Each block computes them for its
// tile, one thread for each channel, in float64, from a message in the host's memory.

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
