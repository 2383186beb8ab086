// Every pass over every dtype and layout, on buffers that end where the tensor ends, for AddressSanitizer and
// UndefinedBehaviorSanitizer; with 1 and 3 threads, whose results must have the same bits. And the same by several
// devices' threads at once, for ThreadSanitizer. Usage: exercise_kernels [devices]

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cpu/kernels.h"

using namespace gluon_syncbn;

namespace {

std::atomic<int> failures{0};

struct Buffer {
  Buffer(DType dtype, int64_t size) : bytes(static_cast<size_t>(size) * width(dtype)), data(new char[bytes]) {
    fill(dtype, data.get(), size, 0);
  }
  static size_t width(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }
  size_t bytes;
  std::unique_ptr<char[]> data;
};

// What follows the norm, and whether the backward passes go by the output.
struct Case {
  Activation activation;
  bool skip, in_place;
};

void exercise(DType dtype, const Layout& layout, const Case& what) {
  const int64_t size = layout.size();
  Buffer x(dtype, size), dy(dtype, size);
  for (int64_t i = 0; i < size; ++i) {
    const int64_t place = i * static_cast<int64_t>(Buffer::width(dtype));
    fill(dtype, x.data.get() + place, 1, std::sin(static_cast<double>(i)) * 3 + 1);
    fill(dtype, dy.data.get() + place, 1, std::cos(static_cast<double>(i)));
  }
  const size_t channels = static_cast<size_t>(layout.channels);
  Moments seen;
  std::vector<char> outputs, gradients, skip_gradients;
  for (const int threads : {1, 3}) {
    const Moments local = moments(dtype, x.data.get(), layout, threads);
    const Moments all = merge({local.pack(), local.pack()});
    const Affine affine = Affine::rounded(dtype, all.mean, std::vector<double>(channels, 0.7),
                                          std::vector<double>(channels, 0.1), what.activation);
    Buffer y(dtype, size), dx(dtype, size), d_skip(dtype, size);
    normalize(dtype, x.data.get(), what.skip ? dy.data.get() : nullptr, layout, affine, y.data.get(), threads);
    const BackwardInput input{what.in_place ? y.data.get() : x.data.get(), dy.data.get(),
                              what.skip ? y.data.get() : nullptr, what.in_place};
    GradientSums sums;
    for (const bool add : {false, true}) {
      sums = gradient_sums(dtype, input, layout, affine, what.skip ? d_skip.data.get() : nullptr, add, threads);
    }
    const InputGradient gradient{std::vector<double>(channels, 0.5), sums.dz, sums.dz_centred};
    for (const bool add : {false, true}) {
      input_gradient(dtype, input, layout, affine, gradient, dx.data.get(), add, threads);
    }
    const std::vector<char> skip_bytes(d_skip.data.get(), d_skip.data.get() + d_skip.bytes);
    const std::vector<char> y_bytes(y.data.get(), y.data.get() + y.bytes);
    const std::vector<char> dx_bytes(dx.data.get(), dx.data.get() + dx.bytes);
    if (threads == 1) {
      seen = local;
      outputs = y_bytes;
      gradients = dx_bytes;
      skip_gradients = skip_bytes;
    } else if (local.mean != seen.mean || local.m2 != seen.m2 || y_bytes != outputs || dx_bytes != gradients ||
               skip_bytes != skip_gradients) {
      std::printf("threads change the result of dtype %d, %lld x %lld x %lld\n", static_cast<int>(dtype),
                  static_cast<long long>(layout.outer), static_cast<long long>(layout.channels),
                  static_cast<long long>(layout.inner));
      failures += 1;
    }
  }
}

int exercise_all() {
  const Layout layouts[] = {{1, 1, 1},  {3, 5, 1},    {2, 300, 1},  {700, 129, 1}, {1, 3, 63},
                            {4, 3, 64}, {2, 3, 4097}, {2, 9, 1023}, {9, 1, 65},    {130, 17, 9}};
  int count = 0;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    for (const Layout& layout : layouts) {
      for (const Case& what :
           {Case{{}, false, false}, Case{{Activation::kReLU, 0}, false, false},
            Case{{Activation::kLeakyReLU, 0.1}, false, false}, Case{{Activation::kReLU, 0}, true, false},
            Case{{}, false, true}, Case{{Activation::kLeakyReLU, 0.1}, false, true}}) {
        exercise(dtype, layout, what);
        count += 1;
      }
    }
  }
  return count;
}

}  // namespace

int main(int count, char** arguments) {
  const int devices = count > 1 ? std::atoi(arguments[1]) : 1;
  std::vector<std::thread> threads;
  std::atomic<int> cases{0};
  for (int device = 0; device < devices; ++device) threads.emplace_back([&cases] { cases += exercise_all(); });
  for (std::thread& thread : threads) thread.join();
  std::printf("%s: %d cases, %d failures\n", instruction_set(), cases.load(), failures.load());
  return failures == 0 ? 0 : 1;
}
