#include "cuda/launch.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace gluon_syncbn {
namespace {

// Threads of a block that need not be as large as possible.
constexpr int64_t kUsualThreads = 256, kLeastThreads = 64;

// The cost of a block, in packs of each of its threads: always, and more if it shares its tile. Measured on an H200,
// where a multiprocessor takes a pack for each of 512 threads in 0.3 microseconds.
constexpr int64_t kBlock = 12, kShare = 6;

// Bytes of neighbouring values that a block reads at a time, at least: a cache line.
constexpr int64_t kLine = 128;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

uintptr_t offset_of(const void* address) { return reinterpret_cast<uintptr_t>(address) % kPackBytes; }

// Keeps the cheapest of the launches that it looks at.
class Cheapest {
 public:
  Launch launch{};

  explicit Cheapest(int64_t multiprocessors) : multiprocessors_(multiprocessors) {}

  // Looks at blocks that lie over a tensor as `lying` says: `takers` threads of a block take the `packs` of a tile. So
  // few blocks share a tile that each thread has at least half of the packs that it can have under way.
  void look(Launch lying, int64_t tiles, int64_t packs, int64_t takers) {
    const int64_t places = places_for(lying.threads);
    const int64_t most = divide_up(2 * packs, takers * kUnroll);
    for (int64_t turns = 1; turns <= kTurns; ++turns) {
      const int64_t parts = std::max<int64_t>(1, std::min(turns * places / tiles, most));
      const int64_t block = kBlock + (parts > 1 ? kShare : 0) + divide_up(packs, parts * takers);
      const int64_t cost = divide_up(tiles * parts, places) * block;
      if (cost >= cost_) continue;
      cost_ = cost;
      launch = lying;
      launch.tiles = static_cast<unsigned>(tiles);
      launch.parts = static_cast<unsigned>(parts);
    }
  }

  // Looks at columns in which `tile` channels fill `width` threads side by side.
  void look_at_columns(const Layout& layout, bool aligned, int64_t tile, int64_t width, int64_t threads) {
    const int64_t rows = threads / width;
    Launch lying{};
    lying.shape = {layout.outer,           layout.channels,         layout.inner,          aligned,
                   static_cast<int>(tile), static_cast<int>(width), static_cast<int>(rows)};
    lying.threads = static_cast<unsigned>(threads);
    look(lying, divide_up(layout.channels, tile), layout.outer * width, rows * width);
  }

  // How many blocks of so many threads run at a time, by the registers that the kernels need. (On GPUs with 64 KiB of
  // shared memory, half as many blocks of some kernels run.)
  int64_t places_for(int64_t threads) const { return multiprocessors_ * kThreads / threads; }

  static constexpr int64_t kTurns = 4;  // many blocks run in at most so many turns

 private:
  const int64_t multiprocessors_;
  int64_t cost_ = std::numeric_limits<int64_t>::max();
};

}  // namespace

int64_t power_of_two_for(int64_t size) {
  int64_t power = 1;
  while (power < size) power *= 2;
  return power;
}

Launch launch_for(DType dtype, const Layout& layout, const std::vector<const void*>& addresses,
                  int64_t multiprocessors) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  if (layout.channels > kMost || layout.inner > kMost || (layout.inner > 1 && layout.outer > kMost)) {
    throw std::invalid_argument(std::to_string(layout.outer) + " times " + std::to_string(layout.channels) +
                                " channels of " + std::to_string(layout.inner) + " values are too many for a GPU");
  }
  const int64_t bytes = bytes_of(dtype), pack = kPackBytes / bytes;
  const uintptr_t offset = offset_of(addresses.front());
  const bool alike = std::all_of(addresses.begin(), addresses.end(),
                                 [&](const void* address) { return offset_of(address) == offset; });
  const bool packs_of_images = layout.channels * layout.inner % pack == 0;
  const bool whole_packs = alike && offset == 0 && packs_of_images;
  Cheapest cheapest(multiprocessors);
  if (layout.inner == 1) {
    const int64_t values = whole_packs ? pack : 1;
    const int64_t width = std::min(power_of_two_for(divide_up(layout.channels, values)), kLine / (values * bytes));
    // All blocks may share one tile, and the last block then adds up the sums of all: so a few large blocks are best.
    cheapest.look_at_columns(layout, whole_packs, width * values, width, width >= 8 ? kThreads : kUsualThreads);
    return cheapest.launch;
  }
  // The smallest number of channels whose values are whole packs.
  const int64_t together = pack / std::gcd(pack, layout.inner), packs = together * layout.inner / pack;
  if (whole_packs && packs <= (together == 1 ? kUsualThreads / 2 : kUsualThreads)) {
    const int64_t all = layout.channels / together;
    const int64_t most = std::min({kUsualThreads / packs, kMostChannels / together, all});
    const int64_t least = std::min(most, divide_up(kLine / kPackBytes, packs));
    for (int64_t turns = 1; turns <= Cheapest::kTurns; ++turns) {
      const int64_t times = std::clamp(divide_up(all, turns * cheapest.places_for(kUsualThreads)), least, most);
      cheapest.look_at_columns(layout, true, times * together, times * packs, kUsualThreads);
    }
    if (together > 1 || packs <= kUsualThreads / 4) return cheapest.launch;
  }
  // Threads read the values before the first whole pack singly, at any offset that all tensors and images share. Where
  // packs lie differently in each image, which is rare, threads read all values singly.
  Launch rows{};
  rows.rows = true;
  const bool aligned = alike && layout.inner >= pack && (packs_of_images || layout.outer == 1);
  rows.shape = {layout.outer, layout.channels, layout.inner, aligned, 1, 0, 0};
  const int64_t items = layout.outer * divide_up(layout.inner, aligned ? pack : 1);
  for (int64_t own = kUsualThreads; own >= kLeastThreads; own /= 2) {
    rows.threads = static_cast<unsigned>(own);
    cheapest.look(rows, layout.channels, items, own);
  }
  return cheapest.launch;
}

}  // namespace gluon_syncbn
