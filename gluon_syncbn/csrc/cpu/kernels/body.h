// The passes themselves, for one instruction set: the file of each set includes this one inside a namespace, with the
// compiler's target switched. No standard templates are used here, since an instance that was compiled for a newer
// processor could be linked into code that runs on an older one.
//
// Sums run over many lanes (over as many as a short row has values) in the tensor's own precision for at most a tile of
// values, and from tile to tile in float64. The order depends on shapes alone, never on the number of threads.

namespace {

// The types in which a value is stored (T) and computed (A).
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
constexpr int64_t kBlock = 4096;        // values of one channel between two additions in float64
constexpr int64_t kShort = 128;         // a row of fewer values is added up together with rows of other images
constexpr int64_t kImages = 64;         // of so many at most: each lies in another page of memory
constexpr int64_t kFirstImages = 8;     // and at first of so many, or as many as before, if later ones may be far away
constexpr int64_t kChannelBlock = 256;  // channel-last: channels at a time, so that their sums stay in the L1 cache
constexpr int64_t kRowBlock = 128;      // channel-last: rows between two additions in float64

// The numbers of a channel that a pass uses.
template <typename A>
struct ChannelTerms {
  A shift, scale, bias, by, constant, slope;

  inline A normalize(A x) const { return (x - shift) * scale + bias; }
  inline A correct(A v, A dz) const { return scale * dz + (by * (v - shift) + constant); }
};

// The first kUsed numbers of kSize channels that lie side by side; or of one, for all of its values.
template <typename A, int kUsed, int64_t kSize>
struct Channels {
  A numbers[kNumbers][kSize], slope;

  Channels(const View& view, int64_t first, int64_t width) : slope(static_cast<A>(view.activation.slope)) {
    for (int k = 0; k < kUsed; ++k) {
      for (int64_t c = 0; c < width; ++c) numbers[k][c] = static_cast<A>(view.of[k][first + c]);
    }
  }

  inline ChannelTerms<A> operator[](int64_t i) const {
    const int64_t c = kSize == 1 ? 0 : i;
    return {numbers[0][c], numbers[1][c], numbers[2][c], numbers[3][c], numbers[4][c], slope};
  }
};

// A piece of a tensor: `rows` rows of `width` neighbours, `stride` values apart, from `start` on. They are of one
// channel, `first`: a single row, or short ones; or, where kWidth is more, of channels that lie side by side.
template <int64_t kWidth, bool kIsShort = false>
struct Tile {
  static constexpr bool kIsColumns = kWidth > 1;
  static constexpr int64_t kChannels = kWidth;

  int64_t first, start, rows, width, stride;

  inline int64_t channels() const { return kIsColumns ? width : 1; }
  inline int64_t per_channel() const { return kIsColumns ? rows : kIsShort ? rows * width : width; }

  // Calls each(at, i) for all values: `at` counts from `start`, `i` within a row.
  template <typename Each>
  __attribute__((always_inline)) inline void for_each(const Each& each) const {
    for (int64_t r = 0; r < (kIsColumns ? rows : 1); ++r) {
      for (int64_t i = 0; i < width; ++i) each(r * stride + i, i);
    }
  }

  // Adds up two terms per value, term(at, i, a, b), each lane on its own, and calls add(c, a, b) with the sums of each
  // channel.
  template <typename A, typename Term, typename Add>
  __attribute__((always_inline)) inline void sum(const Term& term, const Add& add) const {
    if constexpr (kIsColumns) {
      A a[kWidth], b[kWidth];
      for (int64_t c = 0; c < width; ++c) a[c] = b[c] = 0;
      for_each([&](int64_t at, int64_t i) __attribute__((always_inline)) { term(at, i, a[i], b[i]); });
      for (int64_t c = 0; c < width; ++c) add(c, static_cast<double>(a[c]), static_cast<double>(b[c]));
    } else if constexpr (kIsShort) {
      A a[kShort] = {}, b[kShort] = {};
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < width; ++i) term(r * stride + i, 0, a[i], b[i]);
      }
      double sum_a = 0, sum_b = 0;
      for (int64_t i = 0; i < width; ++i) {
        sum_a += a[i];
        sum_b += b[i];
      }
      add(0, sum_a, sum_b);
    } else {
      A a[kLanes] = {}, b[kLanes] = {};
      int64_t i = 0;
      for (; i + kLanes <= width; i += kLanes) {
        for (int l = 0; l < kLanes; ++l) term(i + l, 0, a[l], b[l]);
      }
      for (int l = 0; i < width; ++i, ++l) term(i, 0, a[l], b[l]);
      double sum_a = 0, sum_b = 0;
      for (int l = 0; l < kLanes; ++l) {
        sum_a += a[l];
        sum_b += b[l];
      }
      add(0, sum_a, sum_b);
    }
  }
};

enum class Rows { kOneByOne, kTogether, kGrowing };  // how a pass takes short rows

// The short rows of a channel, of several images together. Not inlined: the compiler made worse code of long rows.
template <typename A, int kUsed, Rows kRows, typename Pass>
__attribute__((noinline)) void over_short_rows(Layout layout, int64_t c_begin, int64_t c_end, const View& view,
                                               const Pass& pass) {
  const int64_t image = layout.channels * layout.inner, fitting = kBlock / layout.inner;
  const int64_t most = fitting < kImages ? fitting : kImages;
  int64_t rows = 0;
  for (int64_t o = 0; o < layout.outer; o += rows) {
    rows = kRows == Rows::kTogether || o > most ? most : o > kFirstImages ? o : kFirstImages;
    if (rows > most) rows = most;
    if (rows > layout.outer - o) rows = layout.outer - o;
    for (int64_t c = c_begin; c < c_end; ++c) {
      const Channels<A, kUsed, 1> channels(view, c, 1);
      pass(Tile<1, true>{c, o * image + c * layout.inner, rows, layout.inner, image}, channels);
    }
  }
}

// Calls pass(tile, channels) for all tiles of the channels [c_begin, c_end), in order for each channel: rows where a
// channel has a row per image, columns where inner is 1.
template <typename A, int kUsed, Rows kRows, typename Pass>
inline void over_tiles(Layout layout, int64_t c_begin, int64_t c_end, const View& view, const Pass& pass) {
  if constexpr (kRows != Rows::kOneByOne) {
    if (layout.inner > 1 && layout.inner < kShort)
      return over_short_rows<A, kUsed, kRows>(layout, c_begin, c_end, view, pass);
  }
  if (layout.inner > 1) {
    for (int64_t o = 0; o < layout.outer; ++o) {
      for (int64_t c = c_begin; c < c_end; ++c) {
        const Channels<A, kUsed, 1> channels(view, c, 1);
        const int64_t start = (o * layout.channels + c) * layout.inner;
        for (int64_t i = 0; i < layout.inner; i += kBlock) {
          const int64_t width = layout.inner - i < kBlock ? layout.inner - i : kBlock;
          pass(Tile<1>{c, start + i, 1, width, 0}, channels);
        }
      }
    }
    return;
  }
  for (int64_t first = c_begin; first < c_end; first += kChannelBlock) {
    const int64_t width = c_end - first < kChannelBlock ? c_end - first : kChannelBlock;
    const Channels<A, kUsed, kChannelBlock> channels(view, first, width);
    for (int64_t o = 0; o < layout.outer; o += kRowBlock) {
      const int64_t rows = layout.outer - o < kRowBlock ? layout.outer - o : kRowBlock;
      pass(Tile<kChannelBlock>{first, o * layout.channels + first, rows, width, layout.channels}, channels);
    }
  }
}

#include "cpu/kernels/forward.h"
#include "cpu/kernels/backward.h"

template <typename T>
constexpr KernelTable passes_for() {
  return {moments_of<T>, normalize_of<T>, gradient_sums_of<T>, input_gradient_of<T>};
}

}  // namespace

KernelTable passes(DType dtype) {
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
