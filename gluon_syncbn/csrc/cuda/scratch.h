// What a call on a GPU needs beside its arrays: a stream to launch on, memory in which blocks leave numbers for each
// other, and a few numbers that GPU and host share. Lent for the time of a callback; nothing is allocated in a training
// step.
//
// `message` lies in pinned host memory, where kernels write and read it without a copy being asked for. Before a kernel
// that leaves numbers there, the host fills their places with bits that no arithmetic makes (kNotThere); each number
// that comes overwrites those, so a host thread sees from memory alone when all are there, in whatever order they come.
//
// Why nothing else is waited for: MXNet calls a custom operator when its inputs have been computed, since each of its
// operators on a GPU synchronizes its stream before it is complete; and nobody reads or overwrites inputs or outputs
// before the callback returns. So kernels may be launched at once, on a stream that does not wait for MXNet's, if the
// callback returns only when they have ended. The holder sees to that (`wait`).
//
// What ends a wait: all numbers are there, or the kernel has ended; CUDA reports an error; or the timeout. After the
// last two the scratch is never lent or freed again, because its kernel may still run and write there. It may write to
// arrays of MXNet's, too, so after a timeout no GPU's kernels are launched until it has ended. A scratch that is given
// back after a message alone, since the pass has failed, waits for its kernel first: the arrays can then be filled with
// NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "cuda/program.h"
#include "mxnet/array.h"

namespace gluon_syncbn {

class Scratch {
 public:
  // For kernels that are launched in this way; given back when the last pointer goes. The thread must be in the
  // device's context, here and below.
  static std::shared_ptr<Scratch> lease(int device, const Layout& layout, const Launch& launch = {});

  BlockMemory memory() const;

  // Both return before it has ended. `arguments` is the kernel's struct, and `told` how many numbers it leaves in the
  // message.
  void launch(const GpuProgram& program, Kernel kernel, const Launch& launch, const void* arguments, int64_t told = 0);
  void fill_nan(void* values, size_t bytes);

  // Waits until the kernel that was launched last has left its numbers, and returns them: the next one may be launched,
  // and they stay until it is. Throws CudaFailure if it has failed, or has not ended in time.
  const double* wait_for_message(double timeout_seconds);

  // Waits until what was launched last has ended.
  void wait(double timeout_seconds);

  // Leaves vectors for the kernel that is launched next, one after the other.
  void put(std::initializer_list<const std::vector<double>*> vectors) const;

 private:
  struct Sizes {
    int device;
    int64_t partials, counters, message;
    bool operator<(const Sizes& other) const;
  };
  explicit Scratch(const Sizes& sizes);
  struct Pool;
  static Pool& pool();
  static void give_back(Scratch* scratch);
  bool has_ended();
  template <typename IsDone>
  void poll(double timeout_seconds, const IsDone& is_done);

  const Sizes sizes_;
  const Array partials_, counters_, message_;
  double* const numbers_;
  int64_t told_ = 0;
  void* stream_ = nullptr;
  std::string running_;   // what was launched, and has not been seen to end
  bool is_lost_ = false;  // nobody knows when that will be
};

// Launches the moments of x and waits for them: mean[C] and M2[C], and if they are there the running mean[C] and
// variance[C].
const double* find_moments(const GpuProgram& program, const Launch& launch, const Layout& layout, const void* x,
                           const void* running_mean, const void* running_var, Scratch& scratch, double timeout_seconds);

// Runs a kernel on numbers whose moments are known. Throws CudaFailure or MXNetFailure if it cannot, or gives others.
void check_gpu(int device);

}  // namespace gluon_syncbn
