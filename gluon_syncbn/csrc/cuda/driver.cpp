#include "cuda/driver.h"

#include <cstdlib>
#include <map>
#include <mutex>

namespace gluon_syncbn {
namespace {

void* library_of_mxnet = nullptr;

struct Driver {
  CudaFunctions functions{};
  std::string missing;
  std::mutex mutex;
  std::map<int, void*> contexts;  // of the GPUs in use

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
      missing = "there is no CUDA driver (libcuda.so.1)";
      return;
    }
    CudaFunctions& f = functions;
    const bool found =
        find_function(library, "cuInit", f.init) && find_function(library, "cuDeviceGet", f.get_device) &&
        find_function(library, "cuDeviceGetAttribute", f.get_attribute) &&
        find_function(library, "cuDevicePrimaryCtxRetain", f.retain_context) &&
        find_function(library, "cuCtxGetCurrent", f.get_current) &&
        find_function(library, "cuCtxSetCurrent", f.set_current) &&
        find_function(library, "cuStreamCreate", f.create_stream) &&
        find_function(library, "cuStreamQuery", f.query_stream) &&
        find_function(library, "cuModuleLoadDataEx", f.load_module) &&
        find_function(library, "cuModuleGetFunction", f.get_function) &&
        find_function(library, "cuLaunchKernel", f.launch) && find_function(library, "cuMemsetD8Async", f.fill_bytes) &&
        find_function(library, "cuGetErrorString", f.get_error_string);
    if (!found) missing = std::string("the CUDA driver is too old: ") + dlerror();
  }
};

Driver& driver() {
  static auto* one = new Driver;
  return *one;
}

struct Compiler {
  int (*create)(void** program, const char* source, const char* name, int num_headers, const char* const* headers,
                const char* const* header_names) = nullptr;
  int (*compile)(void* program, int num_options, const char* const* options) = nullptr;
  int (*destroy)(void** program) = nullptr;
  int (*get_log_size)(void* program, size_t* size) = nullptr;
  int (*get_log)(void* program, char* log) = nullptr;
  int (*get_ptx_size)(void* program, size_t* size) = nullptr;
  int (*get_ptx)(void* program, char* ptx) = nullptr;
  bool is_found = false;

  // Takes GLUON_SYNCBN_NVRTC; or the NVRTC that MXNet has loaded, of any version; or the newest that the loader finds.
  Compiler() {
    const char* chosen = std::getenv("GLUON_SYNCBN_NVRTC");
    if (chosen && *chosen) {
      use(dlopen(chosen, RTLD_NOW | RTLD_LOCAL));
      return;
    }
    if (use(library_of_mxnet)) return;
    for (const char* version : {"", ".13", ".12", ".11.2", ".11.1", ".11.0", ".10.2", ".10.1"}) {
      if (use(dlopen((std::string("libnvrtc.so") + version).c_str(), RTLD_NOW | RTLD_LOCAL))) return;
    }
  }

  bool use(void* library) {
    is_found = library && find_function(library, "nvrtcCreateProgram", create) &&
               find_function(library, "nvrtcCompileProgram", compile) &&
               find_function(library, "nvrtcDestroyProgram", destroy) &&
               find_function(library, "nvrtcGetProgramLogSize", get_log_size) &&
               find_function(library, "nvrtcGetProgramLog", get_log) &&
               find_function(library, "nvrtcGetPTXSize", get_ptx_size) &&
               find_function(library, "nvrtcGetPTX", get_ptx);
    return is_found;
  }
};

int handle_of(int device) {
  int handle = 0;
  check_cuda(cuda().init(0), "CUDA could not be initialized");
  check_cuda(cuda().get_device(&handle, device), "there is no gpu(" + std::to_string(device) + ")");
  return handle;
}

// Retains each context once and never releases it, as MXNet does.
void* context_of(int device) {
  cuda();  // throws where there is no driver
  std::lock_guard<std::mutex> lock(driver().mutex);
  void*& context = driver().contexts[device];
  if (!context) {
    void* retained = nullptr;
    check_cuda(cuda().retain_context(&retained, handle_of(device)),
               "gpu(" + std::to_string(device) + ") gave no context");
    context = retained;
  }
  return context;
}

}  // namespace

void set_cuda_library(void* handle) { library_of_mxnet = handle; }

const CudaFunctions& cuda() {
  if (!driver().missing.empty()) throw CudaFailure(driver().missing);
  return driver().functions;
}

void check_cuda(int code, const std::string& what) {
  if (code == 0) return;
  const char* text = nullptr;
  cuda().get_error_string(code, &text);
  throw CudaFailure(what + ": CUDA error " + std::to_string(code) + (text ? std::string(", ") + text : ""));
}

int multiprocessors_of(int device) {
  constexpr int kMultiprocessors = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
  int count = 0;
  check_cuda(cuda().get_attribute(&count, kMultiprocessors, handle_of(device)),
             "a GPU gave no number of multiprocessors");
  return count > 0 ? count : 1;
}

std::string compile_cuda(const std::string& source, const std::vector<std::string>& options) {
  static const auto* nvrtc = new Compiler;
  const std::string failed = "the CUDA kernels could not be compiled at run time";
  if (!nvrtc->is_found) {
    throw CudaFailure(failed +
                      ": there is no NVRTC. MXNet has loaded none, and the loader finds no libnvrtc.so; name one with "
                      "the environment variable GLUON_SYNCBN_NVRTC");
  }
  void* program = nullptr;
  if (nvrtc->create(&program, source.c_str(), "kernels.cu", 0, nullptr, nullptr) != 0) throw CudaFailure(failed);
  std::vector<const char*> words;
  for (const std::string& option : options) words.push_back(option.c_str());
  size_t size = 0;
  std::string text;
  const bool is_compiled = nvrtc->compile(program, static_cast<int>(words.size()), words.data()) == 0;
  (is_compiled ? nvrtc->get_ptx_size : nvrtc->get_log_size)(program, &size);
  text.resize(size);
  (is_compiled ? nvrtc->get_ptx : nvrtc->get_log)(program, &text[0]);
  nvrtc->destroy(&program);
  if (!is_compiled) throw CudaFailure(failed + ": " + text.c_str());
  return text;
}

GpuContext::GpuContext(int device) {
  void* const context = context_of(device);
  check_cuda(cuda().get_current(&before_), "the current context could not be asked for");
  check_cuda(cuda().set_current(context), "the context of gpu(" + std::to_string(device) + ") could not be used");
}

GpuContext::~GpuContext() { cuda().set_current(before_); }

}  // namespace gluon_syncbn
