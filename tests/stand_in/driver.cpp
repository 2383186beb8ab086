// Stands in for CUDA's driver, libcuda.so.1, as far as MXNet and the package use it: several "GPUs" whose kernels run
// on CPU threads (kernels_on_cpu.cpp). It is strict where a GPU is:
//
//   memory    The host cannot touch "GPU memory": reading or writing it ends the process. Kernels and copies see it at
//             another address.
//   streams   Each is a thread with a queue, so that code that forgets to wait reads old numbers. STAND_IN_DELAY_US
//             delays each piece of work by a random time up to that.
//   contexts  A thread has no context before it gets one; loading a module without a context is an error.
//
// Kernels come as PTX from the real NVRTC. The stand-in reads from it their names, the sizes of their arguments and
// their kind of layer, and runs kernels.cu, compiled for the CPU: STAND_IN_KERNELS names the folder with
// kernels_0_0_0_0.so and so on. STAND_IN_GPUS is the number of GPUs (2). STAND_IN_REFUSE_PTX=1 makes loading fail, as
// on a driver that is older than the compiler. STAND_IN_LAUNCHES is the number of launches after which all others fail,
// and STAND_IN_HANGS the number of a launch that never ends.

#include "driver.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kInvalidValue = 1, kNotInitialized = 3, kInvalidDevice = 101, kInvalidContext = 201, kInvalidPtx = 218,
              kNotFound = 500, kNotReady = 600, kIllegalAddress = 700;

std::string setting(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

struct Context {};
Context contexts[64];  // by device
thread_local Context* current = nullptr;

// As with CUDA, a process that was forked by one that has used it cannot use it.
bool lost = false;

// One file in memory, seen twice: by the host without any rights, and by the "GPU".
class Memory {
 public:
  static Memory& get() {
    static auto* memory = new Memory;
    return *memory;
  }

  void* allocate(size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t rounded = (size + 511) / 512 * 512;
    std::vector<char*>& free = free_[rounded];
    char* address;
    if (!free.empty()) {
      address = free.back();
      free.pop_back();
    } else {
      if (next_ + rounded > kSize) return nullptr;
      address = host_ + next_;
      next_ += rounded;
    }
    sizes_[address] = rounded;
    return address;
  }

  int release(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sizes_.find(static_cast<char*>(address));
    if (found == sizes_.end()) return kInvalidValue;
    free_[found->second].push_back(found->first);
    sizes_.erase(found);
    return 0;
  }

  // Where the "GPU" sees it; other memory as it is.
  void* seen(const void* address) const {
    char* at = static_cast<char*>(const_cast<void*>(address));
    return at >= host_ && at < host_ + kSize ? device_ + (at - host_) : at;
  }

 private:
  static constexpr size_t kSize = size_t(16) << 30;  // of addresses; pages come when they are used

  Memory() {
    const int file = memfd_create("stand_in_gpu", 0);
    if (file < 0 || ftruncate(file, kSize) != 0) std::abort();
    host_ = static_cast<char*>(mmap(nullptr, kSize, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
    device_ = static_cast<char*>(mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    if (host_ == MAP_FAILED || device_ == MAP_FAILED) std::abort();
    close(file);
  }

  std::mutex mutex_;
  char *host_, *device_;
  size_t next_ = 0;
  std::map<size_t, std::vector<char*>> free_;
  std::map<char*, size_t> sizes_;
};

class Stream {
 public:
  Stream() : thread_([this] { work(); }) { thread_.detach(); }

  void push(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty(); });
  }

 private:
  void work() {
    const int delay = std::stoi(setting("STAND_IN_DELAY_US", "0"));
    static std::atomic<unsigned> seed{1};
    std::minstd_rand random(seed++);
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = tasks_.front();
      lock.unlock();
      if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(delay)));
      task();
      lock.lock();
      tasks_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

using Event = std::shared_future<void>;  // the end of its stream's work at the time of the last recording

Stream* stream_of(void* stream) {
  static auto* defaults = new std::map<Context*, Stream*>;
  static auto* mutex = new std::mutex;
  if (stream) return static_cast<Stream*>(stream);
  std::lock_guard<std::mutex> lock(*mutex);
  Stream*& found = (*defaults)[current];
  if (!found) found = new Stream;
  return found;
}

using LaunchOnCpu = int (*)(const char*, const unsigned*, const void*);

struct Function {
  Context* context;
  LaunchOnCpu launch;
  std::string name;
  size_t size;  // of its argument, a struct
};
using Module = std::map<std::string, Function>;

LaunchOnCpu kernels_for(const std::string& ptx) {
  const std::string mark = "compiled_for_";
  const size_t at = ptx.find(mark);
  if (at == std::string::npos) return nullptr;
  const size_t kind = at + mark.size();
  const std::string file = setting("STAND_IN_KERNELS", ".") + "/kernels_" +
                           ptx.substr(kind, ptx.find_first_not_of("0123456789_", kind) - kind) + ".so";
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) std::fprintf(stderr, "stand-in for CUDA: %s\n", dlerror());
  return library ? reinterpret_cast<LaunchOnCpu>(dlsym(library, "launch_on_cpu")) : nullptr;
}

// The arguments with the kernel's addresses of "GPU memory". No other numbers of 8 bytes lie in that range.
std::vector<void*> seen_arguments(const void* arguments, size_t size) {
  std::vector<void*> words((size + 7) / 8);
  std::memcpy(words.data(), arguments, size);
  for (void*& word : words) word = Memory::get().seen(word);
  return words;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// For the runtime's stand-in (runtime.cpp)

int stand_in_count() {
  static const int number = std::stoi(setting("STAND_IN_GPUS", "2"));
  return number;
}
int stand_in_current() { return current ? static_cast<int>(current - contexts) : -1; }
int stand_in_begin() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { lost = true; });  // on first use
  return registered != 0 || lost ? kNotInitialized : 0;
}
int stand_in_bind(int device) {
  if (const int error = stand_in_begin()) return error;
  if (device < 0 || device >= stand_in_count()) return kInvalidDevice;
  current = contexts + device;
  return 0;
}
void* stand_in_allocate(size_t size) { return Memory::get().allocate(size); }
int stand_in_release(void* address) { return Memory::get().release(address); }
void* stand_in_new_stream() { return new Stream; }
void stand_in_copy(void* to, const void* from, size_t size, void* stream) {
  stream_of(stream)->push([=] { std::memcpy(Memory::get().seen(to), Memory::get().seen(from), size); });
}
void stand_in_set(void* to, int value, size_t size, void* stream) {
  stream_of(stream)->push([=] { std::memset(Memory::get().seen(to), value, size); });
}
void* stand_in_seen(const void* address) { return Memory::get().seen(address); }
void stand_in_run(const std::function<void()>& task, void* stream) { stream_of(stream)->push(task); }
void stand_in_wait(void* stream) { stream_of(stream)->wait(); }
void* stand_in_new_event() { return new Event; }
void stand_in_record(void* event, void* stream) {
  const auto reached = std::make_shared<std::promise<void>>();
  *static_cast<Event*>(event) = reached->get_future();
  stream_of(stream)->push([reached] { reached->set_value(); });
}
void stand_in_wait_event(void* stream, void* event) {
  const Event reached = *static_cast<Event*>(event);
  if (reached.valid()) stream_of(stream)->push([reached] { reached.wait(); });
}

// ---------------------------------------------------------------------------------------------------------------------
// The driver's own interface

extern "C" {

int cuInit(unsigned) { return stand_in_begin(); }

int cuDeviceGetCount(int* number) {
  return unless(stand_in_begin(), [&] { *number = stand_in_count(); });
}

// NVRTC from 13 on asks for a table of its own, and does without if there is none.
int cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return kNotFound;
}

int cuDeviceGet(int* device, int ordinal) {
  if (const int error = stand_in_begin()) return error;
  if (ordinal < 0 || ordinal >= stand_in_count()) return kInvalidDevice;
  *device = ordinal;
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  return unless(stand_in_begin(), [&] { *value = attribute == 16 ? 4 : 0; });  // multiprocessors
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  return unless(stand_in_begin(), [&] { *context = contexts + device; });
}

int cuCtxGetCurrent(void** context) {
  return unless(stand_in_begin(), [&] { *context = current; });
}

int cuCtxSetCurrent(void* context) {
  if (const int error = stand_in_begin()) return error;
  current = static_cast<Context*>(context);
  if (stand_in_forget_device) stand_in_forget_device();
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  static thread_local char buffer[64];
  std::snprintf(buffer, sizeof buffer, "stand-in for CUDA: error %d", error);
  *text = buffer;
  return 0;
}

int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
  if (!current) return kInvalidContext;
  const std::string ptx = static_cast<const char*>(image);
  if (setting("STAND_IN_REFUSE_PTX", "0") == "1") return kInvalidPtx;
  const LaunchOnCpu launch = kernels_for(ptx);
  if (!launch) return kInvalidPtx;
  auto* loaded = new Module;
  const std::string entry = ".entry ";
  for (size_t at = ptx.find(entry); at != std::string::npos; at = ptx.find(entry, at + 1)) {
    // .entry NAME(.param .align 8 .b8 arguments[176])
    const size_t open = ptx.find('(', at), bracket = ptx.find('[', open);
    const std::string name = ptx.substr(at + entry.size(), open - at - entry.size());
    (*loaded)[name] = {current, launch, name, std::strtoul(&ptx[bracket + 1], nullptr, 10)};
  }
  *module = loaded;
  return 0;
}

int cuModuleLoadData(void** module, const void* image) {
  return cuModuleLoadDataEx(module, image, 0, nullptr, nullptr);
}

int cuModuleUnload(void*) { return 0; }

int cuModuleGetFunction(void** function, void* module, const char* name) {
  auto& functions = *static_cast<Module*>(module);
  const auto found = functions.find(name);
  if (found == functions.end()) return kNotFound;
  *function = &found->second;
  return 0;
}

int cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned, void* stream, void** arguments, void**) {
  const auto& function = *static_cast<Function*>(handle);
  static std::atomic<int> launched{0};
  const int launches = ++launched;
  if (launches > std::stoi(setting("STAND_IN_LAUNCHES", "2000000000"))) return kIllegalAddress;
  if (current != function.context) return kInvalidContext;
  const bool fits = grid_x > 0 && grid_y > 0 && grid_x <= 0x7fffffff && grid_y <= 65535 && grid_z == 1 &&
                    block_x * block_y > 0 && block_x * block_y <= 1024 && block_z == 1;
  if (!fits) return kInvalidValue;
  const bool hangs = launches == std::stoi(setting("STAND_IN_HANGS", "0"));
  stream_of(stream)->push([=, &function, words = seen_arguments(arguments[0], function.size)] {
    while (hangs) std::this_thread::sleep_for(std::chrono::seconds(1));
    const unsigned blocks[] = {grid_x, grid_y, block_x};
    if (function.launch(function.name.c_str(), blocks, words.data()) != 0) std::abort();
  });
  if (!stream) stream_of(stream)->wait();  // arrays of the stand-in for CuPy, which uses it, are the host's
  return 0;
}

int cuFuncGetAttribute(int* value, int, void*) {
  *value = 0;
  return 0;
}

int cuStreamCreate(void** stream, unsigned) {
  if (!current) return kInvalidContext;
  *stream = new Stream;
  return 0;
}

int cuStreamQuery(void* stream) { return !current ? kInvalidContext : stream_of(stream)->is_idle() ? 0 : kNotReady; }

int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t size, void* stream) {
  if (!current) return kInvalidContext;
  stand_in_set(reinterpret_cast<void*>(address), value, size, stream);
  return 0;
}

}  // extern "C"
