// How threads lie over a tensor, and which values each thread takes.
//
// A walk gives a thread up to N packs of V values at a time: `next(at)` returns how many, and at(n) is the place of
// pack n. A backward walk begins with the last image, which the previous kernel has read last and left in the cache.

constexpr int kPack = kPackBytes / static_cast<int>(sizeof(value_t));

__device__ inline int thread_number() { return static_cast<int>(threadIdx.x); }
__device__ inline int thread_count() { return static_cast<int>(blockDim.x); }

__device__ inline int64 first_channel(const Shape& shape) { return static_cast<int64>(blockIdx.x) * shape.tile; }

// Whether the tile has a channel of this number.
__device__ inline bool has_channel(const Shape& shape, int number) {
  return number < shape.tile && first_channel(shape) + number < shape.channels;
}

struct Strided {
  int64 first, step;
  __device__ int64 operator()(int n) const { return first + n * step; }
};

template <int N>
struct Listed {
  int64 places[N];
  __device__ int64 operator()(int n) const { return places[n]; }
};

// The threads of a block: `rows` rows of `width` threads. Each thread has sums of kColumns neighbouring columns (of
// Rows or Columns), and `run` neighbouring columns are one channel.
struct Block {
  int width, rows, run;
};

// One channel per block.
struct Rows {
  static constexpr int kColumns = 1;

  __device__ static Block block(const Shape&) {
    const Block block = {thread_count(), 1, thread_count()};
    return block;
  }

  // The block's column of the thread's first value; the thread's row; and the tile's channel of the thread's column s.
  __device__ static int column(const Shape&) { return thread_number(); }
  __device__ static int row(const Shape&) { return 0; }
  __device__ static int channel(const Shape&, int) { return 0; }

  // Takes the packs of a channel, or its single values.
  template <int V, int N, bool kBackwards>
  class Walk {
   public:
    typedef Listed<N> Places;

    __device__ Walk(const Shape& shape, const value_t* address)
        : stride_(shape.channels * shape.inner), last_(static_cast<int>(shape.outer) - 1), head_(0), hole_(0) {
      begin_ = blockIdx.x * shape.inner;
      // Values before the first whole pack: the same number in each image, or `aligned` is 0.
      int head = 0, whole = 0;
      if (shape.aligned) {
        const int from_pack = static_cast<int>(reinterpret_cast<unsigned long long>(address + begin_) & 15) /
                              static_cast<int>(sizeof(value_t));
        head = from_pack ? kPack - from_pack : 0;
        whole = static_cast<int>((shape.inner - head) / kPack);
      }
      if (V > 1) {
        count_ = whole;
        begin_ += head;
      } else {
        count_ = static_cast<int>(shape.inner) - whole * kPack;
        head_ = head;
        hole_ = whole * kPack;
      }
      image_ = last_ + 1;
      if (count_ == 0) return;
      const int step = thread_count() * static_cast<int>(gridDim.y);
      const int start = thread_count() * static_cast<int>(blockIdx.y) + thread_number();
      images_on_ = step / count_;
      items_on_ = step - images_on_ * count_;
      image_ = start / count_;
      item_ = start - image_ * count_;
    }

    __device__ int next(Places& at) {
      int packs = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (image_ > last_) continue;
        const int image = kBackwards ? last_ - image_ : image_, item = kBackwards ? count_ - 1 - item_ : item_;
        at.places[n] = begin_ + image * stride_ + item * V + (V == 1 && item >= head_ ? hole_ : 0);
        packs = n + 1;
        image_ += images_on_;
        item_ += items_on_;
        if (item_ >= count_) {
          item_ -= count_;
          ++image_;
        }
      }
      return packs;
    }

   private:
    const int64 stride_;
    const int last_;
    int64 begin_;
    int count_, head_, hole_;  // items of an image; single values skip the `hole_` values of whole packs after `head_`
    int image_, item_, images_on_, items_on_;
  };
};

// Whole channels of neighbouring values, V_ to a thread.
template <int V_>
struct Columns {
  static constexpr int kColumns = V_;

  __device__ static Block block(const Shape& shape) {
    const Block block = {shape.width, shape.rows, static_cast<int>(shape.inner)};
    return block;
  }

  __device__ static int column(const Shape& shape) { return thread_number() % shape.width * V_; }
  __device__ static int row(const Shape& shape) { return thread_number() / shape.width; }
  __device__ static int channel(const Shape& shape, int s) {
    return (column(shape) + s) / static_cast<int>(shape.inner);
  }

  template <int V, int N, bool kBackwards>
  class Walk {
   public:
    typedef Strided Places;

    __device__ Walk(const Shape& shape, const value_t*)
        : line_(shape.channels * shape.inner),
          outer_(shape.outer),
          step_(static_cast<int64>(shape.rows) * gridDim.y),
          column_(first_channel(shape) * shape.inner + Columns::column(shape)) {
      const int row = Columns::row(shape);
      row_ = static_cast<int64>(blockIdx.y) * shape.rows + row;
      if (row >= shape.rows || column_ >= line_) row_ = outer_;
    }

    __device__ int next(Places& at) {
      if (row_ >= outer_) return 0;
      int packs = 1;
      while (packs < N && row_ + packs * step_ < outer_) ++packs;
      at.first = (kBackwards ? outer_ - 1 - row_ : row_) * line_ + column_;
      at.step = (kBackwards ? -step_ : step_) * line_;
      row_ += step_ * N;
      return packs;
    }

   private:
    const int64 line_, outer_, step_, column_;
    int64 row_;
  };
};

// The kCount tensors that a pass reads, N packs of each at a time. It leaves out the third if that is null.
template <int N, int kCount>
struct Tensors {
  enum { kAtOnce = N };
  const value_t* tensors[kCount];

  template <int V>
  struct Loaded {
    static constexpr int kValues = V;
    Packs<V, N> of[kCount];
  };

  template <int V, typename Places>
  __device__ void load(Loaded<V>& loaded, const Places& at, int packs) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < 2 || tensors[i]) loaded.of[i].load(tensors[i], at, packs);
    }
  }
};

// Lets `pass` take all values of this thread. All threads of the block call `prepare`, with their first loads under
// way.
template <int V, bool kBackwards, typename Threads, typename Pass, typename Prepare>
__device__ inline void walk(const Shape& shape, const value_t* address, Pass& pass, Prepare& prepare) {
  typedef typename Threads::template Walk<V, Pass::kAtOnce, kBackwards> Walk;
  Walk walk(shape, address);
  typename Walk::Places at;
  typename Pass::template Loaded<V> loaded;
  int packs = walk.next(at);
  pass.load(loaded, at, packs);
  prepare();
  while (packs > 0) {
    pass.take(loaded, at, packs);
    packs = walk.next(at);
    pass.load(loaded, at, packs);
  }
}

struct Nothing {
  __device__ void operator()() const {}
};

template <typename Threads, bool kBackwards>
struct Whole {
  template <typename Pass, typename Prepare>
  __device__ static void walk(const Shape& shape, const value_t* address, Pass& pass, Prepare& prepare) {
    ::walk<Threads::kColumns, kBackwards, Threads>(shape, address, pass, prepare);
  }
};
template <bool kBackwards>
struct Whole<Rows, kBackwards> {
  template <typename Pass, typename Prepare>
  __device__ static void walk(const Shape& shape, const value_t* address, Pass& pass, Prepare& prepare) {
    ::walk<kPack, kBackwards, Rows>(shape, address, pass, prepare);
    Nothing nothing;
    ::walk<1, kBackwards, Rows>(shape, address, pass, nothing);
  }
};
