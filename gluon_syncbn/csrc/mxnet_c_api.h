// The few declarations of MXNet's C interface that the operator needs, by hand: no MXNet header is used, and nothing is
// linked. They are the same from MXNet 1.5.1 to 1.9.1 (include/mxnet/c_api.h). Python hands over the addresses from the
// libmxnet that it has loaded.
#pragma once

#include <stdexcept>
#include <string>

extern "C" {

struct MXCallbackList {
  int num_callbacks;
  int (**callbacks)(void);
  void** contexts;
};

// enum CustomOpPropCallbacks, by position in MXCallbackList; each ends with its context. All return 1, or 0 if they
// fail.
typedef int (*CustomOpDelete)(void* state);
typedef int (*CustomOpList)(char*** names, void* state);
typedef int (*CustomOpInferShape)(int num, int* ndims, int** shapes, void* state);
typedef int (*CustomOpBackwardDependency)(const int* out_grad, const int* in_data, const int* out_data, int* num_deps,
                                          int** deps, void* state);
typedef int (*CustomOpCreate)(const char* device, int num_inputs, unsigned** shapes, const int* ndims,
                              const int* dtypes, MXCallbackList* ret, void* state);
typedef int (*CustomOpInferType)(int num, int* dtypes, void* state);

// enum CustomOpCallbacks: delete, forward, backward. `arrays` are NDArray handles that the callee frees.
typedef int (*CustomOpRun)(int size, void** arrays, int* tags, const int* requests, int is_train, void* state);

typedef int (*CustomOpPropCreator)(const char* op_type, int num_arguments, const char** keys, const char** values,
                                   MXCallbackList* ret);

// What the operator calls; the layout is repeated in native.py.
struct MXNetFunctions {
  int (*custom_op_register)(const char* op_type, CustomOpPropCreator creator);  // MXCustomOpRegister
  int (*array_data)(void* array, void** data);                                  // MXNDArrayGetData
  int (*array_free)(void* array);                                               // MXNDArrayFree
};

}  // extern "C"

namespace gluon_syncbn {

using AnyCallback = int (*)(void);

// The C interface declares every callback as int (*)(void); void (*)(void) is C++'s word for "of any type".
template <typename Function>
AnyCallback any(Function function) {
  return reinterpret_cast<AnyCallback>(reinterpret_cast<void (*)(void)>(function));
}

// The text that Python left behind, with gluon_syncbn_leave_error on this thread, for an error that C++ is to throw.
std::string take_error();

}  // namespace gluon_syncbn

// enum OpReqType (include/mxnet/op_attr_types.h)
enum class Request : int { kNull = 0, kWrite = 1, kWriteInplace = 2, kAdd = 3 };

// The exception that MXNet expects of an operator (dmlc-core, include/dmlc/logging.h). MXNet catches it by the name of
// its type where it runs the callbacks, and hands its text to whoever reads the output. Without it the text would be
// that of a failed check. It needs default visibility, or the type would not be recognised as the same.
namespace dmlc {
struct __attribute__((visibility("default"))) Error : public std::runtime_error {
  explicit Error(const std::string& text) : std::runtime_error(text) {}
};
}  // namespace dmlc
