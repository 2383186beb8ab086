// Stands in for CUDA's runtime, libcudart.so.11.0, on top of driver.cpp: the functions that MXNet calls to allocate, to
// copy and to wait. MXNet's own kernels cannot run: the stand-in refuses them by name, except three that nets can
// hardly do without, which are written anew here.
//
// As before CUDA 12, cudaSetDevice gives a thread no context; the next call that needs one does.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "driver.h"

namespace {

// STAND_IN_CAPABILITY: from 90 on it is as on a GPU that is newer than MXNet, which has no kernel for it.
constexpr int kNewestOfMXNet = 86;
int capability() {
  const char* set = std::getenv("STAND_IN_CAPABILITY");
  return set ? std::atoi(set) : kNewestOfMXNet;
}

constexpr int kMemoryAllocation = 2, kInvalidDevice = 101, kNoKernelImage = 209;

thread_local int last_error = 0;  // of a launch, which cannot return it
thread_local int chosen = 0;
thread_local bool is_chosen = true;  // else the current context says which device it is

int device() { return is_chosen || stand_in_current() < 0 ? chosen : stand_in_current(); }
int bind() { return is_chosen || stand_in_current() < 0 ? stand_in_bind(chosen) : 0; }

std::mutex mutex;
auto& names = *new std::map<const void*, std::string>;  // of MXNet's kernels; threads outlive main

thread_local void* launch_stream = nullptr;

// Kernel<Op>::Launch of MXNet's (src/operator/mxnet_op.h) for float32: fill with a number, sum of two, copy.
std::function<void()> kernel_of_mxnet(const std::string& name, void** arguments) {
  const auto is = [&](const char* operation, const char* types) {
    return name.find(std::string("mxnet_generic_kernelI") + operation) != std::string::npos &&
           name.find(types) != std::string::npos;
  };
  const int size = *static_cast<int*>(arguments[0]);
  const auto array = [&](int i) { return static_cast<float*>(stand_in_seen(*static_cast<void**>(arguments[i]))); };
  if (is("NS1_11op_with_reqINS1_10set_to_intILi", "ELi1EEEJPfEE")) {
    const int value = std::stoi(name.substr(name.find("set_to_intILi") + 13));
    return [=, to = array(1)] { std::fill(to, to + size, static_cast<float>(value)); };
  }
  if (is("NS0_3SumE", "JPfNS_9OpReqTypeES4_S4_EE") && *static_cast<int*>(arguments[2]) != 3) {
    return [=, to = array(1), a = array(3), b = array(4)] {
      for (int i = 0; i < size; ++i) to[i] = a[i] + b[i];
    };
  }
  if (is("NS1_11op_with_reqINS1_8identityELi1E", "JPfS")) {
    return [=, to = array(1), from = array(2)] { std::copy(from, from + size, to); };
  }
  return nullptr;
}

}  // namespace

void stand_in_forget_device() { is_chosen = false; }

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* nothing[1];
  return nothing;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> lock(mutex);
  names[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(unsigned long, unsigned, unsigned long, unsigned, size_t, void* stream) {
  launch_stream = stream;
  return 0;
}
int __cudaPopCallConfiguration(void*, void*, size_t* shared, void** stream) {
  *shared = 0;
  *stream = launch_stream;
  return 0;
}
int cudaLaunchKernel(const void* function, unsigned long, unsigned, unsigned long, unsigned, void** arguments, size_t,
                     void* stream) {
  if (const int error = bind()) return last_error = error;
  std::string name;
  {
    std::lock_guard<std::mutex> lock(mutex);
    name = names[function];
  }
  const auto task = capability() > kNewestOfMXNet ? nullptr : kernel_of_mxnet(name, arguments);
  if (!task) {
    std::fprintf(stderr, "stand-in for CUDA: a kernel of MXNet's was asked for: %s\n", name.c_str());
    return last_error = kNoKernelImage;
  }
  stand_in_run(task, stream);
  return 0;
}

int cudaGetDeviceCount(int* count) {
  return unless(stand_in_begin(), [&] { *count = stand_in_count(); });
}
int cudaSetDevice(int number) {
  if (const int error = stand_in_begin()) return error;
  if (number < 0 || number >= stand_in_count()) return kInvalidDevice;
  chosen = number;
  is_chosen = true;
  return 0;
}
int cudaGetDevice(int* number) {
  return unless(stand_in_begin(), [&] { *number = device(); });
}
int cudaGetDeviceProperties(void* properties, int) {
  return unless(stand_in_begin(),
                [&] { std::strcpy(static_cast<char*>(std::memset(properties, 0, 600)), "stand-in for a GPU"); });
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  if (const int error = stand_in_begin()) return error;
  // Compute capability (75, 76), 4 multiprocessors (16), else a number that is large enough.
  *value = attribute == 75 ? capability() / 10 : attribute == 76 ? capability() % 10 : attribute == 16 ? 4 : 1024;
  return 0;
}
int cudaDriverGetVersion(int* version) {
  *version = 11080;
  return 0;
}
int cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return 0;
}
int cudaDeviceSynchronize() {
  return unless(bind(), [&] { stand_in_wait(nullptr); });
}

int cudaGetLastError() {
  const int error = last_error;
  last_error = 0;
  return error;
}
int cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(int error) {
  static thread_local char text[64];
  std::snprintf(text, sizeof text, "stand-in for CUDA: error %d", error);
  return text;
}
const char* cudaGetErrorName(int error) { return cudaGetErrorString(error); }

int cudaMalloc(void** address, size_t size) {
  if (const int error = bind()) return error;
  *address = stand_in_allocate(size);
  return *address ? 0 : kMemoryAllocation;
}
int cudaFree(void* address) {
  if (const int error = bind()) return error;
  return address ? stand_in_release(address) : 0;
}
int cudaHostAlloc(void** address, size_t size, unsigned) {
  if (const int error = bind()) return error;
  *address = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  return *address ? 0 : kMemoryAllocation;
}
int cudaFreeHost(void* address) {
  std::free(address);
  return 0;
}
int cudaMemGetInfo(size_t* free, size_t* total) {
  return unless(bind(), [&] { *free = *total = size_t(8) << 30; });
}
int cudaMemcpyAsync(void* to, const void* from, size_t size, int, void* stream) {
  return unless(bind(), [&] { stand_in_copy(to, from, size, stream); });
}
int cudaMemcpy(void* to, const void* from, size_t size, int) {
  const int error = cudaMemcpyAsync(to, from, size, 0, nullptr);
  return error ? error : cudaDeviceSynchronize();
}
int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, void* stream) {
  return cudaMemcpyAsync(to, from, size, 0, stream);
}
int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int,
                      void* stream) {
  return unless(bind(), [&] {
    for (size_t row = 0; row < height; ++row) {
      stand_in_copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width,
                    stream);
    }
  });
}
int cudaMemsetAsync(void* to, int value, size_t size, void* stream) {
  return unless(bind(), [&] { stand_in_set(to, value, size, stream); });
}

int cudaStreamCreate(void** stream) {
  return unless(bind(), [&] { *stream = stand_in_new_stream(); });
}
int cudaStreamSynchronize(void* stream) {
  return unless(bind(), [&] { stand_in_wait(stream); });
}
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  stand_in_wait_event(stream, event);
  return 0;
}
int cudaEventCreateWithFlags(void** event, unsigned) {
  *event = stand_in_new_event();
  return 0;
}
int cudaEventRecord(void* event, void* stream) {
  stand_in_record(event, stream);
  return 0;
}

}  // extern "C"
