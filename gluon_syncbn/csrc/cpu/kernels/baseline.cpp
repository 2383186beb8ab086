#include "cpu/kernels/passes.h"

namespace gluon_syncbn {
namespace baseline {
#include "cpu/kernels/body.h"
}
}  // namespace gluon_syncbn
