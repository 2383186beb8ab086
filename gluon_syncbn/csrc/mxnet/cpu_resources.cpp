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
// There is no lock here: before a fork MXNet waits for threads of its own that come by, one of which would wait for a
// lock of the thread that forks. What a thread of the parent has stays its own in the child, where that thread is not.
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
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
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

// What a thread has for a device. It is never destroyed: MXNet computes while the process ends, too.
struct OwnDevice {
  explicit OwnDevice(int id) : device(id), buffers(id), kept(id) {}

  const int device;
  DeviceBuffers buffers;
  KeptBuffers kept;
  ResourceManager* generators = nullptr;  // the manager that has them, but for cpu(0)

  std::atomic<bool> is_taken{true};  // by a thread
  OwnDevice* next = nullptr;         // in `all_devices`
};

Stock& stock = *new Stock;  // never destroyed either
Step current_step;
std::atomic<uint64_t> num_calls{0};
std::atomic<bool> has_warned{false};
std::atomic<OwnDevice*> all_devices{nullptr};

OwnDevice* add_device(int device) {
  auto* added = new OwnDevice(device);
  added->next = all_devices;
  while (!all_devices.compare_exchange_weak(added->next, added)) {
  }
  return added;
}

// What a thread has of its own. When it ends, others get that. Its operators may still wait for other devices, so it
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
      for (found = all_devices; found != nullptr; found = found->next) {
        if (found->device == device && !found->is_taken.exchange(true)) break;
      }
      if (found == nullptr) found = add_device(device);
      seed_one(*found);
    }
    return *found;
  }

  // The manager that has the generators of cpu(1), cpu(2), ...
  ResourceManager* generators(int device) {
    OwnDevice& its = at(device);
    if (its.generators == nullptr) {
      its.generators = make_manager();
      seed_one(its);
    }
    return its.generators;
  }

  void seed(uint32_t seed) {
    seed_ = seed;
    for (const auto& [device, its] : devices_) seed_one(*its);
  }

  // The innermost call that the thread is in.
  const Call& call() const { return calls_.back(); }

  // Returns how many calls the thread was in.
  size_t begin_call(const Call& call) {
    calls_.push_back(call);
    return calls_.size() - 1;
  }

  void end_calls_but(size_t num_left) { calls_.resize(std::clamp<size_t>(num_left, 1, calls_.size())); }

 private:
  Own() = default;
  ~Own() {
    has_ended = true;
    for (const auto& [device, its] : devices_) its->is_taken = false;
  }

  // Far from the seeds of other devices: MXNet takes a seed and the 1,023 numbers after it.
  void seed_one(const OwnDevice& its) const {
    if (its.generators == nullptr) return;
    mxnets.seed_all(its.generators, seed_ + static_cast<uint32_t>(its.device) * 2654435769);
  }

  static thread_local bool has_ended;
  std::map<int, OwnDevice*> devices_;
  std::vector<Call> calls_{Call{}};  // the first is none
  uint32_t seed_ = 0;
};

thread_local bool Own::has_ended = false;

// Temporary space

void warn_once(int device) {
  if (has_warned.exchange(true)) return;
  warn_user("cpu(" + std::to_string(device) + ") needs more temporary buffers in a step than it can have of " +
            std::to_string(stock.size()) +
            ", so some operators wait for others. If devices wait until the timeout, set "
            "MXNET_CPU_TEMP_COPY=" +
            std::to_string(std::max<size_t>(1024, 2 * stock.size())) +
            " before the program starts. If you update weights without a gluon.Trainer, use gluon_syncbn.guard_update. "
            "Shown once.");
}

std::optional<Resource> temporary_space(int device, bool is_for_graph) {
  Own* own = Own::get();
  if (own == nullptr) return std::nullopt;
  OwnDevice& its = own->at(device);
  const Step::Number step = current_step.number();
  bool is_crowded = false;
  const std::optional<Resource> found = is_for_graph ? its.kept.next(stock, step, own->call().graph, is_crowded)
                                                     : its.buffers.next(stock, step, own->call().number, is_crowded);
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
  for (int i = 1; i <= num_buffers; ++i) {
    const Resource buffer = mxnets.request(manager, {kCpu, 0}, {ResourceRequest::kTemporarySpace});
    if (buffer.id != i % num_buffers) throw std::runtime_error("this MXNet does not hand its buffers out in turn");
    stock.add(buffer);
  }
  OwnDevice* const first = add_device(1);
  first->generators = manager;
  first->is_taken = false;

  replace(&methods[1], seed_all, mxnets.seed_all);
  replace(&methods[2], seed_device, mxnets.seed_device);
  replace(&methods[0], request, mxnets.request);
}

}  // namespace
}  // namespace gluon_syncbn

// What Python calls (base/library.py)

using namespace gluon_syncbn;

// Before there are nets; `num_buffers` is MXNET_CPU_TEMP_COPY. Returns why it cannot be, or null. A second call does
// nothing.
EXPORTED const char* gluon_syncbn_separate_cpu_devices(void* libmxnet, int num_buffers) {
  static std::string problem;
  static bool is_done = false;
  try {
    if (!is_done) separate_cpu_devices(libmxnet, num_buffers);
    is_done = true;
    return nullptr;
  } catch (const std::exception& error) {
    problem = error.what();
    return problem.c_str();
  }
}

// From now on operators wait for no pending operators of other calls, until `gluon_syncbn_close_step`.
EXPORTED void gluon_syncbn_open_step() { current_step.open(); }

// All that was pushed can finish by itself.
EXPORTED void gluon_syncbn_close_step() { current_step.close(); }

// For a graph that Python makes, and drops when that is gone.
EXPORTED void* gluon_syncbn_new_graph() { return new std::shared_ptr<Graph>(std::make_shared<Graph>()); }

EXPORTED void gluon_syncbn_drop_graph(void* graph) {
  auto* const dropped = static_cast<std::shared_ptr<Graph>*>(graph);
  (*dropped)->is_gone = true;
  delete dropped;
}

// This thread begins a call that may push many operators: of a graph, on a CPU device (or -1); or a backward pass
// (null). Returns how many calls it was in, for `gluon_syncbn_end_call`.
EXPORTED uint64_t gluon_syncbn_begin_call(void* graph, int device) {
  Own* own = Own::get();
  if (own == nullptr) return 0;
  Call call{++num_calls, nullptr};
  if (graph != nullptr) {
    call.graph = *static_cast<std::shared_ptr<Graph>*>(graph);
    if (device >= 0) call.graph->call(device, current_step.number());
  }
  return own->begin_call(call);
}

EXPORTED void gluon_syncbn_end_call(uint64_t before) {
  if (Own* own = Own::get()) own->end_calls_but(before);
}
