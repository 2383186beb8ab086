// Mean and M2 of each channel, in one pass over x.

// Σ (x − shift) and Σ (x − shift)² over at most kBlock values.
template <typename T, typename A>
inline void block_moments(const T* x, int64_t size, A shift, double* sum, double* squares) {
  A s[kLanes] = {}, q[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const A t = Storage<T>::load(x[i + l]) - shift;
      s[l] += t;
      q[l] += t * t;
    }
  }
  for (int l = 0; i < size; ++i, ++l) {
    const A t = Storage<T>::load(x[i]) - shift;
    s[l] += t;
    q[l] += t * t;
  }
  double total = 0, total_squares = 0;
  for (int l = 0; l < kLanes; ++l) {
    total += s[l];
    total_squares += q[l];
  }
  *sum += total;
  *squares += total_squares;
}

// Moments of one channel so far: sums about a shift that follows the mean.
struct Running {
  double count = 0, mean = 0, m2 = 0;  // of what has been settled
  double shift = 0, pending = 0, sum = 0, squares = 0;

  // Adds the pending sums to the settled moments and takes the mean as the new shift.
  inline void settle() {
    if (pending == 0) return;
    const double delta = sum / pending;
    const double block_mean = shift + delta, block_m2 = squares - sum * delta;
    const double total = count + pending, distance = block_mean - mean;
    m2 += (block_m2 < 0 ? 0 : block_m2) + distance * distance * (count * (pending / total));
    mean += distance * (pending / total);
    count = total;
    shift = mean;
    pending = sum = squares = 0;
  }
};

// A shift that is the mean of a first few values keeps the sums small from the start.
template <typename T>
inline double first_shift(const T* x, int64_t size, int64_t stride) {
  const int64_t n = size < 16 ? size : 16;
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(Storage<T>::load(x[i * stride]));
  return sum / static_cast<double>(n);
}

inline bool is_power_of_two(int64_t n) { return (n & (n - 1)) == 0; }

template <typename T>
void moments_rows(const T* x, Layout layout, int64_t c_begin, int64_t c_end, double* mean, double* m2) {
  using A = typename Storage<T>::Compute;
  Running* running = new Running[c_end - c_begin];
  for (int64_t o = 0; o < layout.outer; ++o) {
    for (int64_t c = c_begin; c < c_end; ++c) {
      const int64_t start = (o * layout.channels + c) * layout.inner;
      Running& r = running[c - c_begin];
      if (o == 0) r.shift = first_shift(x + start, layout.inner, 1);
      for (int64_t i = 0; i < layout.inner; i += kBlock) {
        const int64_t size = layout.inner - i < kBlock ? layout.inner - i : kBlock;
        // The shift is rounded to what the block subtracts, or the sums would be about another value.
        const A shift = static_cast<A>(r.shift);
        r.shift = static_cast<double>(shift);
        block_moments<T, A>(x + start + i, size, shift, &r.sum, &r.squares);
        r.pending += static_cast<double>(size);
        if (o == 0) r.settle();
      }
      // Settled whenever the rows have doubled, the shift is the mean of at least half of the values seen: close enough
      // that float32 loses nothing, and next to no work.
      if (is_power_of_two(o + 1)) r.settle();
    }
  }
  for (int64_t c = c_begin; c < c_end; ++c) {
    Running& r = running[c - c_begin];
    r.settle();
    mean[c] = r.mean;
    m2[c] = r.m2;
  }
  delete[] running;
}

template <typename T>
void moments_columns(const T* x, Layout layout, int64_t c_begin, int64_t c_end, double* mean, double* m2) {
  using A = typename Storage<T>::Compute;
  Running* running = new Running[kChannelBlock];
  for (int64_t c0 = c_begin; c0 < c_end; c0 += kChannelBlock) {
    const int64_t width = c_end - c0 < kChannelBlock ? c_end - c0 : kChannelBlock;
    A shift[kChannelBlock], s[kChannelBlock], q[kChannelBlock];
    for (int64_t c = 0; c < width; ++c) {
      running[c] = Running();
      running[c].shift = first_shift(x + c0 + c, layout.outer, layout.channels);
    }
    for (int64_t o0 = 0; o0 < layout.outer; o0 += kRowBlock) {
      const int64_t rows = layout.outer - o0 < kRowBlock ? layout.outer - o0 : kRowBlock;
      for (int64_t c = 0; c < width; ++c) {
        shift[c] = static_cast<A>(running[c].shift);
        running[c].shift = static_cast<double>(shift[c]);
        s[c] = q[c] = 0;
      }
      for (int64_t o = o0; o < o0 + rows; ++o) {
        const T* row = x + o * layout.channels + c0;
        for (int64_t c = 0; c < width; ++c) {
          const A t = Storage<T>::load(row[c]) - shift[c];
          s[c] += t;
          q[c] += t * t;
        }
      }
      for (int64_t c = 0; c < width; ++c) {
        running[c].sum = s[c];
        running[c].squares = q[c];
        running[c].pending = static_cast<double>(rows);
        running[c].settle();
      }
    }
    for (int64_t c = 0; c < width; ++c) {
      mean[c0 + c] = running[c].mean;
      m2[c0 + c] = running[c].m2;
    }
  }
  delete[] running;
}

template <typename T>
void moments_of(const void* x, Layout layout, int64_t c_begin, int64_t c_end, double* mean, double* m2) {
  const auto pass = layout.inner == 1 ? moments_columns<T> : moments_rows<T>;
  pass(static_cast<const T*>(x), layout, c_begin, c_end, mean, m2);
}
