// The passes themselves, for one instruction set: kernels.cpp includes this file once per set, inside a namespace and
// with the compiler's target switched. No standard templates are used here, since an instance that was compiled for a
// newer processor could be linked into code that runs on an older one.
//
// Sums run over 16 or more lanes in the tensor's own precision for at most a block of values, and from block to block
// in float64. The order depends on shapes alone, never on the number of threads.
//
// Each pass is there for rows (a row per channel) and for columns (channels side by side, where inner is 1), and takes
// the channels [c_begin, c_end).

#include "cpu/kernels/values.h"
#include "cpu/kernels/affine.h"
#include "cpu/kernels/moments.h"
#include "cpu/kernels/normalize.h"
#include "cpu/kernels/backward_input.h"
#include "cpu/kernels/backward.h"
#include "cpu/kernels/input_gradient.h"

template <typename T>
constexpr Passes passes_for() {
  return {moments_of<T>, normalize_of<T>, gradient_sums_of<T>, input_gradient_of<T, false>, input_gradient_of<T, true>};
}

inline Passes passes(DType dtype) {
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
