// What a value is stored as and computed in, and how many are taken at a time.

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
constexpr int64_t kBlock = 4096;        // values of one row between two additions in float64
constexpr int64_t kChannelBlock = 256;  // channel-last: channels at a time, so that their sums stay in the L1 cache
constexpr int64_t kRowBlock = 128;      // channel-last: rows between two additions in float64
