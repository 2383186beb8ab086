// Chooses how many threads a kernel of kernels.cu gets, and how they lie over a tensor, from the shape and the
// addresses alone: the tests need no GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor.h"

namespace gluon_syncbn {

// The structs of the kernels' arguments. Their pointers are addresses that the GPU can reach.
using int64 = int64_t;
using value_t = void;
using real_t = void;
#include "cuda/kernels/arguments.h"

struct Launch {
  bool rows;              // whether the kernels for rows are launched, or the kernels for columns
  Shape shape;            // of columns; more threads of a block than width times rows only help to add up
  unsigned threads;       // in a block
  unsigned tiles, parts;  // blocks: `parts` of them share a tile

  // How many numbers and int32 counters the blocks leave for each other.
  int64_t partials() const {
    const int64_t lines = (int64_t{parts} * shape.tile + kLeftTogether - 1) / kLeftTogether;
    return parts > 1 ? lines * kLeftTogether * 3 * tiles : 0;
  }
  int64_t counters() const { return parts > 1 ? tiles : 0; }
};

// The smallest power of two that is not smaller than `size`.
int64_t power_of_two_for(int64_t size);

// Chooses the launch for activations of `dtype` at these addresses. Throws std::invalid_argument if CUDA or the kernels
// cannot count the channels, the images, or the values of a channel in an image: from 2^31 on.
Launch launch_for(DType dtype, const Layout& layout, const std::vector<const void*>& addresses,
                  int64_t multiprocessors);

}  // namespace gluon_syncbn
