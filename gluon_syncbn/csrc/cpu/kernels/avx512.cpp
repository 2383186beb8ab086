#include "cpu/kernels/passes.h"

#ifdef GLUON_SYNCBN_X86
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")

namespace gluon_syncbn {
namespace avx512 {
#include "cpu/kernels/body.h"
}
}  // namespace gluon_syncbn
#endif
