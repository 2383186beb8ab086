#include "cuda/launch.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace gluon_syncbn {
namespace {

constexpr int64_t kPackBytes = 16;  // as in kernels.cu

// Bytes of neighbouring channels that a block reads at a time in columns: a cache line.
constexpr int64_t kLine = 128;

// Fewer blocks leave multiprocessors idle.
constexpr int64_t kFewBlocks = 264;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t power_of_two_for(int64_t size, int64_t most) {
  int64_t power = 1;
  while (power < size && power < most) power *= 2;
  return power;
}

uintptr_t offset_of(const void* address) { return reinterpret_cast<uintptr_t>(address) % kPackBytes; }

// Threads on a channel, and into how many parts its tensor can be cut.
struct Cut {
  int64_t threads, most_parts;
};

// A thread has `unroll` packs under way: of one run, if it has as many for each thread, or else of so many images.
Cut cut_rows(const Layout& layout, int64_t pack, bool is_whole, const Tuning& tuning, Launch& launch) {
  const int64_t width = launch.aligned ? pack : 1, packs = divide_up(layout.inner, width);
  // Packs lie in the same places of each image.
  const bool alike = !launch.aligned || layout.channels * layout.inner % pack == 0;
  // A run that does not begin and end with whole packs has up to pack - 1 single values at either end, one per thread.
  const int64_t singles = is_whole ? 1 : 2 * (pack - 1);
  const bool is_short = packs <= tuning.threads && (packs < tuning.unroll || !is_whole);
  if (is_short && alike && layout.outer > 1) {
    launch.images = static_cast<int>(tuning.unroll);
    return {power_of_two_for(std::max(packs, singles), tuning.threads), divide_up(layout.outer, tuning.unroll)};
  }
  Cut cut{};
  cut.threads = power_of_two_for(std::max(divide_up(packs, tuning.unroll), singles), tuning.threads);
  while (true) {
    cut.most_parts = layout.outer * divide_up(packs, cut.threads * tuning.unroll);
    const bool are_few = divide_up(layout.channels * cut.threads, tuning.threads) * cut.most_parts < kFewBlocks;
    if (!are_few || cut.threads >= std::min(packs, tuning.threads)) return cut;
    cut.threads *= 2;
  }
}

}  // namespace

Launch launch_for(DType dtype, const Layout& layout, const std::vector<const void*>& addresses, bool reduces,
                  const Tuning& tuning) {
  const int64_t bytes = bytes_of(dtype), pack = kPackBytes / bytes;
  const bool alike = std::all_of(addresses.begin(), addresses.end(), [&](const void* address) {
    return offset_of(address) == offset_of(addresses.front());
  });
  const bool begins_whole = offset_of(addresses.front()) == 0;
  Launch launch{};
  launch.rows = layout.inner > 1;
  launch.images = 1;
  int64_t tiles, most_parts, blocks = tuning.blocks;
  if (launch.rows) {
    // Single values in front of the first whole pack make up for any offset that all tensors share.
    launch.aligned = alike && layout.inner >= pack;
    const bool is_whole = !launch.aligned || (layout.inner % pack == 0 && begins_whole);
    const Cut cut = cut_rows(layout, pack, is_whole, tuning, launch);
    launch.block_x = static_cast<unsigned>(cut.threads);
    tiles = divide_up(layout.channels, tuning.threads / cut.threads);
    most_parts = cut.most_parts;
  } else {
    launch.aligned = alike && begins_whole && layout.channels % pack == 0;
    const int64_t width = launch.aligned ? pack : 1;
    const int64_t x = power_of_two_for(divide_up(layout.channels, width), kLine / (width * bytes));
    launch.block_x = static_cast<unsigned>(x);
    tiles = divide_up(layout.channels, x * width);
    most_parts = divide_up(layout.outer, tuning.threads / x * tuning.unroll);
    if (reduces) blocks = tuning.reducing_blocks;
  }
  if (tiles > std::numeric_limits<int>::max()) {
    throw std::invalid_argument(std::to_string(layout.channels) + " channels are too many for a GPU");
  }
  launch.grid_x = static_cast<unsigned>(tiles);
  launch.grid_y = static_cast<unsigned>(std::max<int64_t>(1, std::min(divide_up(blocks, tiles), most_parts)));
  launch.block_y = static_cast<unsigned>(tuning.threads) / launch.block_x;
  return launch;
}

}  // namespace gluon_syncbn
