// Σ dy and Σ dy·(x − shift), where dy is masked by the ReLU, if there is one.

template <typename T, bool kRelu>
void gradient_sums_rows(const T* x, const T* dy, Layout layout, int64_t c_begin, int64_t c_end,
                        const AffineView& affine, double* sums, double* centred) {
  using A = typename Storage<T>::Compute;
  for (int64_t c = c_begin; c < c_end; ++c) sums[c] = centred[c] = 0;
  for (int64_t o = 0; o < layout.outer; ++o) {
    for (int64_t c = c_begin; c < c_end; ++c) {
      Channel<A> channel = channel_of<A>(affine, c);
      channel.relu = kRelu;
      for (int64_t begin = 0; begin < layout.inner; begin += kBlock) {
        const int64_t size = layout.inner - begin < kBlock ? layout.inner - begin : kBlock;
        const int64_t start = (o * layout.channels + c) * layout.inner + begin;
        const T* values = x + start;
        const T* gradients = dy + start;
        A s[kLanes] = {}, p[kLanes] = {};
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) {
          for (int l = 0; l < kLanes; ++l) {
            const A value = Storage<T>::load(values[i + l]);
            const A gradient = channel.masked(value, Storage<T>::load(gradients[i + l]));
            s[l] += gradient;
            p[l] += gradient * (value - channel.shift);
          }
        }
        for (int l = 0; i < size; ++i, ++l) {
          const A value = Storage<T>::load(values[i]);
          const A gradient = channel.masked(value, Storage<T>::load(gradients[i]));
          s[l] += gradient;
          p[l] += gradient * (value - channel.shift);
        }
        double sum = 0, product = 0;
        for (int l = 0; l < kLanes; ++l) {
          sum += s[l];
          product += p[l];
        }
        sums[c] += sum;
        centred[c] += product;
      }
    }
  }
}

template <typename T, bool kRelu>
void gradient_sums_columns(const T* x, const T* dy, Layout layout, int64_t c_begin, int64_t c_end,
                           const AffineView& affine, double* sums, double* centred) {
  using A = typename Storage<T>::Compute;
  for (int64_t c = c_begin; c < c_end; ++c) sums[c] = centred[c] = 0;
  for (int64_t c0 = c_begin; c0 < c_end; c0 += kChannelBlock) {
    const int64_t width = c_end - c0 < kChannelBlock ? c_end - c0 : kChannelBlock;
    const Columns<A> columns(affine, c0, width);
    A s[kChannelBlock], p[kChannelBlock];
    for (int64_t o0 = 0; o0 < layout.outer; o0 += kRowBlock) {
      const int64_t rows = layout.outer - o0 < kRowBlock ? layout.outer - o0 : kRowBlock;
      for (int64_t c = 0; c < width; ++c) s[c] = p[c] = 0;
      for (int64_t o = o0; o < o0 + rows; ++o) {
        const T* values = x + o * layout.channels + c0;
        const T* gradients = dy + o * layout.channels + c0;
        for (int64_t c = 0; c < width; ++c) {
          const Channel<A> channel{columns.shift[c], columns.scale[c], columns.bias[c], kRelu};
          const A value = Storage<T>::load(values[c]);
          const A gradient = channel.masked(value, Storage<T>::load(gradients[c]));
          s[c] += gradient;
          p[c] += gradient * (value - channel.shift);
        }
      }
      for (int64_t c = 0; c < width; ++c) {
        sums[c0 + c] += s[c];
        centred[c0 + c] += p[c];
      }
    }
  }
}

template <typename T>
void gradient_sums_of(const void* x, const void* dy, Layout layout, int64_t c_begin, int64_t c_end,
                      const AffineView& affine, double* sums, double* centred) {
  const auto pass = layout.inner == 1
                        ? (affine.relu ? gradient_sums_columns<T, true> : gradient_sums_columns<T, false>)
                        : (affine.relu ? gradient_sums_rows<T, true> : gradient_sums_rows<T, false>);
  pass(static_cast<const T*>(x), static_cast<const T*>(dy), layout, c_begin, c_end, affine, sums, centred);
}
