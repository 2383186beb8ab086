// How many threads a kernel of kernels.cu is given, and how they lie over a tensor. Plain functions of the shape and
// the addresses: no GPU is needed to test them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tensor.h"

namespace gluon_syncbn {

struct Launch {
  bool rows;     // whether the kernels are those for rows or those for columns
  bool aligned;  // whether packs of 16 bytes may be read and written
  int images;    // rows: of how many images in a row a thread takes its packs
  // x: the tiles of channels, or threads on them; y: the parts that share a tile; for blocks see kernels.cu.
  unsigned grid_x, grid_y;
  unsigned block_x, block_y;

  // What the blocks leave for each other: float64 and int32 numbers, and float64 tickets.
  int64_t partials(const Layout& layout) const { return std::max<int64_t>(3 * grid_y, 5) * layout.channels; }
  int64_t counters() const { return 2 * static_cast<int64_t>(grid_x) + 1; }
  int64_t tickets() const { return grid_x; }
};

// What may be tuned; only measurements on a GPU show what is best.
struct Tuning {
  int64_t threads = 256;  // in a block
  int64_t unroll = 4;     // packs of 16 bytes that a thread has under way
  // Enough for every GPU: 8 blocks for each of 128 multiprocessors, of which 2 to 4 run at a time.
  int64_t blocks = 1024;
  // Where channels are last, all blocks of a kernel that reduces may share one tile, and the last of them adds up what
  // each has left. So these are as many as run at a time.
  int64_t reducing_blocks = 396;
};

// Chooses the launch for activations of `dtype` at these addresses, of a kernel that `reduces` or one that does not.
// Throws std::invalid_argument where the grid would be larger than CUDA allows, which takes 2^31 channels.
Launch launch_for(DType dtype, const Layout& layout, const std::vector<const void*>& addresses, bool reduces,
                  const Tuning& tuning = {});

}  // namespace gluon_syncbn
