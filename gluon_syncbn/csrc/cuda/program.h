// kernels.cu as MXNet's run-time compiler makes it, launched through MXNet's engine on MXNet's own streams. No CUDA
// header and no CUDA library is used: a kernel is called by its name with arrays of MXNet's and with numbers.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "mxnet/array.h"
#include "cuda/scratch.h"
#include "tensor.h"
#include "cuda/launch.h"

namespace gluon_syncbn {

// The arguments of the kernels, by name. The arrays must live until the launch has returned, no longer.
#define READ_ARRAY(type) const Array*
#define WRITE_ARRAY(type) const Array*
using int64 = int64_t;
#include "cuda/kernels/arguments.cuh"

// The kernels for one type of activations. Compiled at first use, loaded onto each GPU at its first launch there, and
// kept for good.
class GpuProgram {
 public:
  // Sets the text of kernels.cu.
  static void set_source(const char* source);

  // Throws MXNetFailure with the compiler's log if it does not compile.
  static GpuProgram& of(DType dtype);

  // A function for each kernel of arguments.cuh, which has all arguments but those of the shape. The engine runs the
  // kernel when what wrote its arrays is done; errors of the launch itself are thrown where an array that it writes is
  // read. Throw MXNetFailure if the kernel cannot be loaded.
#define DECLARE(kernel, Arguments, LIST, has_residual) \
  void kernel(int device, const Launch& launch, const Layout& layout, Arguments arguments);
  KERNELS(DECLARE)
#undef DECLARE

  // NaN everywhere in `values`.
  void fill_nan(int device, const Array& values, int64_t size);

 private:
  explicit GpuProgram(DType dtype);
  struct Parameter {
    int is_array, is_const, dtype;
  };
  void create(void* program, const std::string& kernel, const std::vector<Parameter>& parameters);
  void call(const std::string& kernel, int device, const unsigned* grid, const unsigned* block, void** arguments);

  std::mutex mutex_;  // MXNet's own tables of loaded kernels have none
  std::map<std::string, void*> kernels_;
};

// Launches the moments of x and waits for them: mean[C] and M2[C], and if they are wanted the running mean[C] and
// variance[C]. They stay until `scratch` is used again.
const double* find_moments(GpuProgram& program, int device, const Launch& launch, const Layout& layout, const Array& x,
                           const Array& running_mean, const Array& running_var, bool wants_running,
                           const Scratch& scratch);

// Runs a kernel on numbers whose moments are known. Throws MXNetFailure if it cannot, or gives others.
void check_gpu(int device);

}  // namespace gluon_syncbn
