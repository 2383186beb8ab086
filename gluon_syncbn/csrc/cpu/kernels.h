// The arithmetic of one CPU device: passes over activations.
//
// Nothing here knows of MXNet, of threads that wait, or of other devices.
//
// Passes over memory: forward reads x once for the moments and once to normalize; backward reads x and dy once for
// the sums and once for dx. The same passes add a residual and apply the activation. Each pass is compiled for AVX-512,
// AVX2 and the platform's baseline, and the best that the processor has is taken at run time. All round the same way:
// the bits of the results do not depend on the processor.
#pragma once

#include <cstdint>
#include <vector>

#include "meeting/statistics.h"
#include "tensor.h"

namespace gluon_syncbn {

// z = (x − shift)·scale + bias per channel, then y = activation(z). The three are rounded to float32 (float64 for
// float64 tensors) by `Affine::rounded`, which moves the rounding error of shift into bias: a mean that is large
// against the deviation costs no digits.
struct Affine {
  std::vector<double> shift;
  std::vector<double> scale;
  std::vector<double> bias;
  Activation activation = {};

  static Affine rounded(DType dtype, const std::vector<double>& mean, const std::vector<double>& scale,
                        const std::vector<double>& beta, Activation activation);
};

Moments moments(DType dtype, const void* x, const Layout& layout, int threads);

// With a `residual`, y = activation(z + residual); null is none. Each step is rounded to the type of x, as if it were
// an operator of its own.
void normalize(DType dtype, const void* x, const void* residual, const Layout& layout, const Affine& affine, void* y,
               int threads);

// The tensors that the backward passes read. They see v and dz, the gradient of z.
//
//   usually      v = x. Whether z was positive, and dz = dy, is computed from x once more.
//   residual     v = x. `out` is y, which shows whether z + residual was positive; the activation must be a ReLU.
//   from_output  v = z, found in `values`, which is y, by undoing the activation: it must not be a ReLU. The shift of
//                `affine` is then β, so that v − shift = γ·x̂.
struct BackwardInput {
  const void* values;
  const void* d_out;
  const void* out = nullptr;
  bool from_output = false;
};

// Σ dz and Σ dz·(v − shift) per channel. The gradient of a residual is dz: written or added to `d_residual` if it is
// not null.
struct GradientSums {
  std::vector<double> dz;
  std::vector<double> dz_centred;
};
GradientSums gradient_sums(DType dtype, const BackwardInput& input, const Layout& layout, const Affine& affine,
                           void* d_residual, bool add_to_residual, int threads);

// dx = scale·dz + slope·(v − shift) + constant per channel; written to `dx`, or added if `add`.
struct InputGradient {
  std::vector<double> slope;
  std::vector<double> constant;
};
void input_gradient(DType dtype, const BackwardInput& input, const Layout& layout, const Affine& affine,
                    const InputGradient& gradient, void* dx, bool add, int threads);

void fill_nan(DType dtype, void* values, int64_t size);

// The instruction set of the passes: "avx512", "avx2" or "baseline". The environment variable
// GLUON_SYNCBN_MAX_CPU_ISA holds them to one that is older than the processor's best, so that one machine can try the
// passes of others. Throws std::invalid_argument if it is none of the three, in upper or lower case.
const char* instruction_set();

}  // namespace gluon_syncbn
