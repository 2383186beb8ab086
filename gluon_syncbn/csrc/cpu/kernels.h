// The arithmetic of one CPU device: passes over activations.
//
// Nothing here knows of MXNet, of threads that wait, or of other devices. Every tensor is dense and seen as
// (outer, channels, inner): NCHW is (N, C, H·W), channel-last is (N·H·W, C, 1), plain (N, C) is (N, C, 1).
//
// Passes over memory: forward reads x once for the moments and once to normalize; backward reads x and dy once for
// the sums and once for dx. Each pass is compiled for AVX-512, AVX2 and the platform's baseline, and the best that the
// processor has is taken at run time. All round the same way: the bits of the results do not depend on the processor.
#pragma once

#include <cstdint>
#include <vector>

#include "meeting/statistics.h"
#include "tensor.h"

namespace gluon_syncbn {

// y = (x − shift)·scale + bias per channel, then max(y, 0) if relu. The three are rounded to float32 (float64 for
// float64 tensors) by `Affine::rounded`, which moves the rounding error of shift into bias: a mean that is large
// against the deviation costs no digits.
struct Affine {
  std::vector<double> shift;
  std::vector<double> scale;
  std::vector<double> bias;
  bool relu = false;

  static Affine rounded(DType dtype, const std::vector<double>& mean, const std::vector<double>& scale,
                        const std::vector<double>& beta, bool relu);
};

Moments moments(DType dtype, const void* x, const Layout& layout, int threads);

void normalize(DType dtype, const void* x, const Layout& layout, const Affine& affine, void* y, int threads);

// Σ dy and Σ dy·(x − shift) per channel, where dy is masked by the ReLU of `affine`.
struct GradientSums {
  std::vector<double> dy;
  std::vector<double> dy_centred;
};
GradientSums gradient_sums(DType dtype, const void* x, const void* dy, const Layout& layout, const Affine& affine,
                           int threads);

// dx = factor·dy + slope·(x − shift) + constant per channel, with dy as above; added to what is there if `add`.
struct InputGradient {
  std::vector<double> factor;
  std::vector<double> slope;
  std::vector<double> constant;
};
void input_gradient(DType dtype, const void* x, const void* dy, const Layout& layout, const Affine& affine,
                    const InputGradient& gradient, void* dx, bool add, int threads);

void fill(DType dtype, void* values, int64_t size, double value);

// The environment variable that holds the passes to an instruction set older than the processor's best, so that one
// machine can try what others run. Its values are those of `instruction_set`, in either case.
constexpr const char* kMaxCpuIsa = "GLUON_SYNCBN_MAX_CPU_ISA";

// Which instruction set the passes run on: "avx512", "avx2" or "baseline". Throws std::invalid_argument if the
// environment variable has another value.
const char* instruction_set();

}  // namespace gluon_syncbn
