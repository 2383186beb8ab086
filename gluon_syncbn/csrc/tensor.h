// What a tensor of activations is: its type, and its shape as the kernels see it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace gluon_syncbn {

// MXNet's type flags (mshadow/base.h).
enum class DType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 12 };

// Throws std::invalid_argument for any other flag.
inline DType dtype_of(int flag) {
  switch (flag) {
    case 0:
    case 1:
    case 2:
    case 12:
      return static_cast<DType>(flag);
    default:
      throw std::invalid_argument("MXNet's dtype number " + std::to_string(flag) +
                                  " is not supported; use float32, float64, float16 or bfloat16");
  }
}

// Dense, as (outer, channels, inner): NCHW is (N, C, H·W), channel-last is (N·H·W, C, 1), plain (N, C) is (N, C, 1).
struct Layout {
  int64_t outer;
  int64_t channels;
  int64_t inner;

  int64_t size() const { return outer * channels * inner; }
  double count() const { return static_cast<double>(outer * inner); }
};

}  // namespace gluon_syncbn
