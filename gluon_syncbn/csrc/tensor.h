// A tensor of activations: its type, its shape as the kernels see it, and the activation function of a layer.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace gluon_syncbn {

// MXNet's type flags (mshadow/base.h).
enum class DType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 12 };

// Throws std::invalid_argument for any other flag.
inline DType dtype_of(int flag) {
  if ((flag >= 0 && flag <= 2) || flag == 12) return static_cast<DType>(flag);
  throw std::invalid_argument("MXNet's dtype number " + std::to_string(flag) +
                              " is not supported; use float32, float64, float16 or bfloat16");
}

inline int64_t bytes_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// Dense, as (outer, channels, inner): NCHW is (N, C, H·W), channel-last is (N·H·W, C, 1), plain (N, C) is (N, C, 1).
struct Layout {
  int64_t outer;
  int64_t channels;
  int64_t inner;

  int64_t size() const { return outer * channels * inner; }
  double count() const { return static_cast<double>(outer * inner); }
};

// After the affine map: z becomes y. Where z ≤ 0, y is 0 (ReLU) or slope·z (leaky ReLU); NaN stays.
struct Activation {
  enum Kind : int { kNone, kReLU, kLeakyReLU };

  Kind kind = kNone;
  double slope = 0;  // of a leaky ReLU; greater than 0
};

}  // namespace gluon_syncbn
