// The kernels of kernels.cu, compiled for one kind of layer and loaded onto a GPU.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "cuda/launch.h"
#include "tensor.h"

namespace gluon_syncbn {

// A kind of layer: kernels.cu is compiled once for each.
struct KernelKind {
  DType dtype;
  Activation::Kind activation;
  bool has_residual, from_output;

  bool operator<(const KernelKind& other) const {
    return std::tie(dtype, activation, has_residual, from_output) <
           std::tie(other.dtype, other.activation, other.has_residual, other.from_output);
  }
};

enum class Kernel { kMoments, kNormalize, kGradientSums, kInputGradient };

// The kernels on one GPU.
class GpuProgram {
 public:
  // Sets the text that cuda_source.py makes of kernels.cu.
  static void set_source(const char* source);

  // The options for NVRTC.
  static std::vector<std::string> options(const KernelKind& kind);

  // Compiles and loads the kernels at the first call, in some seconds, and keeps them for good. Throws CudaFailure.
  static const GpuProgram& of(const KernelKind& kind, int device);

  static const char* name(Kernel kernel);

  int64_t multiprocessors() const { return multiprocessors_; }

  // Launches a kernel on a stream of this GPU, whose context must be the current one. Copies `arguments`, the kernel's
  // struct. Throws CudaFailure.
  void launch(Kernel kernel, const Launch& launch, const void* arguments, void* stream) const;

 private:
  GpuProgram(const std::string& ptx, int device);

  void* functions_[4][2];  // of each kernel: for columns, for rows
  int64_t multiprocessors_;
};

}  // namespace gluon_syncbn
