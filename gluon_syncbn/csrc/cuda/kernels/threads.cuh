// How threads lie over a tensor, and which of its values each of them takes.

struct Shape {
  int64 outer, channels, inner;
};

template <typename Arguments>
__device__ inline Shape shape_of(const Arguments& arguments) {
  const Shape shape = {arguments.outer, arguments.channels, arguments.inner};
  return shape;
}

// Where a thread stands: among those that share its channels (position of size), which lie `stride` threads apart.
struct Place {
  int position, size, stride;
  int64 channel;  // the first of its channels
};

__device__ inline int thread_number() { return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); }

// The two ways to lay threads over a tensor. `walk` calls pass.take<V>(offset, stride, packs) for everything that is
// this thread's: up to kUnroll packs of V values, the first at `offset`, each `stride` values after the last. `address`
// is that of a tensor, for its alignment; all tensors of a call are aligned alike, or `aligned` is 0.
struct Rows {
  static constexpr int kChannels = 1;  // of a thread

  __device__ static Place place() {
    Place place = {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), 1,
                   static_cast<int64>(blockIdx.x) * blockDim.y + threadIdx.y};
    return place;
  }

  template <typename Pass>
  __device__ static void walk(const Shape& shape, const value_t* address, int aligned, const Place& place, Pass& pass) {
    if (place.channel >= shape.channels) return;
    const int64 width = aligned ? kPack : 1;
    const int64 piece = width * kUnroll * place.size;
    const int64 pieces = (shape.inner + piece - 1) / piece;
    // Piece number blockIdx.y, then every gridDim.y-th, without a division (of 64 bits, dear on a GPU) for each.
    const int64 runs_on = gridDim.y / pieces, pieces_on = gridDim.y - runs_on * pieces;
    int64 run = blockIdx.y / pieces, number = blockIdx.y - run * pieces;
    while (run < shape.outer) {
      const int64 begin = number * piece;
      const int64 offset = (run * shape.channels + place.channel) * shape.inner + begin;
      const int64 size = shape.inner - begin < piece ? shape.inner - begin : piece;
      run += runs_on;
      number += pieces_on;
      if (number >= pieces) {
        number -= pieces;
        ++run;
      }
      if (!aligned) {
        int packs = 0;
        while (packs < kUnroll && place.position + packs * place.size < size) ++packs;
        if (packs > 0) pass.template take<1>(offset + place.position, place.size, packs);
        continue;
      }
      // Values before the first whole pack; every piece of a run begins as far from one.
      const int64 from_pack = (reinterpret_cast<unsigned long long>(address + offset) & 15) / sizeof(value_t);
      int64 head = from_pack ? kPack - from_pack : 0;
      if (head > size) head = size;
      const int64 whole = (size - head) / kPack, tail = size - head - whole * kPack;
      int packs = 0;
      while (packs < kUnroll && place.position + packs * place.size < whole) ++packs;
      if (packs > 0) {
        pass.template take<kPack>(offset + head + place.position * kPack, static_cast<int64>(place.size) * kPack,
                                  packs);
      }
      if (place.position < head) pass.template take<1>(offset + place.position, 0, 1);
      if (place.position < tail) pass.template take<1>(offset + head + whole * kPack + place.position, 0, 1);
    }
  }
};

template <int V>
struct Columns {
  static constexpr int kChannels = V;

  __device__ static Place place() {
    Place place = {static_cast<int>(threadIdx.y), static_cast<int>(blockDim.y), static_cast<int>(blockDim.x),
                   (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * V};
    return place;
  }

  template <typename Pass>
  __device__ static void walk(const Shape& shape, const value_t*, int, const Place& place, Pass& pass) {
    if (place.channel >= shape.channels) return;
    const int64 step = static_cast<int64>(place.size) * gridDim.y;
    for (int64 row = static_cast<int64>(blockIdx.y) * place.size + place.position; row < shape.outer;
         row += step * kUnroll) {
      int packs = 1;
      while (packs < kUnroll && row + packs * step < shape.outer) ++packs;
      pass.template take<V>(row * shape.channels + place.channel, step * shape.channels, packs);
    }
  }
};
