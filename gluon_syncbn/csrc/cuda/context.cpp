#include "cuda/context.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>

#include "mxnet/array.h"

namespace gluon_syncbn {
namespace {

// The driver that libmxnet has loaded. Contexts are retained once per device, for good: MXNet keeps them as long.
class Driver {
 public:
  static Driver& get() {
    static auto* driver = new Driver;
    return *driver;
  }

  bool is_loaded() const { return set_current_ != nullptr; }

  void* context_of(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    void*& context = contexts_[device];
    int number = 0;
    if (!context) {
      check(init_(0), "cuInit");
      check(get_device_(&number, device), "cuDeviceGet");
      check(retain_(&context, number), "cuDevicePrimaryCtxRetain");
    }
    return context;
  }

  void* current() const {
    void* context = nullptr;
    check(get_current_(&context), "cuCtxGetCurrent");
    return context;
  }

  int set_current(void* context) const { return set_current_(context); }

  static void check(int code, const char* function) {
    if (code != 0) {
      throw MXNetFailure(std::string(function) + " failed with CUDA error " + std::to_string(code));
    }
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!library) return;
    find(library, "cuInit", init_);
    find(library, "cuDeviceGet", get_device_);
    find(library, "cuDevicePrimaryCtxRetain", retain_);
    find(library, "cuCtxGetCurrent", get_current_);
    find(library, "cuCtxSetCurrent", set_current_);
  }

  template <typename Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
  }

  int (*init_)(unsigned flags) = nullptr;
  int (*get_device_)(int* device, int ordinal) = nullptr;
  int (*retain_)(void** context, int device) = nullptr;
  int (*get_current_)(void** context) = nullptr;
  int (*set_current_)(void* context) = nullptr;
  std::mutex mutex_;
  std::map<int, void*> contexts_;
};

}  // namespace

GpuContext::GpuContext(int device) {
  Driver& driver = Driver::get();
  if (!driver.is_loaded()) return;
  void* const context = driver.context_of(device);
  before_ = driver.current();
  Driver::check(driver.set_current(context), "cuCtxSetCurrent");
}

GpuContext::~GpuContext() {
  if (Driver::get().is_loaded()) Driver::get().set_current(before_);
}

}  // namespace gluon_syncbn
