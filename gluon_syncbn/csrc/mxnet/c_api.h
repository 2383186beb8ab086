// The few declarations of MXNet's C interface, of its engine and of its resource manager that the core needs, by hand:
// no MXNet header is used, and nothing is linked. The C interface is the same from MXNet 1.5.1 to 1.9.1
// (include/mxnet/c_api.h). Its functions are looked up in the libmxnet that Python has loaded, whose handle it hands
// over. tests/csrc/check_c_api.cpp compares all of this with the headers of each MXNet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

extern "C" {

struct MXCallbackList {
  int num_callbacks;
  int (**callbacks)(void);
  void** contexts;
};

// enum CustomOpCallbacks and CustomOpPropCallbacks: positions in MXCallbackList.
enum { kOperatorDelete, kOperatorForward, kOperatorBackward, kOperatorCallbacks };
enum {
  kPropertyDelete,
  kPropertyListArguments,
  kPropertyListOutputs,
  kPropertyListStates,
  kPropertyInferShape,
  kPropertyBackwardDependency,
  kPropertyCreateOperator,
  kPropertyInferType,
  kPropertyCallbacks  // more would be about sparse arrays
};

// The callbacks; each ends with its context. All return 1, or 0 if they fail.
typedef int (*CustomOpDelete)(void* state);
typedef int (*CustomOpList)(char*** names, void* state);
typedef int (*CustomOpInferShape)(int num, int* ndims, int** shapes, void* state);
typedef int (*CustomOpBackwardDependency)(const int* out_grad, const int* in_data, const int* out_data, int* num_deps,
                                          int** deps, void* state);
typedef int (*CustomOpCreate)(const char* device, int num_inputs, unsigned** shapes, const int* ndims,
                              const int* dtypes, MXCallbackList* ret, void* state);
typedef int (*CustomOpInferType)(int num, int* dtypes, void* state);

// Forward and backward. `arrays` are NDArray handles that the callee frees.
typedef int (*CustomOpRun)(int size, void** arrays, int* tags, const int* requests, int is_train, void* state);

typedef int (*CustomOpPropCreator)(const char* op_type, int num_arguments, const char** keys, const char** values,
                                   MXCallbackList* ret);

// MXNet's functions that the core calls. Each but last_error returns 0, or another number after leaving the text that
// last_error returns.
struct MXNetFunctions {
  int (*custom_op_register)(const char* op_type, CustomOpPropCreator creator);
  int (*array_data)(void* array, void** data);
  int (*array_free)(void* array);
  const char* (*last_error)();
  int (*array_create)(const unsigned* shape, unsigned ndim, int device_type, int device, int delay_alloc, int dtype,
                      void** array);
  // An operation of the engine: `function(run_context, argument)`, then `drop(argument)`. `context` is a Context,
  // `property` an FnProperty.
  int (*engine_push)(void (*function)(void*, void*), void* argument, void (*drop)(void*), const void* context,
                     void** reads, int num_reads, void** writes, int num_writes, const void* property, int priority,
                     const char* name);
  // The same, with variables of the engine in place of arrays: two arrays of EngineVariable*.
  int (*engine_push_variables)(void (*function)(void*, void*), void* argument, void (*drop)(void*), const void* context,
                               void* reads, int num_reads, void* writes, int num_writes, const void* property,
                               int priority, const char* name);
  // As engine_push, with a function that returns before the operation is complete: `function(run_context, on_complete,
  // argument)`, where `on_complete` is an OnComplete that is gone when it returns.
  int (*engine_push_async)(void (*function)(void*, void*, void*), void* argument, void (*drop)(void*),
                           const void* context, void** reads, int num_reads, void** writes, int num_writes,
                           const void* property, int priority, const char* name, bool wait);
  int (*array_wait)(void* array);
  int (*array_context)(void* array, int* device_type, int* device);        // the type of a none array is 0
  int (*array_copy_from_cpu)(void* array, const void* data, size_t size);  // in elements
};

}  // extern "C"

namespace gluon_syncbn {

using AnyCallback = int (*)(void);

// The C interface declares every callback as int (*)(void); void (*)(void) is C++'s word for "of any type".
template <typename Function>
AnyCallback any(Function function) {
  return reinterpret_cast<AnyCallback>(reinterpret_cast<void (*)(void)>(function));
}

// The functions of the MXNet that Python has connected.
const MXNetFunctions& mxnet();

}  // namespace gluon_syncbn

// Kinds of devices (include/mxnet/base.h, Context::DeviceType).
constexpr int kCpu = 1;
constexpr int kGpu = 2;
constexpr int kPinned = 3;

// FnProperty (include/mxnet/engine.h): an operation that is skipped where an array that it reads or writes has an
// error; the same, run by the thread that asks for it if there is nothing to wait for; and one that always runs.
enum class EngineProperty : int { kOrdinary = 0, kOrdinaryAtOnce = 4, kNoSkip = 7 };

// CallbackOnComplete (include/mxnet/engine.h): completes an operation, once, on any thread. While it runs, MXNet
// deletes the operation and its argument.
struct OnComplete {
  void (*callback)(void* engine, void* operation, const void* error);
  void* engine;
  void* operation;

  void operator()() const { callback(engine, operation, nullptr); }
};

// enum OpReqType (include/mxnet/op_attr_types.h)
enum class Request : int { kNull = 0, kWrite = 1, kWriteInplace = 2, kAdd = 3 };

// The resource manager, the same in MXNet 1.7.0 to 1.9.1 (include/mxnet/resource.h and engine.h)

// Context: the device of an operator.
struct DeviceContext {
  int32_t type;  // kCpu, ...
  int32_t id;
};

// ResourceRequest: an operator asks for such a kind.
struct ResourceRequest {
  enum Kind : int32_t { kRandom, kTemporarySpace, kParallelRandom } kind;
};

// engine::Var. Operators that write the same variable run one after the other, in the order in which they were pushed.
struct EngineVariable {
  // Grows when operators have written it (once for those that the engine runs as one). Takes the variable's lock.
  virtual size_t version() = 0;

 protected:
  ~EngineVariable() = default;  // MXNet's own
};

// Resource: MXNet's answer. The operator writes the variable.
struct Resource {
  ResourceRequest request;
  EngineVariable* variable;
  int32_t id;
  void* contents;
};

// ResourceManager: each thread that computes has one, which MXNet never frees.
struct ResourceManager;

// Its methods, which take the object first.
using RequestResource = Resource (*)(ResourceManager*, DeviceContext, const ResourceRequest&);
using SeedAll = void (*)(ResourceManager*, uint32_t);
using SeedDevice = void (*)(ResourceManager*, DeviceContext, uint32_t);

// The exception that MXNet expects of an operator (dmlc-core, include/dmlc/logging.h). MXNet catches it by the name of
// its type where it runs the callbacks, and hands its text to a reader of the output. Without it the text would be
// about a failed check. The two libraries do not share the type; they are the same because libstdc++ compares names
// of types, which needs them to be visible.
namespace dmlc {
struct __attribute__((visibility("default"))) Error : public std::runtime_error {
  explicit Error(const std::string& text) : std::runtime_error(text) {}
};
}  // namespace dmlc
