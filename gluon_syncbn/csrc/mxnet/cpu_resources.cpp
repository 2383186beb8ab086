// Gives each CPU device temporary space and random generators of its own, as MXNet gives each GPU.
//
// In MXNet all CPU devices of a thread ask one ResourceManager for both, and so wait for each other; temporary_space.h
// says why that is a deadlock. MXNet has no setting for it. So functions of this file replace three methods of the
// manager in the table of its class, once, for all threads of the process:
//
//   Request     A CPU device that asks for temporary space gets a buffer of its own. AttachOpResources asks for the
//               operators of a graph, which keeps the buffer; every other function asks for one operator. The return
//               address tells them apart. A CPU device that asks for a random generator gets its own. The generator of
//               cpu(0) is MXNet's, so a seed gives the same numbers there as without this package.
//   SeedRandom  of all devices, and of one device: seeds the generators of cpu(1), cpu(2), ... too.
//
// Buffers and generators come from managers that MXNet makes: it makes one for each thread that asks. So a thread that
// lives for a moment gets one more manager. The first has the buffers of the process, MXNET_CPU_TEMP_COPY of them; and
// each has generators, for one device of one thread. A thread that ends leaves its devices to later threads.
//
// There is no lock here: before a fork MXNet waits for threads of its own that come by, one of which would wait for a
// lock of the thread that forks. The devices of a thread stay its own in the child, where that thread is not.
//
// MXNet is retired, so the internals on which this file relies do not change any more. Every function is looked up by
// its mangled name, which has its signature, and must stand in its table where it is expected. Otherwise nothing is
// replaced, and Python says why.

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
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "exported.h"
#include "mxnet/c_api.h"
#include "mxnet/python.h"
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

// The resources of a thread on a device.
struct OwnDevice {
  explicit OwnDevice(int id) : device(id), buffers(id), kept(id) {}

  const int device;
  DeviceBuffers buffers;
  KeptBuffers kept;
  ResourceManager* generators = nullptr;  // the manager that has them, but for cpu(0)

  std::atomic<bool> is_taken{true};  // by a thread
  OwnDevice* next = nullptr;         // in `devices`
};

// Never destroyed, nor are the devices: MXNet computes while the process ends, too.
struct Resources {
  // MXNet's functions.
  ResourceManager* (*manager)() = nullptr;  // of the thread that asks
  RequestResource request = nullptr;
  SeedAll seed_all = nullptr;
  SeedDevice seed_device = nullptr;
  Symbol attach_op_resources;

  Stock stock;
  StepClock steps;
  std::atomic<uint64_t> num_calls{0};
  std::atomic<bool> has_warned{false};
  std::atomic<OwnDevice*> devices{nullptr};

  ResourceManager* make_manager() const {
    ResourceManager* made = nullptr;
    std::thread([&] { made = manager(); }).join();
    return made;
  }

  OwnDevice* add_device(int device) {
    auto* added = new OwnDevice(device);
    added->next = devices;
    while (!devices.compare_exchange_weak(added->next, added)) {
    }
    return added;
  }

  OwnDevice* take_device(int device) {
    for (OwnDevice* found = devices; found != nullptr; found = found->next) {
      if (found->device == device && !found->is_taken.exchange(true)) return found;
    }
    return add_device(device);
  }
};
Resources& all = *new Resources;

// A call of a graph, or a backward pass (with no graph), that is under way.
struct CallUnderWay {
  uint64_t number = 0;
  std::shared_ptr<BufferOwner> graph;
};

// The devices of a thread. When it ends, others get them. Its operators may still wait for other devices, so a buffer
// stays with its device.
class Own {
 public:
  // Null when the thread has ended and MXNet still computes on it, as it does on the main thread.
  static Own* get() {
    if (has_ended) return nullptr;
    thread_local Own own;
    return &own;
  }

  OwnDevice& at(int device) {
    OwnDevice*& found = devices_[device];
    if (found == nullptr) {
      found = all.take_device(device);
      seed_one(*found);
    }
    return *found;
  }

  // The manager that has the generators of cpu(1), cpu(2), ...
  ResourceManager* generators(int device) {
    OwnDevice& its = at(device);
    if (its.generators == nullptr) {
      its.generators = all.make_manager();
      seed_one(its);
    }
    return its.generators;
  }

  void seed(uint32_t seed) {
    seed_ = seed;
    for (const auto& [device, its] : devices_) seed_one(*its);
  }

  std::vector<CallUnderWay> calls{CallUnderWay{}};  // the innermost is the last; the first is none

 private:
  Own() = default;
  ~Own() {
    has_ended = true;
    for (const auto& [device, its] : devices_) its->is_taken = false;
  }

  // Far from the seeds of other devices: MXNet takes a seed and the 1,023 numbers after it.
  void seed_one(const OwnDevice& its) const {
    if (its.generators == nullptr) return;
    all.seed_all(its.generators, seed_ + static_cast<uint32_t>(its.device) * 2654435769);
  }

  static thread_local bool has_ended;
  std::map<int, OwnDevice*> devices_;
  uint32_t seed_ = 0;
};

thread_local bool Own::has_ended = false;

void warn_once(int device) {
  if (all.has_warned.exchange(true)) return;
  warn_user("cpu(" + std::to_string(device) + ") needs more temporary buffers in a step than it can have of " +
            std::to_string(all.stock.size()) +
            ", so some operators wait for others. If devices wait until the timeout, set "
            "MXNET_CPU_TEMP_COPY=" +
            std::to_string(std::max<size_t>(1024, 2 * all.stock.size())) +
            " before the program starts. If you update weights without a gluon.Trainer, use gluon_syncbn.guard_update. "
            "Shown once.");
}

std::optional<Resource> temporary_space(int device, bool is_for_graph) {
  Own* own = Own::get();
  if (own == nullptr) return std::nullopt;
  OwnDevice& its = own->at(device);
  const CallUnderWay& call = own->calls.back();
  const StepClock::Number step = all.steps.number();
  bool is_crowded = false;
  const std::optional<Resource> found = is_for_graph ? its.kept.next(all.stock, step, call.graph, is_crowded)
                                                     : its.buffers.next(all.stock, step, call.number, is_crowded);
  if (!found || is_crowded) warn_once(device);
  return found;
}

// The manager that has the generators of a device; `thread` is the manager of this thread.
ResourceManager* generators_of(ResourceManager* thread, int device) {
  Own* own = Own::get();
  return device == 0 || own == nullptr ? thread : own->generators(device);
}

// The functions that replace MXNet's methods

__attribute__((noinline)) Resource request(ResourceManager* thread, DeviceContext device,
                                           const ResourceRequest& wanted) {
  const bool is_for_graph = all.attach_op_resources.contains(__builtin_return_address(0));
  if (device.type != kCpu) return all.request(thread, device, wanted);
  if (wanted.kind != ResourceRequest::kTemporarySpace) {
    return all.request(generators_of(thread, device.id), device, wanted);
  }
  const std::optional<Resource> found = temporary_space(device.id, is_for_graph);
  return found ? *found : all.request(thread, device, wanted);
}

void seed_all(ResourceManager* thread, uint32_t seed) {
  all.seed_all(thread, seed);
  if (Own* own = Own::get()) own->seed(seed);
}

void seed_device(ResourceManager* thread, DeviceContext device, uint32_t seed) {
  all.seed_device(device.type == kCpu ? generators_of(thread, device.id) : thread, device, seed);
}

// The table of a class, which must begin with these functions.
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
  // The loader has made it read-only. It stays writable, since the page may have other data that must be.
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
  all.attach_op_resources = {
      libmxnet,
      "_ZN5mxnet4exec17AttachOpResourcesERKN4nnvm5GraphERKSt6vectorISt10shared_ptrINS0_10OpExecutorEESaIS8_EEmm"};
  all.manager = reinterpret_cast<ResourceManager* (*)()>(Symbol(libmxnet, "_ZN5mxnet15ResourceManager3GetEv").address);
  all.request = reinterpret_cast<RequestResource>(methods[0]);

  // It hands its buffers out in turn.
  ResourceManager* const manager = all.make_manager();
  for (int i = 1; i <= num_buffers; ++i) {
    const Resource buffer = all.request(manager, {kCpu, 0}, {ResourceRequest::kTemporarySpace});
    if (buffer.id != i % num_buffers) throw std::runtime_error("this MXNet does not hand its buffers out in turn");
    all.stock.add(buffer);
  }
  OwnDevice* const first = all.add_device(1);
  first->generators = manager;
  first->is_taken = false;

  replace(&methods[1], seed_all, all.seed_all);
  replace(&methods[2], seed_device, all.seed_device);
  replace(&methods[0], request, all.request);
}

}  // namespace
}  // namespace gluon_syncbn

using namespace gluon_syncbn;

// Before there are nets; a later call changes nothing. `num_buffers` is MXNET_CPU_TEMP_COPY. Returns why it cannot be,
// or an empty text.
EXPORTED const char* gluon_syncbn_separate_cpu_devices(void* libmxnet, int num_buffers) {
  static const std::string problem = error_of([&] { separate_cpu_devices(libmxnet, num_buffers); });
  return problem.c_str();
}

// From now on operators wait for no pending operators of other calls, until `gluon_syncbn_close_step`.
EXPORTED void gluon_syncbn_open_step() { all.steps.open(); }

// All operators that were pushed can finish by themselves.
EXPORTED void gluon_syncbn_close_step() { all.steps.close(); }

// Python makes one for each graph, and drops it when the graph is gone.
EXPORTED void* gluon_syncbn_new_graph() { return new std::shared_ptr<BufferOwner>(std::make_shared<BufferOwner>()); }

EXPORTED void gluon_syncbn_drop_graph(void* graph) {
  auto* const dropped = static_cast<std::shared_ptr<BufferOwner>*>(graph);
  (*dropped)->is_gone = true;
  delete dropped;
}

// This thread begins a call that may push many operators: of a graph, on a CPU device (or -1); or a backward pass
// (null). Returns how many calls it was in, for `gluon_syncbn_end_call`.
EXPORTED uint64_t gluon_syncbn_begin_call(void* graph, int device) {
  Own* own = Own::get();
  if (own == nullptr) return 0;
  CallUnderWay call{++all.num_calls, nullptr};
  if (graph != nullptr) {
    call.graph = *static_cast<std::shared_ptr<BufferOwner>*>(graph);
    if (device >= 0) call.graph->call(device, all.steps.number());
  }
  own->calls.push_back(std::move(call));
  return own->calls.size() - 1;
}

EXPORTED void gluon_syncbn_end_call(uint64_t before) {
  if (Own* own = Own::get()) own->calls.resize(std::clamp<size_t>(before, 1, own->calls.size()));
}
