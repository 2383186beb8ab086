// The two passes of the forward direction.

// Mean and M2 of each channel, in one pass over x.

// Moments of one channel so far: sums about a shift that follows the mean.
struct Running {
  double count = 0, mean = 0, m2 = 0;  // settled
  double shift = 0, pending = 0, sum = 0, squares = 0;
  int64_t tiles = 0;

  // Settled whenever the tiles have doubled, the shift is the mean of at least a quarter of the values seen: close
  // enough that float32 loses nothing, and next to no work. Tiles of columns `settles` every time: they are few.
  inline void add(double size, double total, double total_squares, bool settles) {
    pending += size;
    sum += total;
    squares += total_squares;
    tiles += 1;
    if (settles || (tiles & (tiles - 1)) == 0) settle();
  }

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

// A shift that is the mean of a channel's first few values in a tile keeps the sums small from the start.
template <typename T, typename Tile>
inline double first_shift(const T* x, const Tile& tile) {
  const int64_t size = tile.kIsColumns ? tile.rows : tile.width, stride = tile.kIsColumns ? tile.stride : 1;
  const int64_t n = size < 16 ? size : 16;
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(Storage<T>::load(x[i * stride]));
  return sum / static_cast<double>(n);
}

template <typename T>
void moments_of(const void* x, Layout layout, int64_t c_begin, int64_t c_end, double* mean, double* m2) {
  using A = typename Storage<T>::Compute;
  Running* all = new Running[c_end - c_begin];
  over_tiles<A, 0, Rows::kGrowing>(
      layout, c_begin, c_end, {}, [=](const auto& tile, const auto&) __attribute__((always_inline)) {
        const T* from = static_cast<const T*>(x) + tile.start;
        Running* running = all + (tile.first - c_begin);
        A shift[tile.kChannels];
        for (int64_t c = 0; c < tile.channels(); ++c) {
          Running& r = running[c];
          if (r.tiles == 0) r.shift = first_shift(from + c, tile);
          // The shift is rounded to the tile's precision, or the sums would be about another value.
          shift[c] = static_cast<A>(r.shift);
          r.shift = static_cast<double>(shift[c]);
        }
        tile.template sum<A>(
            [&](int64_t at, int64_t i, A & sum, A & squares) __attribute__((always_inline)) {
              const A t = Storage<T>::load(from[at]) - shift[i];
              sum += t;
              squares += t * t;
            },
            [&](int64_t c, double sum, double squares) {
              running[c].add(static_cast<double>(tile.per_channel()), sum, squares, tile.kIsColumns);
            });
      });
  for (int64_t c = c_begin; c < c_end; ++c) {
    Running& r = all[c - c_begin];
    r.settle();
    mean[c] = r.mean;
    m2[c] = r.m2;
  }
  delete[] all;
}

// y = activation((x − shift)·scale + bias + residual), each step rounded to T.

template <typename T, Activation::Kind kKind, bool kResidual>
inline T normalized(const ChannelTerms<typename Storage<T>::Compute>& channel, T x, T residual) {
  using A = typename Storage<T>::Compute;
  A value = channel.normalize(Storage<T>::load(x));
  if constexpr (kResidual) value = Storage<T>::load(Storage<T>::store(value)) + Storage<T>::load(residual);
  if constexpr (kKind == Activation::kReLU) {
    value = value <= 0 ? A(0) : value;
  } else if constexpr (kKind == Activation::kLeakyReLU) {
    value = Storage<T>::load(Storage<T>::store(value));
    value = value <= 0 ? value * channel.slope : value;
  }
  return Storage<T>::store(value);
}

template <typename T, Activation::Kind kKind, bool kResidual>
void normalize_as(const void* x, const void* residual, Layout layout, int64_t c_begin, int64_t c_end, const View& view,
                  void* y) {
  over_tiles<typename Storage<T>::Compute, 3, Rows::kOneByOne>(
      layout, c_begin, c_end, view, [=](const auto& tile, const auto& channels) __attribute__((always_inline)) {
        const T* from = static_cast<const T*>(x) + tile.start;
        const T* residuals = kResidual ? static_cast<const T*>(residual) + tile.start : from;
        T* to = static_cast<T*>(y) + tile.start;
        tile.for_each([&](int64_t at, int64_t i) __attribute__((always_inline)) {
          to[at] = normalized<T, kKind, kResidual>(channels[i], from[at], residuals[at]);
        });
      });
}

template <typename T>
void normalize_of(const void* x, const void* residual, Layout layout, int64_t c_begin, int64_t c_end, const View& view,
                  void* y) {
  auto pass = residual ? normalize_as<T, Activation::kNone, true> : normalize_as<T, Activation::kNone, false>;
  if (view.activation.kind == Activation::kReLU) {
    pass = residual ? normalize_as<T, Activation::kReLU, true> : normalize_as<T, Activation::kReLU, false>;
  } else if (view.activation.kind == Activation::kLeakyReLU) {
    pass = residual ? normalize_as<T, Activation::kLeakyReLU, true> : normalize_as<T, Activation::kLeakyReLU, false>;
  }
  pass(x, residual, layout, c_begin, c_end, view, y);
}
