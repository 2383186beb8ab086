#include "cpu/kernels.h"

#include <strings.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/kernels/passes.h"
#include "exported.h"

namespace gluon_syncbn {
namespace {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };
constexpr const char* kInstructionSets[] = {"baseline", "avx2", "avx512"};

InstructionSet newest_of_processor() {
#ifdef GLUON_SYNCBN_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kBaseline;
}

InstructionSet newest_allowed() {
  const char* text = std::getenv("GLUON_SYNCBN_MAX_CPU_ISA");
  if (text == nullptr || *text == '\0') return InstructionSet::kAvx512;
  for (int i = 0; i < 3; ++i) {
    if (strcasecmp(text, kInstructionSets[i]) == 0) return static_cast<InstructionSet>(i);
  }
  throw std::invalid_argument(std::string("GLUON_SYNCBN_MAX_CPU_ISA must be baseline, avx2 or avx512, not '") + text +
                              "'.");
}

InstructionSet chosen() {
  static const InstructionSet set = std::min(newest_of_processor(), newest_allowed());
  return set;
}

KernelTable passes(DType dtype) {
#ifdef GLUON_SYNCBN_X86
  if (chosen() == InstructionSet::kAvx512) return avx512::passes(dtype);
  if (chosen() == InstructionSet::kAvx2) return avx2::passes(dtype);
#endif
  return baseline::passes(dtype);
}

// Runs pass(c_begin, c_end) over all channels. A channel is never split, so that sums do not depend on `threads`.
template <typename Pass>
void over_channels(const Layout& layout, int threads, const Pass& pass) {
  constexpr int64_t kWorthAThread = 1 << 15;
  // Channel-last tensors are cut at whole cache lines.
  const int64_t grain = layout.inner == 1 ? 64 : 1;
  const int64_t grains = (layout.channels + grain - 1) / grain;
  const int64_t pieces = std::min({int64_t{threads}, layout.size() / kWorthAThread, grains});
  if (pieces <= 1) return pass(0, layout.channels);
#pragma omp parallel for num_threads(static_cast<int>(pieces)) schedule(static, 1)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = grains * piece / pieces * grain, end = grains * (piece + 1) / pieces * grain;
    pass(begin, std::min(end, layout.channels));
  }
}

View view(const Affine& affine) {
  return {{affine.shift.data(), affine.scale.data(), affine.bias.data()}, affine.activation};
}

double rounded_to(DType dtype, double value) {
  return dtype == DType::kFloat64 ? value : static_cast<double>(static_cast<float>(value));
}

}  // namespace

Affine Affine::rounded(DType dtype, const std::vector<double>& mean, const std::vector<double>& scale,
                       const std::vector<double>& beta, Activation activation) {
  Affine affine{mean, scale, beta, activation};
  for (size_t c = 0; c < mean.size(); ++c) {
    affine.shift[c] = rounded_to(dtype, mean[c]);
    affine.scale[c] = rounded_to(dtype, scale[c]);
    affine.bias[c] = rounded_to(dtype, beta[c] - (mean[c] - affine.shift[c]) * scale[c]);
  }
  return affine;
}

Moments moments(DType dtype, const void* x, const Layout& layout, int threads) {
  const std::vector<double> zeros(static_cast<size_t>(layout.channels));
  Moments result{layout.count(), zeros, zeros};
  const auto pass = passes(dtype).moments;
  over_channels(layout, threads,
                [&](int64_t begin, int64_t end) { pass(x, layout, begin, end, result.mean.data(), result.m2.data()); });
  return result;
}

void normalize(DType dtype, const void* x, const void* residual, const Layout& layout, const Affine& affine, void* y,
               int threads) {
  const auto pass = passes(dtype).normalize;
  over_channels(layout, threads,
                [&](int64_t begin, int64_t end) { pass(x, residual, layout, begin, end, view(affine), y); });
}

GradientSums gradient_sums(DType dtype, const BackwardInput& input, const Layout& layout, const Affine& affine,
                           void* d_residual, bool add_to_residual, int threads) {
  const std::vector<double> zeros(static_cast<size_t>(layout.channels));
  GradientSums sums{zeros, zeros};
  const auto pass = passes(dtype).gradient_sums;
  over_channels(layout, threads, [&](int64_t begin, int64_t end) {
    pass(input, layout, begin, end, view(affine), d_residual, add_to_residual, sums.dz.data(), sums.dz_centred.data());
  });
  return sums;
}

void input_gradient(DType dtype, const BackwardInput& input, const Layout& layout, const Affine& affine,
                    const InputGradient& gradient, void* dx, bool add, int threads) {
  const auto pass = passes(dtype).input_gradient;
  View all = view(affine);
  all.of[3] = gradient.slope.data();
  all.of[4] = gradient.constant.data();
  over_channels(layout, threads, [&](int64_t begin, int64_t end) { pass(input, layout, begin, end, all, dx, add); });
}

// In every type of numbers here, all bits set are a NaN.
void fill_nan(DType dtype, void* values, int64_t size) {
  std::memset(values, 0xff, static_cast<size_t>(size * bytes_of(dtype)));
}

const char* instruction_set() { return kInstructionSets[static_cast<int>(chosen())]; }

}  // namespace gluon_syncbn

// Returns the set; or an empty text, and the problem.
EXPORTED const char* gluon_syncbn_instruction_set(const char** problem) {
  const char* found = "";
  *problem = gluon_syncbn::error_of([&] { found = gluon_syncbn::instruction_set(); });
  return found;
}
