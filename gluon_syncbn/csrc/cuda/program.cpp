#include "cuda/program.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "cuda/driver.h"
#include "least_gamma.h"

namespace gluon_syncbn {
namespace {

// Never destroyed: CUDA may be gone when the process ends.
struct Programs {
  std::mutex mutex;
  std::string source;
  std::map<KernelKind, std::string> ptx;
  std::map<std::pair<KernelKind, int>, std::unique_ptr<const GpuProgram>> loaded;
};
Programs& programs = *new Programs;

}  // namespace

void GpuProgram::set_source(const char* source) { programs.source = source; }

std::vector<std::string> GpuProgram::options(const KernelKind& kind) {
  const auto define = [](const std::string& name, int64_t value) { return "-D" + name + "=" + std::to_string(value); };
  return {"--std=c++11",
          define("VALUE_TYPE", static_cast<int>(kind.dtype)),
          define("ACTIVATION", kind.activation),
          define("RESIDUAL", kind.has_residual),
          define("FROM_OUTPUT", kind.from_output),
          define("INVERSE_LEAST_GAMMA", static_cast<int64_t>(1 / least_gamma(kind.dtype)))};
}

const GpuProgram& GpuProgram::of(const KernelKind& kind, int device) {
  std::lock_guard<std::mutex> lock(programs.mutex);
  auto& loaded = programs.loaded[{kind, device}];
  if (!loaded) {
    std::string& ptx = programs.ptx[kind];
    if (ptx.empty()) ptx = compile_cuda(programs.source, options(kind));
    loaded.reset(new GpuProgram(ptx, device));
  }
  return *loaded;
}

const char* GpuProgram::name(Kernel kernel) {
  static const char* const names[] = {"moments", "normalize", "gradient_sums", "input_gradient"};
  return names[static_cast<int>(kernel)];
}

GpuProgram::GpuProgram(const std::string& ptx, int device) {
  const GpuContext context(device);
  multiprocessors_ = multiprocessors_of(device);
  const std::string where = " on gpu(" + std::to_string(device) + ")";
  void* module = nullptr;
  check_cuda(cuda().load_module(&module, ptx.c_str(), 0, nullptr, nullptr),
             "the CUDA kernels could not be loaded" + where);
  for (int i = 0; i < 4; ++i) {
    const std::string kernel = name(static_cast<Kernel>(i));
    for (const bool rows : {false, true}) {
      const std::string function = kernel + (rows ? "_rows" : "_columns");
      check_cuda(cuda().get_function(&functions_[i][rows], module, function.c_str()), kernel + where);
    }
  }
}

void GpuProgram::launch(Kernel kernel, const Launch& launch, const void* arguments, void* stream) const {
  void* const function = functions_[static_cast<int>(kernel)][launch.rows];
  void* addresses[] = {const_cast<void*>(arguments)};
  check_cuda(
      cuda().launch(function, launch.tiles, launch.parts, 1, launch.threads, 1, 1, 0, stream, addresses, nullptr),
      std::string("CUDA kernel ") + name(kernel) + " could not be launched");
}

}  // namespace gluon_syncbn
