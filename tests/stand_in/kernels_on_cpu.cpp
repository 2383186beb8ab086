// kernels.cu as a library for the CPU, for one VALUE_TYPE: launch_on_cpu runs a kernel by its name.
#include "gpu_threads.h"

#include "../../gluon_syncbn/csrc/cuda/kernels.cu"

#include <map>
#include <string>
#include <type_traits>
#include <utility>

// Where the memory is that a kernel calls by an address; as it is, unless driver.cpp knows better.
extern "C" {
void* (*translate_address)(const void*) = [](const void* address) { return const_cast<void*>(address); };
}

namespace {

using Launcher = std::function<void(void** arguments)>;

// An argument as the kernel is to see it: addresses may be those that only a GPU knows.
template <typename T>
T seen(void* argument) {
  const T value = *static_cast<T*>(argument);
  if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(const_cast<void*>(static_cast<const void*>(translate_address(value))));
  } else {
    return value;
  }
}

template <typename... Arguments, size_t... I>
void call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<I...>) {
  kernel(seen<Arguments>(arguments[I])...);
}

template <typename... Arguments>
Launcher launcher(void (*kernel)(Arguments...)) {
  return [kernel](void** arguments) { call(kernel, arguments, std::index_sequence_for<Arguments...>()); };
}

const std::map<std::string, Launcher>& kernels() {
  static const std::map<std::string, Launcher> all {
#define LAUNCHERS(kernel, ...) \
  {#kernel "_rows", launcher(kernel##_rows)}, {#kernel "_columns", launcher(kernel##_columns)},
    KERNELS(LAUNCHERS)
#undef LAUNCHERS
        {"fill_nan", launcher(fill_nan)},
  };
  return all;
}

}  // namespace

// `arguments` are pointers to the arguments' values, as for cuLaunchKernel; 0, or 1 if there is no such kernel.
extern "C" int launch_on_cpu(const char* name, const unsigned* grid, const unsigned* block, void** arguments) {
  const auto found = kernels().find(name);
  if (found == kernels().end()) return 1;
  launch_grid([&] { found->second(arguments); }, grid, block);
  return 0;
}
