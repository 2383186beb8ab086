// The passes of one instruction set. Each set is a file of its own, so that a compiler works on all at once. What they
// include is included here, before these files switch the compiler's target.
#pragma once

#include "cpu/float16.h"
#include "cpu/kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define GLUON_SYNCBN_X86 1
#endif

namespace gluon_syncbn {

// The numbers of the channels: vectors of float64 in the order of `ChannelTerms`, or null where a pass does not use
// them.
constexpr int kNumbers = 5;
struct View {
  const double* of[kNumbers];
  Activation activation;
};

// The passes of one dtype on one instruction set, each over a range of channels.
struct KernelTable {
  void (*moments)(const void*, Layout, int64_t, int64_t, double*, double*);
  void (*normalize)(const void*, const void*, Layout, int64_t, int64_t, const View&, void*);
  void (*gradient_sums)(const BackwardInput&, Layout, int64_t, int64_t, const View&, void*, bool, double*, double*);
  void (*input_gradient)(const BackwardInput&, Layout, int64_t, int64_t, const View&, void*, bool);
};

namespace baseline {
KernelTable passes(DType dtype);
}
namespace avx2 {
KernelTable passes(DType dtype);
}
namespace avx512 {
KernelTable passes(DType dtype);
}

}  // namespace gluon_syncbn
