// The kernels of kernels.cu, compiled for one kind of layer and loaded onto GPUs.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "cuda/launch.h"
#include "tensor.h"

namespace gluon_syncbn {

// The structs of the kernels' arguments, with pointers to memory that the GPU can reach.
using int64 = int64_t;
using value_t = void;
using real_t = void;
#include "cuda/kernels/arguments.h"

// What kernels.cu is compiled for.
struct KernelKind {
  DType dtype;
  Activation::Kind activation;
  bool has_residual, in_place;

  bool operator<(const KernelKind& other) const {
    return std::tie(dtype, activation, has_residual, in_place) <
           std::tie(other.dtype, other.activation, other.has_residual, other.in_place);
  }
};

enum class Kernel { kMoments, kNormalize, kGradientSums, kInputGradient };

// The kernels on one GPU.
class GpuProgram {
 public:
  // Sets the text of kernels.cu.
  static void set_source(const char* source);

  // The options that NVRTC is given.
  static std::vector<std::string> options(const KernelKind& kind);

  // Compiles and loads at the first call, which takes some seconds, and keeps it for good. Throws CudaFailure.
  static const GpuProgram& of(const KernelKind& kind, int device);

  static const char* name(Kernel kernel);

  // Of the GPU.
  int64_t multiprocessors() const { return multiprocessors_; }

  // Launches on `stream` of the thread's current context, which must be that of this GPU. `arguments` is the kernel's
  // struct, which is copied. Throws CudaFailure.
  void launch(Kernel kernel, const Launch& launch, const void* arguments, void* stream) const;

 private:
  GpuProgram(const std::string& ptx, int device);

  struct Functions {
    void *rows, *columns;
  };
  Functions functions_[4];
  int64_t multiprocessors_;
};

// The shape as the kernels take it.
Shape shape_of(const Layout& layout, const Launch& launch);

}  // namespace gluon_syncbn
