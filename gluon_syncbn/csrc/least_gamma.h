// In-place activated Batch Normalization (Rota Bulò, Porzi and Kontschieder, "In-Place Activated BatchNorm for Memory-
// Optimized Training of DNNs", 2018): the backward pass finds x̂ in the output, so that the input need not be kept.
//
//   z = γ·x̂ + β, y = a(z)   so   z = a⁻¹(y), and x̂ = (z − β)/γ
//
// which works where a is none or a leaky ReLU. z has been rounded to the type of y, by up to u·|z| (u is 2⁻²⁴ for
// float32, 2⁻¹¹ for float16), so that x̂ comes back wrong by u·(|x̂| + |β/γ|). Where γ is nearly 0 nothing of x̂ would
// be left. So both passes take a γ that is at least 16u·max(1, |β|) away from 0, which keeps that error below 1/16: the
// sign is kept, y moves by less than 16u·max(1, |β|)·|x̂|, and the gradient of γ is the gradient of the γ that is
// taken, so that it can leave 0 again. The caller must warn the user. It holds in prediction mode, too, if a backward
// pass may follow; if not, the forward pass takes γ as it is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tensor.h"

namespace gluon_syncbn {

// 16u.
inline double least_gamma(DType dtype) {
  if (dtype == DType::kFloat64) return 1.0 / (int64_t{1} << 49);
  if (dtype == DType::kFloat16) return 1.0 / (1 << 7);
  return dtype == DType::kBFloat16 ? 1.0 / (1 << 4) : 1.0 / (1 << 20);
}

// The γ that is taken, if x̂ is to be found in the output.
inline double clamp_gamma(DType dtype, double gamma, double beta) {
  const double least = least_gamma(dtype) * std::max(1.0, std::abs(beta));
  return std::abs(gamma) < least ? std::copysign(least, gamma) : gamma;
}

}  // namespace gluon_syncbn
