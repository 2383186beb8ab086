// The arithmetic of one GPU: the same four passes as cpu/kernels.h, for the compiler that MXNet has at run time (NVRTC,
// from CUDA 10.1 on, which needs --std=c++11). No header is included, because there may be none. Compiled once per type
// of the activations:
//
//   VALUE_TYPE  0 float32, 1 float64, 2 float16 (MXNet's type flags)
//   THREADS     in a block
//   UNROLL      packs of 16 bytes that a thread has under way
//
// Sums, parameters and statistics are float64 for float64 activations and float32 else; what leaves the GPU is float64.
//
// Tensors are (outer, channels, inner), dense. There are two ways to lay threads over them:
//
//   rows     inner > 1 (NCHW): a channel is `outer` runs of `inner` neighbours. blockDim = (threads on one channel,
//            channels of the block). Runs are cut into pieces, and the blocks of a channel take pieces in turn. Single
//            values at the ends of a run want a thread each: blockDim.x >= kPack - 1 where there are any.
//   columns  inner = 1 (channel-last, and (N, C)): channels are neighbours. blockDim = (threads side by side, rows).
//            Each thread keeps its channels and walks down the rows.
//
// gridDim.x blocks share out the channels (a block's channels are its tile), gridDim.y blocks share one tile. launch.h
// chooses the numbers. A thread reads packs of 16 bytes, kUnroll of them at a time so that many are under way; where a
// run is not aligned its first and last values are read singly, and with `aligned` = 0 all are.
//
// The two passes that reduce end on the GPU: the last block of a tile adds up what the others have left, in a fixed
// order, so that results are the same bits every time; the last of those says in host memory that all is there.

#include "kernels/values.cuh"
#include "kernels/arguments.cuh"
#include "kernels/threads.cuh"
#include "kernels/sums.cuh"
#include "kernels/moments.cuh"
#include "kernels/affine.cuh"
#include "kernels/normalize.cuh"
#include "kernels/gradient_sums.cuh"
#include "kernels/input_gradient.cuh"
#include "kernels/entry_points.cuh"
#include "kernels/fill_nan.cuh"
