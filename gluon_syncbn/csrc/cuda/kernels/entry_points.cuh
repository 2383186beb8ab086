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
