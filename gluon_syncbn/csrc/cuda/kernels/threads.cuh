// How threads lie over a tensor, and which of its values each of them takes.

// Where a thread stands: among those that share its channels (position of size), which lie `stride` threads apart.
struct Place {
  int position, size, stride;
  int lead;       // number of its channels, or first channel, in the tile; a tile has at most kThreads channels
  int64 channel;  // the first of its channels
};

__device__ inline int thread_number() { return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); }

// The two ways to lay threads over a tensor. `walk` calls pass.take<V>(offset, stride, packs) for everything that is
// this thread's: up to kUnroll packs of V values, the first at `offset`, each `stride` values after the last. `address`
// is that of a tensor, for its alignment; all tensors of a call are aligned alike, or `aligned` is 0. Backwards it
// begins with the last image: what the kernel before has read last is in the cache then. With kOnce it takes only what
// comes first.
struct Rows {
  static constexpr int kChannels = 1;  // of a thread

  __device__ static Place place() {
    Place place = {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), 1, static_cast<int>(threadIdx.y),
                   static_cast<int64>(blockIdx.x) * blockDim.y + threadIdx.y};
    return place;
  }

  template <bool kBackwards, bool kOnce, typename Pass>
  __device__ static void walk(const Shape& shape, const value_t* address, const Place& place, Pass& pass) {
    if (place.channel >= shape.channels) return;
    const int width = shape.aligned ? kPack : 1;
    const int piece = width * place.size * (shape.images > 1 ? 1 : kUnroll);
    // Of a run; 1 if a thread takes several images at a time.
    const int pieces = static_cast<int>((shape.inner + piece - 1) / piece);
    const int64 image = shape.channels * shape.inner;
    // Piece number blockIdx.y, then every gridDim.y-th, without a division (of 64 bits, dear on a GPU) for each.
    const int blocks = static_cast<int>(gridDim.y), block = static_cast<int>(blockIdx.y);
    const int runs_on = blocks / pieces, pieces_on = blocks - runs_on * pieces;
    int64 run = block / pieces;
    int number = block % pieces;
    while (run * shape.images < shape.outer) {
      const int64 first = kBackwards ? shape.outer - 1 - run * shape.images : run * shape.images;
      const int64 begin = static_cast<int64>(kBackwards ? pieces - 1 - number : number) * piece;
      const int64 offset = first * image + place.channel * shape.inner + begin;
      const int size = shape.inner - begin < piece ? static_cast<int>(shape.inner - begin) : piece;
      const int64 left = shape.outer - run * shape.images;
      const int images = static_cast<int>(left < shape.images ? left : shape.images);
      take(shape, address, offset, size, kBackwards ? -image : image, images, place, pass);
      if (kOnce) return;
      run += runs_on;
      number += pieces_on;
      if (number >= pieces) {
        number -= pieces;
        ++run;
      }
    }
  }

 private:
  // One piece of a run, or the same run of several images, whose packs then lie in the same places.
  template <typename Pass>
  __device__ static void take(const Shape& shape, const value_t* address, int64 offset, int size, int64 image,
                              int images, const Place& place, Pass& pass) {
    // Values before the first whole pack; every piece of a run begins as far from one.
    int head = 0, whole = size, tail = 0;
    if (shape.aligned) {
      const int from_pack = static_cast<int>(reinterpret_cast<unsigned long long>(address + offset) & 15) /
                            static_cast<int>(sizeof(value_t));
      head = from_pack ? kPack - from_pack : 0;
      if (head > size) head = size;
      whole = (size - head) / kPack;
      tail = size - head - whole * kPack;
    }
    int packs = 0;
    while (packs < kUnroll && place.position + packs * place.size < whole) ++packs;
    if (shape.images > 1 && packs > 0) packs = images;
    int64 step = shape.images > 1 ? image : place.size * (shape.aligned ? kPack : 1);
    int64 single = place.position;
    if (shape.aligned) {
      if (packs > 0) pass.template take<kPack>(offset + head + place.position * kPack, step, packs);
      // The values before and after the packs, each by a thread of its own.
      if (place.position >= head) single += whole * kPack;
      step = image;
      packs = place.position < head + tail ? images : 0;
    }
    if (packs > 0) pass.template take<1>(offset + single, step, packs);
  }
};

template <int V>
struct Columns {
  static constexpr int kChannels = V;

  __device__ static Place place() {
    Place place = {static_cast<int>(threadIdx.y), static_cast<int>(blockDim.y), static_cast<int>(blockDim.x),
                   static_cast<int>(threadIdx.x) * V, (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * V};
    return place;
  }

  template <bool kBackwards, bool kOnce, typename Pass>
  __device__ static void walk(const Shape& shape, const value_t*, const Place& place, Pass& pass) {
    if (place.channel >= shape.channels) return;
    const int64 step = static_cast<int64>(place.size) * gridDim.y;
    for (int64 row = static_cast<int64>(blockIdx.y) * place.size + place.position; row < shape.outer;
         row += step * kUnroll) {
      int packs = 1;
      while (packs < kUnroll && row + packs * step < shape.outer) ++packs;
      const int64 first = kBackwards ? shape.outer - 1 - row : row;
      pass.template take<V>(first * shape.channels + place.channel, (kBackwards ? -step : step) * shape.channels,
                            packs);
      if (kOnce) return;
    }
  }
};

// Asks for what a thread takes first of up to three tensors, before it waits for something else.
struct PrefetchPass {
  const value_t *first, *second, *third;  // those that are not there are null

  template <int V>
  __device__ void take(int64 offset, int64 stride, int packs) {
    for (int u = 0; u < packs; ++u) {
      prefetch(first + offset + u * stride);
      if (second) prefetch(second + offset + u * stride);
      if (third) prefetch(third + offset + u * stride);
    }
  }
};

template <typename Threads, bool kBackwards>
__device__ inline void prefetch_first(const Shape& shape, const Place& place, const value_t* first,
                                      const value_t* second, const value_t* third) {
  if (!PREFETCH) return;
  PrefetchPass pass = {first, second, third};
  Threads::template walk<kBackwards, true>(shape, first, place, pass);
}
