#include "cpu/kernels/passes.h"

#ifdef GLUON_SYNCBN_X86
#pragma GCC target("avx2,fma")

namespace gluon_syncbn {
namespace avx2 {
#include "cpu/kernels/body.h"
}
}  // namespace gluon_syncbn
#endif
