// float16 and bfloat16 as bits, to float32 and back. Both round to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace gluon_syncbn {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

static inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// IEEE binary16: 5 bits of exponent (bias 15), 10 of mantissa.
static inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(half & 0x7fffu) << 13;
  // Exponents differ by 112 between the formats. The product also makes normal numbers of subnormal ones.
  const float scaled = float_of(rest) * float_of((127u + 112u) << 23);
  const uint32_t finite = bits_of(scaled), special = rest | 0x7f800000u;
  return float_of(sign | ((half & 0x7c00u) == 0x7c00u ? special : finite));
}

static inline uint16_t float_to_half(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more: infinity
  if (rest < 0x38800000u) {
    // Subnormal: adding 0.5 aligns the last bit of the half with the last bit of the float, which rounds.
    return static_cast<uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000u));
  }
  const uint32_t rounded = rest + 0xfffu + ((rest >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

static inline float bfloat16_to_float(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

static inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays one
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace gluon_syncbn
