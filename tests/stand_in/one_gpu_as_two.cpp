// Lets a program take one GPU for two, so that groups of GPUs can be tried where there is one: LD_PRELOAD this. In
// MXNet gpu(1) has streams, threads and memory pools of its own, on the same GPU, in the same context.
//
// It replaces the functions that MXNet and the package call with a device's number. A thread's device is the number
// that the thread has set last, and the GPU is always number 0.

#include <dlfcn.h>

#include <cstddef>
#include <cstring>
#include <initializer_list>

namespace {

constexpr int kGpus = 2, kInvalidDevice = 101;
thread_local int chosen = 0;

bool is_one(int device) { return device >= 0 && device < kGpus; }

using Find = void* (*)(void*, const char*);
// The real dlsym, since this file has one, too. It moved from libdl to libc in glibc 2.34.
Find real_dlsym() {
  static const Find found = [] {
    void* symbol = nullptr;
    for (const char* version : {"GLIBC_2.34", "GLIBC_2.2.5"}) {
      if (!symbol) symbol = dlvsym(RTLD_NEXT, "dlsym", version);
    }
    return reinterpret_cast<Find>(symbol);
  }();
  return found;
}

// Finds a function in the library that MXNet has loaded, which is not where RTLD_NEXT looks.
template <typename Function>
Function* real(const char* name, const char* library = "libcudart.so.11.0") {
  return reinterpret_cast<Function*>(real_dlsym()(dlopen(library, RTLD_NOW | RTLD_NOLOAD), name));
}

int get_device(int* device, int ordinal) {
  static auto* const next = real<int(int*, int)>("cuDeviceGet", "libcuda.so.1");
  return is_one(ordinal) ? next(device, 0) : kInvalidDevice;
}

}  // namespace

extern "C" {

// The package asks the loaded driver for its functions by name.
void* dlsym(void* library, const char* name) noexcept {
  if (std::strcmp(name, "cuDeviceGet") == 0) return reinterpret_cast<void*>(&get_device);
  return real_dlsym()(library, name);
}

int cuDeviceGet(int* device, int ordinal) { return get_device(device, ordinal); }

int cudaGetDeviceCount(int* count) {
  static auto* const next = real<int(int*)>("cudaGetDeviceCount");
  const int error = next(count);
  if (error == 0 && *count == 1) *count = kGpus;
  return error;
}

int cudaSetDevice(int device) {
  static auto* const next = real<int(int)>("cudaSetDevice");
  if (!is_one(device)) return kInvalidDevice;
  const int error = next(0);
  if (error == 0) chosen = device;
  return error;
}

int cudaGetDevice(int* device) {
  static auto* const next = real<int(int*)>("cudaGetDevice");
  const int error = next(device);
  if (error == 0) *device = chosen;
  return error;
}

int cudaGetDeviceProperties(void* properties, int device) {
  static auto* const next = real<int(void*, int)>("cudaGetDeviceProperties");
  return is_one(device) ? next(properties, 0) : kInvalidDevice;
}

int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  static auto* const next = real<int(int*, int, int)>("cudaDeviceGetAttribute");
  return is_one(device) ? next(value, attribute, 0) : kInvalidDevice;
}

int cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return 0;
}

int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, void* stream) {
  static auto* const next = real<int(void*, const void*, size_t, int, void*)>("cudaMemcpyAsync");
  constexpr int kDeviceToDevice = 3;
  return next(to, from, size, kDeviceToDevice, stream);
}

}  // extern "C"
