// The types in which values are stored (value_t) and computed (real_t), and how a thread reads and writes 16 bytes of
// them at once.

#if VALUE_TYPE == 1
typedef double value_t;
typedef double real_t;
#elif VALUE_TYPE == 2
typedef unsigned short value_t;
typedef float real_t;
#else
typedef float value_t;
typedef float real_t;
#endif
typedef long long int64;

#ifdef __CUDACC__
// There may be no cuda_fp16.h at run time.
__device__ inline float half_to_float(unsigned short half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
__device__ inline unsigned short float_to_half(float value) {
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

// 16 bytes at once. Of plain C++, NVRTC 11 makes up to four accesses of 4 bytes.
__device__ inline uint4 load_pack(const void* from) {
  uint4 bits;
  asm volatile("{ .reg .u64 at; cvta.to.global.u64 at, %4; ld.global.v4.u32 {%0, %1, %2, %3}, [at]; }"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(from));
  return bits;
}
__device__ inline void store_pack(void* to, const uint4& bits) {
  asm volatile("{ .reg .u64 at; cvta.to.global.u64 at, %0; st.global.v4.u32 [at], {%1, %2, %3, %4}; }"
               :
               : "l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
}

// The value of the thread of the warp whose number differs in the bit `apart`. All threads of the block must call this.
template <typename T>
__device__ inline T from_thread(T value, int apart) {
  return __shfl_xor_sync(0xffffffff, value, apart);
}
#endif

__device__ inline real_t widen(value_t value) {
#if VALUE_TYPE == 2
  return half_to_float(value);
#else
  return value;
#endif
}

__device__ inline value_t narrow(real_t value) {
#if VALUE_TYPE == 2
  return float_to_half(value);
#else
  return value;
#endif
}

// Right to two units of rounding, without the steps of a division that rounds right.
__device__ inline float quotient(float a, float b) { return __fdividef(a, b); }
__device__ inline double quotient(double a, double b) { return a / b; }

// Rounds once, the same in every pass: all passes must agree whether an output was positive.
__device__ inline float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }

__device__ inline uint4 pack(const real_t* values) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if VALUE_TYPE == 1
    words[i] = static_cast<unsigned>(i % 2 ? __double2hiint(values[i / 2]) : __double2loint(values[i / 2]));
#elif VALUE_TYPE == 2
    words[i] = float_to_half(values[2 * i]) | static_cast<unsigned>(float_to_half(values[2 * i + 1])) << 16;
#else
    words[i] = __float_as_uint(values[i]);
#endif
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// V values as they lie in memory: one, or a pack.
template <int V>
struct Raw {
  uint4 bits;

  __device__ void load(const value_t* from) { bits = load_pack(from); }
  __device__ void unpack(real_t* values) const {
    const unsigned words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < V; ++i) {
#if VALUE_TYPE == 1
      values[i] = __hiloint2double(static_cast<int>(words[2 * i + 1]), static_cast<int>(words[2 * i]));
#elif VALUE_TYPE == 2
      values[i] = half_to_float(static_cast<unsigned short>(words[i / 2] >> (16 * (i % 2))));
#else
      values[i] = __uint_as_float(words[i]);
#endif
    }
  }
  __device__ static void store(value_t* to, const real_t* values) { store_pack(to, pack(values)); }
};
template <>
struct Raw<1> {
  value_t bits;

  __device__ void load(const value_t* from) { bits = *from; }
  __device__ void unpack(real_t* values) const { *values = widen(bits); }
  __device__ static void store(value_t* to, const real_t* values) { *to = narrow(*values); }
};

// Up to N packs of a thread, as they lie in memory. All loads are under way before the first value is unpacked.
template <int V, int N>
struct Packs {
  Raw<V> raw[N];

  template <typename Places>
  __device__ void load(const value_t* from, const Places& at, int packs) {
    if (packs == N) {  // the usual case has no conditions between the loads
#pragma unroll
      for (int n = 0; n < N; ++n) raw[n].load(from + at(n));
      return;
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n < packs) raw[n].load(from + at(n));
    }
  }
};
