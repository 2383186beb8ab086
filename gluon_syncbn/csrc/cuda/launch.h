// How many threads a kernel of kernels.cu is given, and how they lie over a tensor. Plain functions of the shape and
// the addresses: no GPU is needed to test them.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor.h"

namespace gluon_syncbn {

struct Launch {
  bool rows;     // whether the kernels are those for rows or those for columns
  bool aligned;  // whether packs of 16 bytes may be read and written
  int tile;      // channels of a block
  // Columns: threads side by side, and rows of them. A block may have more threads, which then only help to add up.
  int width, thread_rows;
  unsigned threads;       // in a block
  unsigned tiles, parts;  // blocks: `parts` of them share a tile

  // What the blocks leave for each other: numbers (sums.cuh), and int32 counters.
  int64_t partials() const {
    constexpr int64_t kLeftTogether = 32;  // as there
    const int64_t lines = (int64_t{parts} * tile + kLeftTogether - 1) / kLeftTogether;
    return parts > 1 ? lines * kLeftTogether * 3 * tiles : 0;
  }
  int64_t counters() const { return parts > 1 ? tiles : 0; }
};

// Chooses the launch for activations of `dtype` at these addresses, on a GPU with so many multiprocessors. Throws
// std::invalid_argument where there are more than CUDA or the kernels can count, which takes 2^31 channels, or images,
// or values of a channel in one.
Launch launch_for(DType dtype, const Layout& layout, const std::vector<const void*>& addresses,
                  int64_t multiprocessors);

}  // namespace gluon_syncbn
