// Runs every pass over every dtype and layout, with 1 and 3 threads, on memory that ends where the tensor ends, under
// AddressSanitizer and UndefinedBehaviorSanitizer; and on threads of several devices at once, under ThreadSanitizer.
// Usage: exercise_kernels [devices]

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/float16.h"
#include "cpu/kernels.h"

using namespace gluon_syncbn;

namespace {

std::vector<char> tensor(DType dtype, int64_t size, double (*value)(double)) {
  std::vector<char> made(static_cast<size_t>(size * bytes_of(dtype)));
  for (int64_t i = 0; i < size; ++i) {
    const double wide = value(static_cast<double>(i));
    const float narrow = static_cast<float>(wide);
    const uint16_t half = dtype == DType::kFloat16 ? float_to_half(narrow) : float_to_bfloat16(narrow);
    const bool is_wide = dtype == DType::kFloat64, is_half = bytes_of(dtype) == 2;
    const void* stored = &narrow;
    if (is_wide) stored = &wide;
    if (is_half) stored = &half;
    std::memcpy(made.data() + i * bytes_of(dtype), stored, static_cast<size_t>(bytes_of(dtype)));
  }
  return made;
}

// The operations after the norm, and whether the backward passes read the output.
struct Case {
  Activation activation;
  bool skip, in_place;
};

void exercise(DType dtype, const Layout& layout, const Case& what, int threads) {
  const std::vector<char> x = tensor(dtype, layout.size(), std::sin), dy = tensor(dtype, layout.size(), std::cos);
  std::vector<char> y(x.size()), dx(x.size()), d_skip(x.size());
  const std::vector<double> ones(static_cast<size_t>(layout.channels), 1.0);
  const Moments all = merge({moments(dtype, x.data(), layout, threads).pack()});
  const Affine affine = Affine::rounded(dtype, all.mean, ones, ones, what.activation);
  normalize(dtype, x.data(), what.skip ? dy.data() : nullptr, layout, affine, y.data(), threads);
  const BackwardInput input{what.in_place ? y.data() : x.data(), dy.data(), what.skip ? y.data() : nullptr,
                            what.in_place};
  for (const bool add : {false, true}) {
    const GradientSums sums =
        gradient_sums(dtype, input, layout, affine, what.skip ? d_skip.data() : nullptr, add, threads);
    input_gradient(dtype, input, layout, affine, {sums.dz, sums.dz_centred}, dx.data(), add, threads);
  }
}

int exercise_all() {
  const Layout layouts[] = {{1, 1, 1},  {3, 5, 1},    {2, 300, 1},  {700, 129, 1}, {1, 3, 63},
                            {4, 3, 64}, {2, 3, 4097}, {2, 9, 1023}, {9, 1, 65},    {130, 17, 9}};
  const Activation relu{Activation::kReLU, 0}, leaky{Activation::kLeakyReLU, 0.1};
  const Case cases[] = {{{}, false, false},  {relu, false, false}, {leaky, false, false},
                        {relu, true, false}, {{}, false, true},    {leaky, false, true}};
  int count = 0;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    for (const Layout& layout : layouts) {
      for (const Case& what : cases) {
        for (const int threads : {1, 3}) exercise(dtype, layout, what, threads);
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
  std::printf("%s: %d cases\n", instruction_set(), cases.load());
}
