// The memory beside activations that a call on a GPU needs: what blocks leave for each other, and a few numbers that
// GPU and host share. Lent for the time of a callback and lent again; nothing is allocated in a training step.
//
// `message` lies in pinned host memory, where kernels write and read it without a copy being asked for. Its first
// number is a ticket: the last block of a kernel leaves the one that it was given when all else is written, so a host
// thread sees that from memory, without the engine's help (wait). After it come up to 4C + 3 numbers.
//
// A scratch may be lent again while the kernels of the last holder have not all run: they name its arrays, so the
// engine runs those of the next holder after them; and a host thread only touches the numbers between its own ticket
// and its own next launch.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "mxnet/array.h"
#include "cuda/launch.h"

namespace gluon_syncbn {

// A handle that the caller frees (Array does). Throws MXNetFailure.
void* new_array(int device_type, int device, int dtype, int64_t size);

class Scratch {
 public:
  static std::shared_ptr<Scratch> lease(int device, const Launch& launch, const Layout& layout);

  // Only after success: what a failed call leaves behind is not used again.
  static void give_back(const std::shared_ptr<Scratch>& scratch);

  // Different for every launch of the process.
  static double next_ticket();

  // Waits until the kernel that was given `ticket` has left its numbers, and returns them. Throws MXNetFailure if it
  // failed.
  const double* wait(double ticket) const;

  // Leaves for the kernel that is launched next up to four vectors of C numbers, one after the other.
  void put(std::initializer_list<const std::vector<double>*> vectors) const;

  const Array partials, counters, message;

 private:
  struct Sizes {
    int device;
    int64_t partials, counters, message;
    bool operator<(const Sizes& other) const;
  };
  explicit Scratch(const Sizes& sizes);
  struct Pool;
  static Pool& pool();

  const Sizes sizes_;
  double* const numbers_;
};

}  // namespace gluon_syncbn
