// The resources of one call on a GPU beside its arrays: a stream, memory in which blocks leave numbers for each other,
// and `message`, numbers that the GPU and the host share. A call leases them, so a training step allocates nothing.
//
// `message` lies in pinned host memory, which kernels read and write directly. The host first fills the places of a
// kernel's numbers with bits that no arithmetic makes (kNotThere). Each number overwrites these bits, in any order, so
// a host thread sees in memory alone when all numbers are there.
//
// A call waits for nothing else. MXNet calls a custom operator when its inputs have been computed, since each of
// MXNet's operators on a GPU synchronizes its stream before it is complete, and nobody reads or overwrites inputs or
// outputs before the callback returns. So a callback launches its kernels at once, on a stream that does not wait for
// MXNet's streams, and returns only when they have ended (`wait`).
//
// A wait ends when all numbers are there or the kernel has ended, with an error of CUDA, or with the timeout. After an
// error or a timeout nobody leases or frees the scratch again, because its kernel may still run and write there. After
// a timeout the kernel may also write to arrays of MXNet's, so no GPU launches another until it has ended. A pass that
// fails between a message and the end of its kernel still waits for that end, so that it can fill the arrays with NaN.
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
  // Leases a scratch for kernels of this launch, until the last pointer goes. The thread must be in the device's
  // context, here and below.
  static std::shared_ptr<Scratch> lease(int device, const Layout& layout, const Launch& launch = {});

  BlockMemory memory() const;

  // Both return before the GPU has ended. `arguments` is the kernel's struct, and `told` the count of numbers that the
  // kernel leaves in the message.
  void launch(const GpuProgram& program, Kernel kernel, const Launch& launch, const void* arguments, int64_t told = 0);
  void fill_nan(void* values, size_t bytes);

  // Waits until the last kernel has left its numbers, and returns them. They stay until the next launch or `put`.
  // Throws CudaFailure if the kernel has failed or has not ended in time.
  const double* wait_for_message(double timeout_seconds);

  // Waits until the last kernel or filling has ended. Throws as above.
  void wait(double timeout_seconds);

  // Leaves vectors in the message for the next kernel, one after the other.
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
  std::string running_;   // the last kernel or filling, if it may still run
  bool is_lost_ = false;  // it has failed, or has not ended in time
};

// Computes the moments of x, and waits for mean[C] and M2[C]. If they are not null, the running mean[C] and variance[C]
// follow.
const double* find_moments(const GpuProgram& program, const Launch& launch, const Layout& layout, const void* x,
                           const void* running_mean, const void* running_var, Scratch& scratch, double timeout_seconds);

// Runs a kernel on numbers whose moments are known. Throws CudaFailure or MXNetFailure if it fails or gives others.
void check_gpu(int device);

}  // namespace gluon_syncbn
