#include "mxnet/c_api.h"

#include <dlfcn.h>

#include "cuda/driver.h"
#include "exported.h"

namespace gluon_syncbn {
namespace {

MXNetFunctions functions;

template <typename Function>
bool find(void* libmxnet, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(libmxnet, name));
  return function != nullptr;
}

}  // namespace

const MXNetFunctions& mxnet() { return functions; }

}  // namespace gluon_syncbn

// Looks up in `libmxnet`, a handle of dlopen, what is called there; 0, or 1 if something is missing.
EXPORTED int gluon_syncbn_connect(void* libmxnet) {
  using gluon_syncbn::find;
  MXNetFunctions& f = gluon_syncbn::functions;
  const bool found =
      find(libmxnet, "MXCustomOpRegister", f.custom_op_register) && find(libmxnet, "MXNDArrayGetData", f.array_data) &&
      find(libmxnet, "MXNDArrayFree", f.array_free) && find(libmxnet, "MXGetLastError", f.last_error) &&
      find(libmxnet, "MXNDArrayCreateEx", f.array_create) && find(libmxnet, "MXEnginePushSyncND", f.engine_push) &&
      find(libmxnet, "MXEnginePushAsyncND", f.engine_push_async) &&
      find(libmxnet, "MXNDArrayWaitToRead", f.array_wait) &&
      find(libmxnet, "MXNDArraySyncCopyFromCPU", f.array_copy_from_cpu);
  gluon_syncbn::set_cuda_library(libmxnet);
  return found ? 0 : 1;
}
