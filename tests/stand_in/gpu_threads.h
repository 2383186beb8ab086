// Runs CUDA C++ kernels on a CPU: as much of CUDA as kernels.cu uses. Included in front of it.
//
// The threads of a block are fibers of one thread of the process. Each runs until it reaches a __syncthreads or ends;
// then the next runs. Blocks run one after the other. Both orders are drawn anew each time, so that a kernel that lacks
// a
// __syncthreads, or relies on an order of blocks, gives wrong numbers sooner or later. A barrier that some threads of a
// block pass while others have ended is an error, as on a GPU. This cannot find a missing __threadfence or blocks that
// wait for each other, and says nothing of speed.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __shared__ static thread_local
#define __launch_bounds__(threads, blocks)

struct uint3_ {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline thread_local uint3_ threadIdx, blockIdx, blockDim, gridDim;

using std::sqrt;

inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline void __threadfence() {}
inline int atomicAdd(int* place, int value) { return __atomic_fetch_add(place, value, __ATOMIC_SEQ_CST); }

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &value, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline long long __double_as_longlong(double value) { return bits_as<long long>(value); }
inline int __double2loint(double value) { return static_cast<int>(bits_as<unsigned long>(value)); }
inline int __double2hiint(double value) { return static_cast<int>(bits_as<unsigned long>(value) >> 32); }
inline double __hiloint2double(int high, int low) {
  return bits_as<double>(static_cast<unsigned long>(high) << 32 | static_cast<unsigned>(low));
}

inline float half_to_float(unsigned short bits) { return static_cast<float>(bits_as<_Float16>(bits)); }
inline unsigned short float_to_half(float value) { return bits_as<unsigned short>(static_cast<_Float16>(value)); }

inline uint4 load_pack(const void* from) { return *static_cast<const uint4*>(from); }
inline void store_pack(void* to, const uint4& bits) { *static_cast<uint4*>(to) = bits; }

class Fibers {
 public:
  static Fibers& get() {
    static thread_local Fibers block;
    return block;
  }

  void run(const std::function<void()>& kernel, std::mt19937& random) {
    kernel_ = &kernel;
    const size_t size = blockDim.x;
    while (fibers_.size() < size) fibers_.emplace_back();
    for (size_t i = 0; i < size; ++i) fibers_[i].state = kNew;
    std::vector<size_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    size_t ended = 0;
    while (ended < size) {
      std::shuffle(order.begin(), order.end(), random);
      for (const size_t i : order) resume(i);
      const size_t before = ended;
      ended = 0;
      for (size_t i = 0; i < size; ++i) ended += fibers_[i].state == kEnded;
      if (before != 0 || (ended != 0 && ended != size)) {
        std::fprintf(stderr, "gpu_threads: %zu of %zu threads of a block ended while others wait\n", ended, size);
        std::abort();
      }
    }
  }

  void wait() {  // on a fiber
    Fiber& self = fibers_[current_];
    if (_setjmp(self.place) == 0) _longjmp(scheduler_, 1);
  }

 private:
  enum State { kNew, kRunning, kEnded };
  static constexpr size_t kStack = 64 << 10;

  struct Fiber {
    Fiber() : stack(kStack) {}
    State state = kNew;
    std::vector<char> stack;
    ucontext_t start;
    jmp_buf place;
  };

  void resume(size_t i) {
    current_ = i;
    threadIdx = {static_cast<unsigned>(i), 0, 0};
    if (_setjmp(scheduler_) != 0) return;  // back from the fiber
    Fiber& fiber = fibers_[i];
    if (fiber.state == kRunning) _longjmp(fiber.place, 1);
    fiber.state = kRunning;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = fiber.stack.size();
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, &Fibers::body, 0);
    setcontext(&fiber.start);
  }

  static void body() {
    Fibers& block = get();
    (*block.kernel_)();
    block.fibers_[block.current_].state = kEnded;
    _longjmp(block.scheduler_, 1);
  }

  const std::function<void()>* kernel_ = nullptr;
  std::vector<Fiber> fibers_;
  size_t current_ = 0;
  jmp_buf scheduler_;
};

inline void __syncthreads() { Fibers::get().wait(); }

// Stricter than a GPU: all threads of the block must call it, not only the warp's, and wait for each other.
template <typename T>
T from_thread(T value, int apart) {
  static thread_local T all[2][1024];
  static thread_local unsigned turns[1024];
  const unsigned me = threadIdx.x;
  T* const shared = all[turns[me]++ % 2];  // the other threads have read this array before their next turn
  shared[me] = value;
  __syncthreads();
  return shared[me ^ static_cast<unsigned>(apart)];
}

// Runs a kernel on a grid, as cuLaunchKernel would.
inline void launch_grid(const std::function<void()>& kernel, const unsigned* blocks) {
  static thread_local std::mt19937 random(12345);
  gridDim = {blocks[0], blocks[1], 1};
  blockDim = {blocks[2], 1, 1};
  std::vector<size_t> order(static_cast<size_t>(blocks[0]) * blocks[1]);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const size_t number : order) {
    blockIdx = {static_cast<unsigned>(number % blocks[0]), static_cast<unsigned>(number / blocks[0]), 0};
    Fibers::get().run(kernel, random);
  }
}
