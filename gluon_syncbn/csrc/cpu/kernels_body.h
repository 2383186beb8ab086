// The passes themselves, for one instruction set: kernels.cpp includes this file once per set, inside a namespace and
// with the compiler's target switched. No standard templates are used here, since an instance that was compiled for a
// newer processor could be linked into code that runs on an older one.
//
// Sums run over 16 or more lanes in the tensor's own precision for at most a block of values, and from block to block
// in float64. The order depends on shapes alone, never on the number of threads.

// What a value is stored as (T) and computed in (A).
template <typename T>
struct Storage {
  using Compute = T;
  static inline T load(T value) { return value; }
  static inline T store(T value) { return value; }
};

template <>
struct Storage<Half> {
  using Compute = float;
  static inline float load(Half value) { return half_to_float(value.bits); }
  static inline Half store(float value) { return Half{float_to_half(value)}; }
};

template <>
struct Storage<BFloat16> {
  using Compute = float;
  static inline float load(BFloat16 value) { return bfloat16_to_float(value.bits); }
  static inline BFloat16 store(float value) { return BFloat16{float_to_bfloat16(value)}; }
};

constexpr int kLanes = 64;
constexpr int64_t kBlock = 4096;       // values of one row between two additions in float64
constexpr int64_t kChannelBlock = 256; // channel-last: channels at a time, so that their sums stay in the L1 cache
constexpr int64_t kRowBlock = 128;     // channel-last: rows between two additions in float64

template <typename A>
struct Channel {
  A shift, scale, bias;
  bool relu;

  // What of dy passes the relu, whose output for x was positive (or NaN, which must not be lost).
  inline A passed(A x, A dy) const { return relu && (x - shift) * scale + bias <= 0 ? A(0) : dy; }
};

template <typename A>
inline Channel<A> channel_of(const AffineView& affine, int64_t c) {
  return {static_cast<A>(affine.shift[c]), static_cast<A>(affine.scale[c]), static_cast<A>(affine.bias[c]),
          affine.relu};
}

// The same for channels that lie side by side.
template <typename A>
struct Columns {
  A shift[kChannelBlock], scale[kChannelBlock], bias[kChannelBlock];

  Columns(const AffineView& affine, int64_t first, int64_t width) {
    for (int64_t c = 0; c < width; ++c) {
      const Channel<A> channel = channel_of<A>(affine, first + c);
      shift[c] = channel.shift;
      scale[c] = channel.scale;
      bias[c] = channel.bias;
    }
  }
};

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

template <typename T, bool kRelu>
void normalize_rows(const T* x, Layout layout, int64_t c_begin, int64_t c_end, const AffineView& affine, T* y) {
  using A = typename Storage<T>::Compute;
  for (int64_t o = 0; o < layout.outer; ++o) {
    for (int64_t c = c_begin; c < c_end; ++c) {
      const Channel<A> channel = channel_of<A>(affine, c);
      const int64_t start = (o * layout.channels + c) * layout.inner;
      const T* from = x + start;
      T* to = y + start;
      for (int64_t i = 0; i < layout.inner; ++i) {
        const A value = (Storage<T>::load(from[i]) - channel.shift) * channel.scale + channel.bias;
        to[i] = Storage<T>::store(kRelu && value <= 0 ? A(0) : value);
      }
    }
  }
}

template <typename T, bool kRelu>
void normalize_columns(const T* x, Layout layout, int64_t c_begin, int64_t c_end, const AffineView& affine, T* y) {
  using A = typename Storage<T>::Compute;
  for (int64_t c0 = c_begin; c0 < c_end; c0 += kChannelBlock) {
    const int64_t width = c_end - c0 < kChannelBlock ? c_end - c0 : kChannelBlock;
    const Columns<A> columns(affine, c0, width);
    for (int64_t o = 0; o < layout.outer; ++o) {
      const T* from = x + o * layout.channels + c0;
      T* to = y + o * layout.channels + c0;
      for (int64_t c = 0; c < width; ++c) {
        const A value = (Storage<T>::load(from[c]) - columns.shift[c]) * columns.scale[c] + columns.bias[c];
        to[c] = Storage<T>::store(kRelu && value <= 0 ? A(0) : value);
      }
    }
  }
}

template <typename T, bool kRelu>
void gradient_sums_rows(const T* x, const T* dy, Layout layout, int64_t c_begin, int64_t c_end,
                        const AffineView& affine, double* sums, double* centred) {
  using A = typename Storage<T>::Compute;
  for (int64_t c = c_begin; c < c_end; ++c) sums[c] = centred[c] = 0;
  for (int64_t o = 0; o < layout.outer; ++o) {
    for (int64_t c = c_begin; c < c_end; ++c) {
      Channel<A> channel = channel_of<A>(affine, c);
      channel.relu = kRelu;
      for (int64_t begin = 0; begin < layout.inner; begin += kBlock) {
        const int64_t size = layout.inner - begin < kBlock ? layout.inner - begin : kBlock;
        const int64_t start = (o * layout.channels + c) * layout.inner + begin;
        const T* values = x + start;
        const T* gradients = dy + start;
        A s[kLanes] = {}, p[kLanes] = {};
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) {
          for (int l = 0; l < kLanes; ++l) {
            const A value = Storage<T>::load(values[i + l]);
            const A gradient = channel.passed(value, Storage<T>::load(gradients[i + l]));
            s[l] += gradient;
            p[l] += gradient * (value - channel.shift);
          }
        }
        for (int l = 0; i < size; ++i, ++l) {
          const A value = Storage<T>::load(values[i]);
          const A gradient = channel.passed(value, Storage<T>::load(gradients[i]));
          s[l] += gradient;
          p[l] += gradient * (value - channel.shift);
        }
        double sum = 0, product = 0;
        for (int l = 0; l < kLanes; ++l) {
          sum += s[l];
          product += p[l];
        }
        sums[c] += sum;
        centred[c] += product;
      }
    }
  }
}

template <typename T, bool kRelu>
void gradient_sums_columns(const T* x, const T* dy, Layout layout, int64_t c_begin, int64_t c_end,
                           const AffineView& affine, double* sums, double* centred) {
  using A = typename Storage<T>::Compute;
  for (int64_t c = c_begin; c < c_end; ++c) sums[c] = centred[c] = 0;
  for (int64_t c0 = c_begin; c0 < c_end; c0 += kChannelBlock) {
    const int64_t width = c_end - c0 < kChannelBlock ? c_end - c0 : kChannelBlock;
    const Columns<A> columns(affine, c0, width);
    A s[kChannelBlock], p[kChannelBlock];
    for (int64_t o0 = 0; o0 < layout.outer; o0 += kRowBlock) {
      const int64_t rows = layout.outer - o0 < kRowBlock ? layout.outer - o0 : kRowBlock;
      for (int64_t c = 0; c < width; ++c) s[c] = p[c] = 0;
      for (int64_t o = o0; o < o0 + rows; ++o) {
        const T* values = x + o * layout.channels + c0;
        const T* gradients = dy + o * layout.channels + c0;
        for (int64_t c = 0; c < width; ++c) {
          const Channel<A> channel{columns.shift[c], columns.scale[c], columns.bias[c], kRelu};
          const A value = Storage<T>::load(values[c]);
          const A gradient = channel.passed(value, Storage<T>::load(gradients[c]));
          s[c] += gradient;
          p[c] += gradient * (value - channel.shift);
        }
      }
      for (int64_t c = 0; c < width; ++c) {
        sums[c0 + c] += s[c];
        centred[c0 + c] += p[c];
      }
    }
  }
}

template <typename T, bool kRelu, bool kAdd>
void input_gradient_rows(const T* x, const T* dy, Layout layout, int64_t c_begin, int64_t c_end,
                         const AffineView& affine, const GradientView& gradient, T* dx) {
  using A = typename Storage<T>::Compute;
  for (int64_t o = 0; o < layout.outer; ++o) {
    for (int64_t c = c_begin; c < c_end; ++c) {
      Channel<A> channel = channel_of<A>(affine, c);
      channel.relu = kRelu;
      const A factor = static_cast<A>(gradient.factor[c]);
      const A slope = static_cast<A>(gradient.slope[c]);
      const A constant = static_cast<A>(gradient.constant[c]);
      const int64_t start = (o * layout.channels + c) * layout.inner;
      const T* values = x + start;
      const T* gradients = dy + start;
      T* to = dx + start;
      for (int64_t i = 0; i < layout.inner; ++i) {
        const A value = Storage<T>::load(values[i]);
        const A passed = channel.passed(value, Storage<T>::load(gradients[i]));
        const A result = factor * passed + (slope * (value - channel.shift) + constant);
        to[i] = Storage<T>::store(kAdd ? Storage<T>::load(to[i]) + result : result);
      }
    }
  }
}

template <typename T, bool kRelu, bool kAdd>
void input_gradient_columns(const T* x, const T* dy, Layout layout, int64_t c_begin, int64_t c_end,
                            const AffineView& affine, const GradientView& gradient, T* dx) {
  using A = typename Storage<T>::Compute;
  for (int64_t c0 = c_begin; c0 < c_end; c0 += kChannelBlock) {
    const int64_t width = c_end - c0 < kChannelBlock ? c_end - c0 : kChannelBlock;
    const Columns<A> columns(affine, c0, width);
    A factor[kChannelBlock], slope[kChannelBlock], constant[kChannelBlock];
    for (int64_t c = 0; c < width; ++c) {
      factor[c] = static_cast<A>(gradient.factor[c0 + c]);
      slope[c] = static_cast<A>(gradient.slope[c0 + c]);
      constant[c] = static_cast<A>(gradient.constant[c0 + c]);
    }
    for (int64_t o = 0; o < layout.outer; ++o) {
      const T* values = x + o * layout.channels + c0;
      const T* gradients = dy + o * layout.channels + c0;
      T* to = dx + o * layout.channels + c0;
      for (int64_t c = 0; c < width; ++c) {
        const Channel<A> channel{columns.shift[c], columns.scale[c], columns.bias[c], kRelu};
        const A value = Storage<T>::load(values[c]);
        const A passed = channel.passed(value, Storage<T>::load(gradients[c]));
        const A result = factor[c] * passed + (slope[c] * (value - channel.shift) + constant[c]);
        to[c] = Storage<T>::store(kAdd ? Storage<T>::load(to[c]) + result : result);
      }
    }
  }
}

// Entry points for channels [c_begin, c_end): a row per channel, or channels side by side where inner is 1.
template <typename T>
void moments_of(const void* x, Layout layout, int64_t c_begin, int64_t c_end, double* mean, double* m2) {
  const auto pass = layout.inner == 1 ? moments_columns<T> : moments_rows<T>;
  pass(static_cast<const T*>(x), layout, c_begin, c_end, mean, m2);
}

template <typename T>
void normalize_of(const void* x, Layout layout, int64_t c_begin, int64_t c_end, const AffineView& affine, void* y) {
  const T* from = static_cast<const T*>(x);
  T* to = static_cast<T*>(y);
  if (layout.inner == 1) {
    (affine.relu ? normalize_columns<T, true> : normalize_columns<T, false>)(from, layout, c_begin, c_end, affine, to);
  } else {
    (affine.relu ? normalize_rows<T, true> : normalize_rows<T, false>)(from, layout, c_begin, c_end, affine, to);
  }
}

template <typename T>
void gradient_sums_of(const void* x, const void* dy, Layout layout, int64_t c_begin, int64_t c_end,
                      const AffineView& affine, double* sums, double* centred) {
  const auto pass = layout.inner == 1
                        ? (affine.relu ? gradient_sums_columns<T, true> : gradient_sums_columns<T, false>)
                        : (affine.relu ? gradient_sums_rows<T, true> : gradient_sums_rows<T, false>);
  pass(static_cast<const T*>(x), static_cast<const T*>(dy), layout, c_begin, c_end, affine, sums, centred);
}

template <typename T, bool kAdd>
void input_gradient_of(const void* x, const void* dy, Layout layout, int64_t c_begin, int64_t c_end,
                       const AffineView& affine, const GradientView& gradient, void* dx) {
  const auto pass = layout.inner == 1
                        ? (affine.relu ? input_gradient_columns<T, true, kAdd> : input_gradient_columns<T, false, kAdd>)
                        : (affine.relu ? input_gradient_rows<T, true, kAdd> : input_gradient_rows<T, false, kAdd>);
  pass(static_cast<const T*>(x), static_cast<const T*>(dy), layout, c_begin, c_end, affine, gradient,
       static_cast<T*>(dx));
}

template <typename T>
constexpr Passes passes_for() {
  return {moments_of<T>, normalize_of<T>, gradient_sums_of<T>, input_gradient_of<T, false>,
          input_gradient_of<T, true>};
}

inline Passes passes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return passes_for<double>();
    case DType::kFloat16:
      return passes_for<Half>();
    case DType::kBFloat16:
      return passes_for<BFloat16>();
    default:
      return passes_for<float>();
  }
}
