// kernels.cu as a library for the CPU, for one kind of layer: launch_on_cpu runs a kernel by its name.
#include "gpu_threads.h"

#include "../../gluon_syncbn/csrc/cuda/kernels.cu"

#include <functional>
#include <map>
#include <string>

namespace {

using Launcher = std::function<void(const void* arguments)>;

template <typename Arguments>
Launcher launcher(void (*kernel)(Arguments)) {
  return [kernel](const void* arguments) { kernel(*static_cast<const Arguments*>(arguments)); };
}

const std::map<std::string, Launcher> kernels{
    {"moments_rows", launcher(moments_rows)},
    {"moments_columns", launcher(moments_columns)},
    {"normalize_rows", launcher(normalize_rows)},
    {"normalize_columns", launcher(normalize_columns)},
    {"gradient_sums_rows", launcher(gradient_sums_rows)},
    {"gradient_sums_columns", launcher(gradient_sums_columns)},
    {"input_gradient_rows", launcher(input_gradient_rows)},
    {"input_gradient_columns", launcher(input_gradient_columns)},
};

}  // namespace

// `blocks` is tiles, parts, threads, and `arguments` the kernel's struct; 0, or 1 if there is no such kernel.
extern "C" int launch_on_cpu(const char* name, const unsigned* blocks, const void* arguments) {
  const auto found = kernels.find(name);
  if (found == kernels.end()) return 1;
  launch_grid([&] { found->second(arguments); }, blocks);
  return 0;
}
