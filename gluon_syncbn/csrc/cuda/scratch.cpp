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

#include "cuda/driver.h"
#include "numbers.h"

namespace gluon_syncbn {
namespace {

// A thread watches for the end of short kernels. After kWatch it sleeps between two looks, and may be late by kNap.
constexpr std::chrono::microseconds kWatch{2000}, kNap{50};

// Looks at memory for each question to the driver, which takes about as long as all of them.
constexpr int kLooks = 32;

constexpr int kNotReady = 600;        // CUDA_ERROR_NOT_READY
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING

// Allocates an array of MXNet's, whose pool frees unused memory when a GPU has none left. The caller frees the handle.
void* new_array(int device_type, int device, DType dtype, int64_t size) {
  if (size > std::numeric_limits<unsigned>::max()) throw MXNetFailure("there are too many channels for a GPU");
  const auto shape = static_cast<unsigned>(size);
  void* array = nullptr;
  check_mxnet(mxnet().array_create(&shape, 1, device_type, device, 0, static_cast<int>(dtype), &array),
              "memory could not be allocated");
  return array;
}

void* new_copy(int device, const std::vector<float>& numbers) {
  void* array = new_array(kGpu, device, DType::kFloat32, static_cast<int64_t>(numbers.size()));
  check_mxnet(mxnet().array_copy_from_cpu(array, numbers.data(), numbers.size()),
              "numbers could not be copied to a GPU");
  return array;
}

// Rounds sizes up, so that layers of about the same size share memory.
int64_t rounded(int64_t size) { return power_of_two_for(std::max<int64_t>(size, 64)); }

}  // namespace

struct Scratch::Pool {
  std::mutex mutex;
  std::map<Sizes, std::vector<Scratch*>> free;
  std::vector<Scratch*> stuck;  // waits for their kernels have timed out
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
    : sizes_(sizes),
      partials_(new_array(kGpu, sizes.device, DType::kFloat64, sizes.partials)),
      counters_(new_copy(sizes.device, std::vector<float>(static_cast<size_t>(sizes.counters)))),  // the bits of 0
      message_(new_array(kPinned, sizes.device, DType::kFloat64, sizes.message)),
      numbers_(static_cast<double*>(message_.data())) {
  check_cuda(cuda().create_stream(&stream_, kNonBlocking), "a stream could not be created");
}

std::shared_ptr<Scratch> Scratch::lease(int device, const Layout& layout, const Launch& launch) {
  const Sizes sizes{device, rounded(launch.partials()), rounded(launch.counters()), rounded(3 + 4 * layout.channels)};
  Scratch* found = nullptr;
  {
    Pool& all = pool();
    std::lock_guard<std::mutex> lock(all.mutex);
    for (; !all.stuck.empty(); all.stuck.pop_back()) {
      Scratch* const before = all.stuck.back();
      if (!before->has_ended()) throw CudaFailure(before->running_ + " of an earlier call still runs");
    }
    std::vector<Scratch*>& free = all.free[sizes];
    if (!free.empty()) {
      found = free.back();
      free.pop_back();
    }
  }
  return {found ? found : new Scratch(sizes), give_back};
}

void Scratch::give_back(Scratch* scratch) {
  constexpr double kSeconds = 1;  // a kernel that has left its numbers soon ends
  if (scratch->is_lost_) return;
  try {
    if (!scratch->running_.empty()) scratch->wait(kSeconds);
  } catch (const std::exception&) {
    return;
  }
  Pool& all = pool();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.free[scratch->sizes_].push_back(scratch);
}

BlockMemory Scratch::memory() const { return {partials_.data(), static_cast<int*>(counters_.data()), numbers_}; }

void Scratch::launch(const GpuProgram& program, Kernel kernel, const Launch& launch, const void* arguments,
                     int64_t told) {
  running_ = std::string("CUDA kernel ") + GpuProgram::name(kernel);
  told_ = told;
  std::fill_n(reinterpret_cast<uint64_t*>(numbers_), told, kNotThere);
  program.launch(kernel, launch, arguments, stream_);
}

void Scratch::fill_nan(void* values, size_t bytes) {
  running_ = "filling with NaN";
  // A number whose bits are all set is a NaN in every type.
  check_cuda(cuda().fill_bytes(reinterpret_cast<unsigned long long>(values), 0xff, bytes, stream_), running_);
}

template <typename IsDone>
void Scratch::poll(double timeout_seconds, const IsDone& is_done) {
  const auto began = std::chrono::steady_clock::now();
  while (!is_done()) {
    const auto waited = std::chrono::steady_clock::now() - began;
    if (std::chrono::duration<double>(waited).count() > timeout_seconds) {
      is_lost_ = true;
      std::lock_guard<std::mutex> lock(pool().mutex);
      pool().stuck.push_back(this);
      throw CudaFailure(running_ + " has not ended within " + text_of(timeout_seconds, std::defaultfloat, 6) + " s");
    }
    waited < kWatch ? std::this_thread::yield() : std::this_thread::sleep_for(kNap);
  }
}

bool Scratch::has_ended() {
  const int code = cuda().query_stream(stream_);
  if (code == kNotReady) return false;
  is_lost_ = is_lost_ || code != 0;
  check_cuda(code, running_ + " failed");
  return true;
}

const double* Scratch::wait_for_message(double timeout_seconds) {
  const auto* const bits = reinterpret_cast<const volatile uint64_t*>(numbers_);
  int64_t there = 0;
  const auto all_are_there = [&] {
    while (there < told_ && bits[there] != kNotThere) ++there;
    return there == told_;
  };
  int looks = 0;
  poll(timeout_seconds, [&] {
    if (all_are_there()) return true;
    if (++looks % kLooks != 0 || !has_ended()) return false;
    is_lost_ = !all_are_there();
    if (is_lost_) throw CudaFailure(running_ + " ended without a result");
    return true;
  });
  std::atomic_thread_fence(std::memory_order_acquire);
  return numbers_;
}

void Scratch::wait(double timeout_seconds) {
  poll(timeout_seconds, [&] { return has_ended(); });
  running_.clear();
}

void Scratch::put(std::initializer_list<const std::vector<double>*> vectors) const {
  double* to = numbers_;
  for (const std::vector<double>* vector : vectors) to = std::copy(vector->begin(), vector->end(), to);
}

const double* find_moments(const GpuProgram& program, const Launch& launch, const Layout& layout, const void* x,
                           const void* running_mean, const void* running_var, Scratch& scratch,
                           double timeout_seconds) {
  const MomentsArguments arguments{launch.shape, x, running_mean, running_var, scratch.memory()};
  scratch.launch(program, Kernel::kMoments, launch, &arguments, (running_mean ? 4 : 2) * layout.channels);
  return scratch.wait_for_message(timeout_seconds);
}

void check_gpu(int device) {
  // MXNet comes first: the error of an MXNet that was built without CUDA says so.
  const Array x(new_copy(device, {1, 2, 3, 6}));
  const Layout layout{1, 1, 4};
  const GpuProgram& program = GpuProgram::of({DType::kFloat32, Activation::kNone, false, false}, device);
  const GpuContext context(device);
  const Launch launch = launch_for(DType::kFloat32, layout, {x.data()}, program.multiprocessors());
  const auto scratch = Scratch::lease(device, layout, launch);
  constexpr double kSeconds = 60;
  const double* numbers = find_moments(program, launch, layout, x.data(), nullptr, nullptr, *scratch, kSeconds);
  if (numbers[0] != 3 || numbers[1] != 14) {
    throw CudaFailure("the moments of 1, 2, 3, 6 came out as " + std::to_string(numbers[0]) + " and " +
                      std::to_string(numbers[1]) + ", not 3 and 14");
  }
  scratch->wait(kSeconds);  // x is freed now
}

}  // namespace gluon_syncbn
