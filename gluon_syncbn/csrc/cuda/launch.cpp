#include "cuda/launch.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace gluon_syncbn {
namespace {

constexpr int64_t kPackBytes = 16;  // as in kernels.cu

// Bytes of neighbouring channels that a block reads at a time in columns: a cache line.
constexpr int64_t kLine = 128;

int64_t bytes_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t power_of_two_for(int64_t size, int64_t most) {
  int64_t power = 1;
  while (power < size && power < most) power *= 2;
  return power;
}

}  // namespace

Launch launch_for(DType dtype, const Layout& layout, const std::vector<const void*>& addresses, const Tuning& tuning) {
  const int64_t bytes = bytes_of(dtype), pack = kPackBytes / bytes;
  const auto offset = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % kPackBytes; };
  const bool alike = std::all_of(addresses.begin(), addresses.end(),
                                 [&](const void* address) { return offset(address) == offset(addresses.front()); });
  Launch launch{};
  launch.rows = layout.inner > 1;
  int64_t tiles, parts, x, most_parts;
  if (launch.rows) {
    // Single values in front of the first whole pack make up for any offset that all tensors share.
    launch.aligned = alike && layout.inner >= pack;
    const int64_t width = launch.aligned ? pack : 1;
    // A run that does not begin and end with whole packs has up to pack - 1 single values at either end, one per
    // thread.
    const bool whole = layout.inner % pack == 0 && offset(addresses.front()) == 0;
    const int64_t singles = launch.aligned && !whole ? pack - 1 : 1;
    x = power_of_two_for(std::max(divide_up(layout.inner, width), singles), tuning.threads);
    tiles = divide_up(layout.channels, tuning.threads / x);
    most_parts = layout.outer * divide_up(layout.inner, x * width * tuning.unroll);
  } else {
    launch.aligned = alike && offset(addresses.front()) == 0 && layout.channels % pack == 0;
    const int64_t width = launch.aligned ? pack : 1;
    x = power_of_two_for(divide_up(layout.channels, width), kLine / (width * bytes));
    tiles = divide_up(layout.channels, x * width);
    most_parts = divide_up(layout.outer, tuning.threads / x * tuning.unroll);
  }
  parts = std::max<int64_t>(1, std::min(divide_up(tuning.blocks, tiles), most_parts));
  if (tiles > std::numeric_limits<int>::max()) {
    throw std::invalid_argument(std::to_string(layout.channels) + " channels are too many for a GPU");
  }
  launch.grid_x = static_cast<unsigned>(tiles);
  launch.grid_y = static_cast<unsigned>(parts);
  launch.block_x = static_cast<unsigned>(x);
  launch.block_y = static_cast<unsigned>(tuning.threads / x);
  return launch;
}

}  // namespace gluon_syncbn
