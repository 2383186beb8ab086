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
  // x: the tiles of channels, or threads on them; y: the parts that share a tile; for blocks see kernels.cu.
  unsigned grid_x, grid_y;
  unsigned block_x, block_y;

  // What the blocks leave for each other: float64 and int32 numbers.
  int64_t partials(const Layout& layout) const { return 3 * static_cast<int64_t>(grid_y) * layout.channels; }
  int64_t counters() const { return static_cast<int64_t>(grid_x) + 1; }
};

// What may be tuned; only measurements on a GPU show what is best.
struct Tuning {
  int64_t threads = 256;  // in a block
  int64_t unroll = 4;     // packs of 16 bytes that a thread has under way
  // Enough for every GPU that MXNet runs on: 8 blocks for each of 128 multiprocessors, of which 2 to 4 run at a time.
  // More would only add to what the last block of a tile has to add up.
  int64_t blocks = 1024;
};

// Chooses the launch for activations of `dtype` at these addresses. Throws std::invalid_argument where the grid would
// be larger than CUDA allows, which takes 2^31 channels.
Launch launch_for(DType dtype, const Layout& layout, const std::vector<const void*>& addresses,
                  const Tuning& tuning = {});

}  // namespace gluon_syncbn
