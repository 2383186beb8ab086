// The few declarations of MXNet's resource manager that cpu_resources.cpp needs, by hand. They are the same in MXNet
// 1.7.0 to 1.9.1 (include/mxnet/resource.h and engine.h); tests/csrc/check_c_api.cpp compares them with the headers.
#pragma once

#include <cstddef>
#include <cstdint>

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
