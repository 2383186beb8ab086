#include "mxnet/c_api.h"

#include "cuda/driver.h"
#include "exported.h"

namespace gluon_syncbn {
namespace {

MXNetFunctions functions;

}  // namespace

const MXNetFunctions& mxnet() { return functions; }

}  // namespace gluon_syncbn

// Looks up MXNet's functions in `libmxnet`, a handle of dlopen; returns 0, or 1 if one is missing.
EXPORTED int gluon_syncbn_connect(void* libmxnet) {
  using gluon_syncbn::find_function;
  MXNetFunctions& f = gluon_syncbn::functions;
  const bool found = find_function(libmxnet, "MXCustomOpRegister", f.custom_op_register) &&
                     find_function(libmxnet, "MXNDArrayGetData", f.array_data) &&
                     find_function(libmxnet, "MXNDArrayFree", f.array_free) &&
                     find_function(libmxnet, "MXGetLastError", f.last_error) &&
                     find_function(libmxnet, "MXNDArrayCreateEx", f.array_create) &&
                     find_function(libmxnet, "MXEnginePushSyncND", f.engine_push) &&
                     find_function(libmxnet, "MXEnginePushSync", f.engine_push_variables) &&
                     find_function(libmxnet, "MXEnginePushAsyncND", f.engine_push_async) &&
                     find_function(libmxnet, "MXNDArrayWaitToRead", f.array_wait) &&
                     find_function(libmxnet, "MXNDArrayGetContext", f.array_context) &&
                     find_function(libmxnet, "MXNDArraySyncCopyFromCPU", f.array_copy_from_cpu);
  gluon_syncbn::set_cuda_library(libmxnet);
  return found ? 0 : 1;
}
