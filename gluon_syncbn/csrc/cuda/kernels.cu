// The arithmetic of one GPU: the same four passes as cpu/kernels.h, for a compiler at run time (NVRTC, from CUDA 10.1
// on, which needs --std=c++11). No header is included, because there may be none. Compiled once for each kind of layer:
//
//   VALUE_TYPE  of the activations: 0 float32, 1 float64, 2 float16 (MXNet's type flags)
//   ACTIVATION  0 none, 1 ReLU, 2 leaky ReLU
//   RESIDUAL    whether something is added before the activation, which then is a ReLU
//   IN_PLACE    whether the backward passes are given y in place of x
//   THREADS     in a block
//   UNROLL      packs of 16 bytes that a thread has under way
//
// and three that are 1 unless a measurement asks (benchmarks/gpu.py):
//
//   SHARE       one block per tile reads the host's message, for all
//   BACKWARDS   the second kernel of a direction begins where the first has ended, of which the cache holds the most
//   PREFETCH    the first packs are asked for before the message has been read
//
// Sums, parameters and statistics are float64 for float64 activations and float32 else; what leaves the GPU is float64.
//
// Tensors are (outer, channels, inner), dense. There are two ways to lay threads over them:
//
//   rows     inner > 1 (NCHW): a channel is `outer` runs of `inner` neighbours. blockDim = (threads on one channel,
//            channels of the block). Runs are cut into pieces, and the blocks of a channel take pieces in turn; or, if
//            a run has one pack for a thread, a thread takes its packs from several images in a row. Single values at
//            the ends of a run want a thread each: blockDim.x >= 2 * (kPack - 1) where there are any.
//   columns  inner = 1 (channel-last, and (N, C)): channels are neighbours. blockDim = (threads side by side, rows).
//            Each thread keeps its channels and walks down the rows.
//
// gridDim.x blocks share out the channels (a block's channels are its tile), gridDim.y blocks share one tile. launch.h
// chooses the numbers. A thread reads packs of 16 bytes, kUnroll of them at a time so that many are under way; where a
// run is not aligned its first and last values are read singly, and with `aligned` = 0 all are.
//
// The two passes that reduce end on the GPU: the last block of a tile adds up what the others have left, in a fixed
// order, so that results are the same bits every time; the last of those says in host memory that all is there.

#ifndef SHARE
#define SHARE 1
#endif
#ifndef BACKWARDS
#define BACKWARDS 1
#endif
#ifndef PREFETCH
#define PREFETCH 1
#endif
constexpr bool kBackwards = BACKWARDS;

#include "kernels/values.cuh"
#include "kernels/arguments.h"
#include "kernels/threads.cuh"
#include "kernels/sums.cuh"
#include "kernels/moments.cuh"
#include "kernels/affine.cuh"
#include "kernels/prepare.cuh"
#include "kernels/normalize.cuh"
#include "kernels/gradient_sums.cuh"
#include "kernels/input_gradient.cuh"
#include "kernels/entry_points.cuh"
