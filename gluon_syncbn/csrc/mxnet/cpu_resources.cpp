// Gives each CPU device temporary space and random generators of its own, as MXNet gives each GPU.
//
// In MXNet all CPU devices of a thread ask one ResourceManager for both, and so wait for each other; temporary_space.h
// says why that is a deadlock. MXNet has no setting for it. So functions of this file replace three methods of the
// manager in the table of its class, once, for all threads of the process:
//
//   Request     A CPU device that asks for temporary space gets a buffer of its own. AttachOpResources asks for the
//               operators of a graph, which keeps the buffer; all others ask for one operator. The return address
//               tells. A CPU device that asks for a random generator gets its own. That of cpu(0) is MXNet's, so a seed
//               gives the same numbers there as without this package.
//   SeedRandom  of all devices, and of one device: seeds the generators of cpu(1), cpu(2), ... too.
//
// Buffers and generators come from managers that MXNet makes: it makes one for each thread that asks. So a thread that
// lives for a moment gets one more manager. The first has the buffers of the process, MXNET_CPU_TEMP_COPY of them; and
// each has generators, for one device of one thread. Threads that end leave what they have to later ones.
//
// MXNet is retired, so what this file relies upon does not change any more. Every function is looked up by its mangled
// name, which has its signature, and must stand in its table where it is expected. Otherwise nothing is replaced, and
// Python says why.

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "exported.h"
#include "mxnet/c_api.h"
#include "mxnet/resource_manager.h"
#include "mxnet/temporary_space.h"

namespace gluon_syncbn {
namespace {

// A function or table of libmxnet.
struct Symbol {
  Symbol() = default;
  Symbol(void* libmxnet, const char* name) : address(dlsym(libmxnet, name)) {
    Dl_info info;
    void* entry = nullptr;
    if (address == nullptr || dladdr1(address, &info, &entry, RTLD_DL_SYMENT) == 0 || entry == nullptr) {
      throw std::runtime_error(std::string("this MXNet has no ") + name);
    }
    size = static_cast<const ElfW(Sym)*>(entry)->st_size;
  }

  // Whether this address is in the function.
  bool contains(const void* place) const {
    return static_cast<size_t>(static_cast<const char*>(place) - static_cast<const char*>(address)) < size;
  }

  void* address = nullptr;
  size_t size = 0;
};

// What MXNet has.
struct {
  ResourceManager* (*manager)() = nullptr;  // of the thread that asks
  RequestResource request = nullptr;
  SeedAll seed_all = nullptr;
  SeedDevice seed_device = nullptr;
  Symbol attach_op_resources;
} mxnets;

ResourceManager* make_manager() {
  ResourceManager* made = nullptr;
  std::thread([&made] { made = mxnets.manager(); }).join();
  return made;
}

// What a thread has for a device.
struct OwnDevice {
  DeviceBuffers buffers;
  ResourceManager* generators = nullptr;  // the manager that has them, but for cpu(0)
};

// What threads have together.
struct Shared {
  Stock stock;
  OpenStep step;
  std::atomic<uint64_t> calls{0};

  std::mutex mutex;  // of what follows; locked before the stock
  std::map<int, KeptBuffers> kept;
  // Of threads that have ended. What they have pushed may still wait for other devices, so it stays with its device.
  std::map<int, std::vector<OwnDevice>> free;
  bool has_warned = false;
};

Shared& shared() {
  static auto* instance = new Shared;  // never destroyed: MXNet computes while the process ends, too
  return *instance;
}

// What a thread has of its own. When it ends, others get that.
class Own {
 public:
  // Null when the thread has ended and MXNet still computes on it, as it does on the main thread.
  static Own* get() {
    if (has_ended) return nullptr;
    thread_local Own own;
    return &own;
  }

  DeviceBuffers& buffers(int device) { return its(device).buffers; }

  // The manager that has the generators of cpu(1), cpu(2), ...
  ResourceManager* generators(int device) {
    ResourceManager*& found = its(device).generators;
    if (found == nullptr) seed_one(device, found = make_manager());
    return found;
  }

  void seed(uint32_t seed) {
    seed_ = seed;
    for (const auto& [device, its] : devices_) seed_one(device, its.generators);
  }

  uint64_t call = 0;  // the number of the call that the thread is in

 private:
  Own() = default;
  ~Own() {
    has_ended = true;
    Shared& all = shared();
    std::lock_guard<std::mutex> lock(all.mutex);
    for (auto& [device, its] : devices_) all.free[device].push_back(std::move(its));
  }

  OwnDevice& its(int device) {
    const auto [found, is_new] = devices_.try_emplace(device);
    if (is_new) {
      Shared& all = shared();
      std::lock_guard<std::mutex> lock(all.mutex);
      std::vector<OwnDevice>& free = all.free[device];
      if (!free.empty()) {
        found->second = std::move(free.back());
        free.pop_back();
        seed_one(device, found->second.generators);
      }
    }
    return found->second;
  }

  // Far from the seeds of other devices: MXNet takes a seed and the 1,023 numbers after it.
  void seed_one(int device, ResourceManager* generators) const {
    if (generators != nullptr) mxnets.seed_all(generators, seed_ + static_cast<uint32_t>(device) * 2654435769);
  }

  static thread_local bool has_ended;
  std::map<int, OwnDevice> devices_;
  uint32_t seed_ = 0;
};

thread_local bool Own::has_ended = false;

// Temporary space

void warn_once(int device) {
  Shared& all = shared();
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    if (std::exchange(all.has_warned, true)) return;
  }
  const size_t size = all.stock.size();
  warn_user("cpu(" + std::to_string(device) + ") needs more temporary buffers in a step than it can have of " +
            std::to_string(size) +
            ", so some operators wait for others. If devices wait until the timeout, set "
            "MXNET_CPU_TEMP_COPY=" +
            std::to_string(std::max<size_t>(1024, 2 * size)) +
            " before the program starts. If you update weights without a gluon.Trainer, use gluon_syncbn.guard_update. "
            "Shown once.");
}

std::optional<Resource> temporary_space(int device, bool is_for_graph) {
  Shared& all = shared();
  std::optional<Resource> found;
  bool is_crowded = false;
  if (is_for_graph) {
    std::lock_guard<std::mutex> lock(all.mutex);
    found = all.kept[device].next(all.stock);
  } else if (Own* own = Own::get()) {
    found = own->buffers(device).next(all.stock, all.step, own->call, is_crowded);
  } else {
    return std::nullopt;
  }
  if (!found || is_crowded) warn_once(device);
  return found;
}

// Random generators

// The manager that has the generators of a device; `thread` is that of this thread.
ResourceManager* generators_of(ResourceManager* thread, int device) {
  Own* own = Own::get();
  return device == 0 || own == nullptr ? thread : own->generators(device);
}

// The methods that replace MXNet's

__attribute__((noinline)) Resource request(ResourceManager* thread, DeviceContext device, const ResourceRequest& what) {
  const bool is_for_graph = mxnets.attach_op_resources.contains(__builtin_return_address(0));
  if (device.type != kCpu) return mxnets.request(thread, device, what);
  if (what.kind != ResourceRequest::kTemporarySpace) {
    return mxnets.request(generators_of(thread, device.id), device, what);
  }
  const std::optional<Resource> found = temporary_space(device.id, is_for_graph);
  return found ? *found : mxnets.request(thread, device, what);
}

void seed_all(ResourceManager* thread, uint32_t seed) {
  mxnets.seed_all(thread, seed);
  if (Own* own = Own::get()) own->seed(seed);
}

void seed_device(ResourceManager* thread, DeviceContext device, uint32_t seed) {
  mxnets.seed_device(device.type == kCpu ? generators_of(thread, device.id) : thread, device, seed);
}

// Replacing them

// The functions in the table of a class, which must be these.
void** table_of(void* libmxnet, const char* name, std::initializer_list<const char*> functions) {
  void** const table = static_cast<void**>(Symbol(libmxnet, name).address) + 2;  // two words come before them
  void** entry = table;
  for (const char* function : functions) {
    if (*entry++ != Symbol(libmxnet, function).address) {
      throw std::runtime_error(std::string("in this MXNet the table ") + name + " has no " + function);
    }
  }
  return table;
}

template <typename Function>
void replace(void** entry, Function ours, Function& mxnets_own) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(entry) / page * page;
  // The loader has made it read-only. It stays writable, since the page may have other data that are.
  if (mprotect(reinterpret_cast<void*>(begin), page, PROT_READ | PROT_WRITE) != 0) {
    throw std::runtime_error(std::string("MXNet's table cannot be written: ") + std::strerror(errno));
  }
  mxnets_own = reinterpret_cast<Function>(*entry);
  *entry = reinterpret_cast<void*>(ours);
}

void separate_cpu_devices(void* libmxnet, int num_buffers) {
  void** const methods =
      table_of(libmxnet, "_ZTVN5mxnet8resource19ResourceManagerImplE",
               {"_ZN5mxnet8resource19ResourceManagerImpl7RequestENS_7ContextERKNS_15ResourceRequestE",
                "_ZN5mxnet8resource19ResourceManagerImpl10SeedRandomEj",
                "_ZN5mxnet8resource19ResourceManagerImpl10SeedRandomENS_7ContextEj"});
  table_of(libmxnet, "_ZTVN5mxnet6engine11ThreadedVarE", {"_ZN5mxnet6engine11ThreadedVar7versionEv"});
  mxnets.attach_op_resources = {
      libmxnet,
      "_ZN5mxnet4exec17AttachOpResourcesERKN4nnvm5GraphERKSt6vectorISt10shared_ptrINS0_10OpExecutorEESaIS8_EEmm"};
  mxnets.manager =
      reinterpret_cast<ResourceManager* (*)()>(Symbol(libmxnet, "_ZN5mxnet15ResourceManager3GetEv").address);
  mxnets.request = reinterpret_cast<RequestResource>(methods[0]);

  // It hands its buffers out in turn.
  ResourceManager* const manager = make_manager();
  Shared& all = shared();
  for (int i = 1; i <= num_buffers; ++i) {
    const Resource buffer = mxnets.request(manager, {kCpu, 0}, {ResourceRequest::kTemporarySpace});
    if (buffer.id != i % num_buffers) throw std::runtime_error("this MXNet does not hand its buffers out in turn");
    all.stock.add(buffer);
  }
  all.free[1].push_back({{}, manager});

  replace(&methods[1], seed_all, mxnets.seed_all);
  replace(&methods[2], seed_device, mxnets.seed_device);
  replace(&methods[0], request, mxnets.request);
}

}  // namespace
}  // namespace gluon_syncbn

// What Python calls (base/library.py)

using namespace gluon_syncbn;

// Once, before there are nets; `num_buffers` is MXNET_CPU_TEMP_COPY. Returns why it cannot be, or null.
EXPORTED const char* gluon_syncbn_separate_cpu_devices(void* libmxnet, int num_buffers) {
  static std::string problem;
  try {
    separate_cpu_devices(libmxnet, num_buffers);
    return nullptr;
  } catch (const std::exception& error) {
    problem = error.what();
    return problem.c_str();
  }
}

// From now on operators wait for no pending operators of other calls, until `gluon_syncbn_close_step`.
EXPORTED void gluon_syncbn_open_step() { shared().step.open(); }

// All that was pushed can finish by itself.
EXPORTED void gluon_syncbn_close_step() { shared().step.close(); }

// This thread begins a call that may push many operators. Returns the one that it was in, for `gluon_syncbn_end_call`.
EXPORTED uint64_t gluon_syncbn_begin_call() {
  Own* own = Own::get();
  return own == nullptr ? 0 : std::exchange(own->call, ++shared().calls);
}

EXPORTED void gluon_syncbn_end_call(uint64_t before) {
  if (Own* own = Own::get()) own->call = before;
}

// A fork must not find the locks of other threads.
EXPORTED void gluon_syncbn_hold_cpu_resources(int hold) {
  Shared& all = shared();
  if (hold) {
    all.mutex.lock();
    all.stock.mutex.lock();
  } else {
    all.stock.mutex.unlock();
    all.mutex.unlock();
  }
}
