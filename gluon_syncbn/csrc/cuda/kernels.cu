// The arithmetic of one GPU: the same four passes as cpu/kernels.h, for NVRTC, the compiler at run time (from CUDA 10.1
// on, which needs --std=c++11). It includes no header of CUDA, because there may be none. NVRTC compiles it once for
// each kind of layer:
//
//   VALUE_TYPE   of the activations: 0 float32, 1 float64, 2 float16 (MXNet's type flags)
//   ACTIVATION   0 none, 1 ReLU, 2 leaky ReLU
//   RESIDUAL     whether a residual is added before the activation, which then is a ReLU
//   FROM_OUTPUT  whether the backward passes take y in place of x
//
// INVERSE_LEAST_GAMMA is 1 / least_gamma (least_gamma.h).
//
// Sums, parameters and statistics are float64 for float64 activations, and float32 for others. The host gets float64.
//
// Tensors are (outer, channels, inner), dense. Threads lie over them in one of two ways:
//
//   columns  A thread keeps some neighbouring values of an image (of a row, if channels are last) and walks down the
//            images. A block has `width` threads side by side, which take whole channels, and some rows of threads.
//   rows     Where an image has too many values of a channel for columns, or images are not whole packs. The threads
//            of a block take the packs of one channel in turn, image after image, and then the single values before
//            the first whole pack of each image and after the last.
//
// gridDim.x blocks share out the channels (a block's channels are its tile), and gridDim.y blocks share one tile.
// launch.h chooses these numbers. A thread reads packs of 16 bytes, several at a time so that many are under way, and
// loads the first packs before it prepares its channels. With `aligned` = 0 it reads all values singly.
//
// The two passes that reduce end on the GPU: the last block of a tile adds up the sums of all its blocks, in a fixed
// order, so that results are the same bits every time, and leaves the totals in host memory.

#include "kernels/values.cuh"
#include "kernels/arguments.h"
#include "kernels/threads.cuh"
#include "kernels/sums.cuh"
#include "kernels/affine.cuh"
#include "kernels/forward.cuh"
#include "kernels/backward.cuh"

// The kernels. A thread may have 128 registers.
#define BOUNDS __launch_bounds__(kThreads, 1)

#define KERNEL(name, Arguments)                                                                \
  extern "C" __global__ void BOUNDS name##_rows(Arguments arguments) { run<Rows>(arguments); } \
  extern "C" __global__ void BOUNDS name##_columns(Arguments arguments) {                      \
    arguments.shape.aligned ? run<Columns<kPack>>(arguments) : run<Columns<1>>(arguments);     \
  }

KERNEL(moments, MomentsArguments)
KERNEL(normalize, NormalizeArguments)
KERNEL(gradient_sums, GradientSumsArguments)
KERNEL(input_gradient, InputGradientArguments)

// A name in the PTX tells the tests' stand-in for CUDA which kind of layer it was compiled for.
#define COMPILED_FOR(type, activation, residual, from_output) COMPILED_FOR_(type, activation, residual, from_output)
#define COMPILED_FOR_(type, activation, residual, from_output)                    \
  extern "C" {                                                                    \
  __device__ int compiled_for_##type##_##activation##_##residual##_##from_output; \
  }
COMPILED_FOR(VALUE_TYPE, ACTIVATION, RESIDUAL, FROM_OUTPUT)
