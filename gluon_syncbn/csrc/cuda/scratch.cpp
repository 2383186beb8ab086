#include "cuda/scratch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>

namespace gluon_syncbn {
namespace {

// Waiting through the engine takes a hand-over to one of MXNet's CPU threads, which may have other work. Kernels of
// this length are worth watching for.
constexpr std::chrono::microseconds kWatch{500};

void* new_counters(int device, int64_t size) {
  void* array = new_array(kGpu, device, kInt32, size);
  const std::vector<int32_t> zeros(static_cast<size_t>(size), 0);
  check_mxnet(mxnet().array_copy_from_cpu(array, zeros.data(), zeros.size()), "zeros could not be copied to a GPU");
  return array;
}

// Sizes are rounded up, so that layers of about the same size share.
int64_t rounded(int64_t size) {
  int64_t power = 64;
  while (power < size) power *= 2;
  return power;
}

}  // namespace

void* new_array(int device_type, int device, int dtype, int64_t size) {
  if (size > std::numeric_limits<unsigned>::max()) throw MXNetFailure("there are too many channels for a GPU");
  const auto shape = static_cast<unsigned>(size);
  void* array = nullptr;
  check_mxnet(mxnet().array_create(&shape, 1, device_type, device, 0, dtype, &array), "memory could not be allocated");
  return array;
}

struct Scratch::Pool {
  std::mutex mutex;
  std::map<Sizes, std::vector<std::shared_ptr<Scratch>>> free;
};

Scratch::Pool& Scratch::pool() {
  static auto* pool = new Pool;  // never destroyed: CUDA may be gone when the process ends
  return *pool;
}

bool Scratch::Sizes::operator<(const Sizes& other) const {
  return std::tie(device, partials, counters, message) <
         std::tie(other.device, other.partials, other.counters, other.message);
}

Scratch::Scratch(const Sizes& sizes)
    : partials(new_array(kGpu, sizes.device, static_cast<int>(DType::kFloat64), sizes.partials)),
      counters(new_counters(sizes.device, sizes.counters)),
      message(new_array(kPinned, sizes.device, static_cast<int>(DType::kFloat64), sizes.message)),
      sizes_(sizes),
      numbers_(static_cast<double*>(message.data())) {
  numbers_[0] = 0;
}

std::shared_ptr<Scratch> Scratch::lease(int device, const Launch& launch, const Layout& layout) {
  const Sizes sizes{device, rounded(launch.partials(layout)), rounded(launch.counters()),
                    rounded(4 + 4 * layout.channels)};
  {
    Pool& all = pool();
    std::lock_guard<std::mutex> lock(all.mutex);
    std::vector<std::shared_ptr<Scratch>>& free = all.free[sizes];
    if (!free.empty()) {
      const std::shared_ptr<Scratch> found = free.back();
      free.pop_back();
      return found;
    }
  }
  return std::shared_ptr<Scratch>(new Scratch(sizes));
}

void Scratch::give_back(const std::shared_ptr<Scratch>& scratch) {
  Pool& all = pool();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.free[scratch->sizes_].push_back(scratch);
}

double Scratch::next_ticket() {
  static std::atomic<int64_t> last{0};
  return static_cast<double>(++last);
}

const double* Scratch::wait(double ticket) const {
  const auto arrived = [&] { return *static_cast<const volatile double*>(numbers_) == ticket; };
  const auto until = std::chrono::steady_clock::now() + kWatch;
  while (!arrived()) {
    if (std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
      continue;
    }
    check_mxnet(mxnet().array_wait(message.handle()), "a CUDA kernel failed");
    if (!arrived()) throw MXNetFailure("a CUDA kernel ended without a result");
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  return numbers_ + 1;
}

void Scratch::put(std::initializer_list<const std::vector<double>*> vectors) const {
  double* to = numbers_ + 1;
  for (const std::vector<double>* vector : vectors) to = std::copy(vector->begin(), vector->end(), to);
}

}  // namespace gluon_syncbn
