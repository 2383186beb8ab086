// The functions of CUDA's driver and of its compiler, NVRTC, that the package calls. The package uses no CUDA header
// and links no CUDA library: it looks up both libraries by name when the first layer is made on a GPU.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace gluon_syncbn {

// Looks up `name` in `library` (a handle of dlopen) and in the libraries that it has loaded. Returns false if the name
// is not there.
template <typename Function>
bool find_function(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// An error of CUDA. The caller adds the name of the layer.
class CudaFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// These are the same from CUDA 10.1 on. All return 0, or the number of an error.
struct CudaFunctions {
  int (*init)(unsigned flags);
  int (*get_device)(int* device, int ordinal);
  int (*get_attribute)(int* value, int attribute, int device);
  int (*retain_context)(void** context, int device);
  int (*get_current)(void** context);
  int (*set_current)(void* context);
  int (*create_stream)(void** stream, unsigned flags);
  int (*query_stream)(void* stream);
  int (*load_module)(void** module, const void* image, unsigned num_options, int* options, void** values);
  int (*get_function)(void** function, void* module, const char* name);
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared, void* stream, void** arguments, void** extra);
  int (*fill_bytes)(unsigned long long address, unsigned char value, size_t size, void* stream);
  int (*get_error_string)(int error, const char** text);
};

// Throws CudaFailure if the process has no CUDA driver.
const CudaFunctions& cuda();

// Throws CudaFailure with the error's number and the driver's text if `code` is not 0.
void check_cuda(int code, const std::string& what);

// Throws CudaFailure if there is no such GPU.
int multiprocessors_of(int device);

// Compiles to PTX, which a driver compiles for its GPU. Throws CudaFailure with the compiler's log.
std::string compile_cuda(const std::string& source, const std::vector<std::string>& options);

// Sets the library (a handle of dlopen) among whose own libraries NVRTC is looked for first. MXNet loads an NVRTC.
void set_cuda_library(void* handle);

// Puts this thread into the primary context of a GPU, which MXNet uses too, and at the end back into its former
// context. MXNet's threads for custom operators have no context. Throws CudaFailure if there is no such GPU.
class GpuContext {
 public:
  explicit GpuContext(int device);
  ~GpuContext();
  GpuContext(const GpuContext&) = delete;
  GpuContext& operator=(const GpuContext&) = delete;

 private:
  void* before_ = nullptr;
};

}  // namespace gluon_syncbn
