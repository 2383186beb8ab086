// Sums over the threads of a block, and over blocks. A sum (Moments, Sums) has a count and two numbers, a and b, of
// type T, has merge(other), and says whether it uses the count (kCounts). A group of threads adds up a channel, always
// in the same order.

// The group of this thread: `lanes` neighbours of a warp, for one channel. Groups may outnumber channels.
struct LaneGroup {
  int channel, lane, lanes;  // the channel counts from the tile's first
  bool is_used;              // the channel exists

  __device__ explicit LaneGroup(const Shape& shape) : lanes(32) {
    while (lanes * shape.tile > thread_count()) lanes /= 2;
    channel = thread_number() / lanes;
    lane = thread_number() - channel * lanes;
    is_used = has_channel(shape, channel);
  }

  // All threads of the block must call this.
  template <typename Sum>
  __device__ Sum merge(Sum sum) const {
    for (int apart = 1; apart < lanes; apart *= 2) {
      const Sum other = {from_thread(sum.count, apart), from_thread(sum.a, apart), from_thread(sum.b, apart)};
      sum.merge(other);
    }
    return sum;
  }
};

// A block calls this after it has left its sums in global memory. Returns true on all threads of the last block of the
// tile, and sets the tile's counter back to 0 for the next launch.
__device__ inline bool is_last_of_tile(int* counters) {
  __shared__ int last;
  __syncthreads();
  if (thread_number() == 0) {
    __threadfence();
    last = atomicAdd(counters + blockIdx.x, 1) == static_cast<int>(gridDim.y) - 1;
    if (last) counters[blockIdx.x] = 0;
    __threadfence();
  }
  __syncthreads();
  return last != 0;
}

// Leaves a number for the host, which sees its bits change.
__device__ inline void tell(double* to, double value) {
  if (__double_as_longlong(value) == static_cast<long long>(kNotThere)) value = value + 1;  // another NaN
  *static_cast<volatile double*>(to) = value;
}

// Adds up the group's channel over some of the block's threads, from their a[s] and b[s] of each column s. The lanes of
// the group share these threads.
template <typename Sum, typename Threads>
__device__ inline Sum sum_of_block(const Shape& shape, const LaneGroup& group, real_t count, const real_t* a,
                                   const real_t* b) {
  constexpr int S = Threads::kColumns, kSize = S * (kThreads + kThreads / 8);
  __shared__ real_t all_a[kSize], all_b[kSize], counts[Sum::kCounts ? kThreads : 1];
  const Block block = Threads::block(shape);
  // A row has one place more than threads, against bank conflicts.
  const auto place = [&](int row, int column) { return (row * S + column % S) * (block.width + 1) + column / S; };
  const int row = Threads::row(shape), column = Threads::column(shape);
  if (row < block.rows) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      all_a[place(row, column + s)] = a[s];
      all_b[place(row, column + s)] = b[s];
    }
    if (Sum::kCounts) counts[row * block.width + column / S] = count;
  }
  __syncthreads();
  Sum sum = {0, 0, 0};
  if (!group.is_used) return sum;
  // A lane begins at its own number and goes on by the number of lanes.
  int from_row = group.lane / block.run, from = group.lane - from_row * block.run;
  const int rows_on = group.lanes / block.run, on = group.lanes - rows_on * block.run;
  while (from_row < block.rows) {
    const int here = group.channel * block.run + from, there = place(from_row, here);
    const Sum other = {Sum::kCounts ? counts[from_row * block.width + here / S] : 0, all_a[there], all_b[there]};
    sum.merge(other);
    from_row += rows_on;
    from += on;
    if (from >= block.run) {
      from -= block.run;
      ++from_row;
    }
  }
  return sum;
}

// The sum of a channel that a block leaves for the last block of its tile.
struct Left {
  real_t count, a, b;
};

// The total a (0) or b (1) of a channel of the tile.
__device__ inline double& total(int which, int channel) {
  __shared__ double totals[2][kMostChannels];  // the same for all kernels
  return totals[which][channel];
}

// Adds up each channel over all blocks. Returns true on the first threads of the last block of a tile, one thread for
// each channel, whose `total` is then complete: so neighbouring threads write neighbouring numbers for the host.
template <template <typename> class Sum, typename Threads>
__device__ inline bool add_up(const Shape& shape, const BlockMemory& memory, real_t count, const real_t* a,
                              const real_t* b) {
  const LaneGroup group(shape);
  const Sum<real_t> own = group.merge(sum_of_block<Sum<real_t>, Threads>(shape, group, count, a, b));
  const bool is_first = group.is_used && group.lane == 0;
  Sum<double> sum = {own.count, own.a, own.b};
  const int parts = static_cast<int>(gridDim.y);
  if (parts > 1) {
    // A tile has cache lines of its own, so no L1 cache holds old contents that the last block of another tile has
    // read, and plain loads, which that cache serves, are right.
    const int64 per_tile = (static_cast<int64>(parts) * shape.tile + kLeftTogether - 1) / kLeftTogether * kLeftTogether;
    Left* const left = reinterpret_cast<Left*>(memory.partials) + blockIdx.x * per_tile + group.channel;
    if (is_first) left[blockIdx.y * shape.tile] = {own.count, own.a, own.b};
    if (!is_last_of_tile(memory.counters)) return false;
    constexpr int kParts = 4;  // loads under way together
    sum.count = sum.a = sum.b = 0;
    for (int part = group.lane; group.is_used && part < parts; part += kParts * group.lanes) {
      real_t found[kParts][3];
#pragma unroll
      for (int n = 0; n < kParts; ++n) {
        const int one = part + n * group.lanes;
        const bool is_there = one < parts;
        const Left& place = left[(is_there ? one : part) * shape.tile];
        found[n][0] = is_there ? place.count : 0;
        found[n][1] = is_there ? place.a : 0;
        found[n][2] = is_there ? place.b : 0;
      }
#pragma unroll
      for (int n = 0; n < kParts; ++n) {
        const Sum<double> other = {found[n][0], found[n][1], found[n][2]};
        sum.merge(other);
      }
    }
    sum = group.merge(sum);
  }
  if (is_first) {
    total(0, group.channel) = sum.a;
    total(1, group.channel) = sum.b;
  }
  __syncthreads();
  return has_channel(shape, thread_number());
}
