// What each kernel takes, listed once. The device code makes of these lists the parameters of the entry points and the
// structs that it works with. program.h makes the same structs for the host, with MXNet's arrays in place of pointers,
// and program.cpp what MXNet must know of the parameters. This file includes nothing: NVRTC is handed one text.
//
// A list takes three macros: READ(type, name) for an array that the kernel reads, WRITE(type, name) for one that it
// writes, NUMBER(type, name) for a number. value_t is the type of activations, real_t that of parameters and
// statistics.
//
//   x                  the input; in place, the backward passes are given y here
//   residual           is added before the activation (kernels named `_residual`, whose activation is a ReLU)
//   saved              what the forward pass leaves for the backward pass: mean[C], invstd[C], r[C], d[C], and count,
//                      round_id and active_set of the call
//   message, ticket    what GPU and host leave for each other, see scratch.h
//   partials, counters what blocks leave for each other, see sums.cuh
//   ..._request        MXNet's OpReqType of a gradient: 0 nothing, 3 add, else write

#define SHAPE_ARGUMENTS(NUMBER) NUMBER(int64, outer) NUMBER(int64, channels) NUMBER(int64, inner) NUMBER(int, aligned)
#define EPILOGUE_ARGUMENTS(NUMBER) NUMBER(int, activation) NUMBER(double, slope) NUMBER(int, in_place)

// clang-format off
#define MOMENTS_ARGUMENTS(READ, WRITE, NUMBER)                                          \
  SHAPE_ARGUMENTS(NUMBER)                                                               \
  READ(value_t, x) READ(real_t, running_mean) READ(real_t, running_var)                 \
  WRITE(double, partials) WRITE(int, counters) WRITE(double, message)                   \
  NUMBER(double, ticket) NUMBER(int, wants_running)

#define NORMALIZE_ARGUMENTS(READ, WRITE, NUMBER)                                        \
  SHAPE_ARGUMENTS(NUMBER) EPILOGUE_ARGUMENTS(NUMBER)                                    \
  READ(value_t, x) WRITE(value_t, y) READ(real_t, gamma) READ(real_t, beta)             \
  WRITE(real_t, running_mean) WRITE(real_t, running_var)                                \
  WRITE(double, saved) READ(double, message)                                            \
  NUMBER(double, epsilon) NUMBER(double, momentum)                                      \
  NUMBER(double, count) NUMBER(double, round_id) NUMBER(double, active_set)             \
  NUMBER(int, training) NUMBER(int, has_scale) NUMBER(int, renorm)                      \
  NUMBER(int, wants_y) NUMBER(int, wants_saved)
#define NORMALIZE_RESIDUAL_ARGUMENTS(READ, WRITE, NUMBER)                               \
  NORMALIZE_ARGUMENTS(READ, WRITE, NUMBER) READ(value_t, residual)

#define GRADIENT_SUMS_COMMON(READ, WRITE, NUMBER)                                       \
  SHAPE_ARGUMENTS(NUMBER)                                                               \
  READ(value_t, x) READ(value_t, dy) READ(real_t, gamma) READ(real_t, beta)             \
  READ(double, saved)                                                                   \
  WRITE(double, partials) WRITE(int, counters) WRITE(double, message)                   \
  WRITE(real_t, d_gamma) WRITE(real_t, d_beta)                                          \
  NUMBER(double, ticket) NUMBER(int, has_scale)                                         \
  NUMBER(int, gamma_request) NUMBER(int, beta_request)
#define GRADIENT_SUMS_OF_RESIDUAL(READ, WRITE, NUMBER)                                  \
  READ(value_t, y) WRITE(value_t, d_residual) NUMBER(int, residual_request)
#define GRADIENT_SUMS_ARGUMENTS(READ, WRITE, NUMBER)                                    \
  GRADIENT_SUMS_COMMON(READ, WRITE, NUMBER) EPILOGUE_ARGUMENTS(NUMBER)
#define GRADIENT_SUMS_RESIDUAL_ARGUMENTS(READ, WRITE, NUMBER)                           \
  GRADIENT_SUMS_COMMON(READ, WRITE, NUMBER) GRADIENT_SUMS_OF_RESIDUAL(READ, WRITE, NUMBER)

#define INPUT_GRADIENT_COMMON(READ, WRITE, NUMBER)                                      \
  SHAPE_ARGUMENTS(NUMBER)                                                               \
  READ(value_t, x) READ(value_t, dy) WRITE(value_t, dx)                                 \
  READ(real_t, gamma) READ(real_t, beta) READ(double, saved) READ(double, message)      \
  NUMBER(int, has_scale) NUMBER(int, add)
#define INPUT_GRADIENT_ARGUMENTS(READ, WRITE, NUMBER)                                   \
  INPUT_GRADIENT_COMMON(READ, WRITE, NUMBER) EPILOGUE_ARGUMENTS(NUMBER)
#define INPUT_GRADIENT_RESIDUAL_ARGUMENTS(READ, WRITE, NUMBER)                          \
  INPUT_GRADIENT_COMMON(READ, WRITE, NUMBER) READ(value_t, y)

#define FILL_NAN_ARGUMENTS(READ, WRITE, NUMBER) WRITE(value_t, values) NUMBER(int64, size)

// Name, struct, list, and whether there is a residual. Of each of these there is a kernel for rows and one for columns.
#define KERNELS(KERNEL)                                                                             \
  KERNEL(moments, MomentsArguments, MOMENTS_ARGUMENTS, false)                                       \
  KERNEL(normalize, NormalizeArguments, NORMALIZE_ARGUMENTS, false)                                 \
  KERNEL(normalize_residual, NormalizeArguments, NORMALIZE_RESIDUAL_ARGUMENTS, true)                \
  KERNEL(gradient_sums, GradientSumsArguments, GRADIENT_SUMS_ARGUMENTS, false)                      \
  KERNEL(gradient_sums_residual, GradientSumsArguments, GRADIENT_SUMS_RESIDUAL_ARGUMENTS, true)     \
  KERNEL(input_gradient, InputGradientArguments, INPUT_GRADIENT_ARGUMENTS, false)                   \
  KERNEL(input_gradient_residual, InputGradientArguments, INPUT_GRADIENT_RESIDUAL_ARGUMENTS, true)
// clang-format on

// READ_ARRAY(type) and WRITE_ARRAY(type) are pointers on the GPU, and MXNet's arrays on the host.
#define READ_FIELD(type, name) READ_ARRAY(type) name;
#define WRITE_FIELD(type, name) WRITE_ARRAY(type) name;
#define NUMBER_FIELD(type, name) type name;

// A struct has what the kernels with and without a residual take. A kernel leaves at 0 what it does not take.
struct MomentsArguments {
  MOMENTS_ARGUMENTS(READ_FIELD, WRITE_FIELD, NUMBER_FIELD)
};
struct NormalizeArguments {
  NORMALIZE_RESIDUAL_ARGUMENTS(READ_FIELD, WRITE_FIELD, NUMBER_FIELD)
};
struct GradientSumsArguments {
  GRADIENT_SUMS_ARGUMENTS(READ_FIELD, WRITE_FIELD, NUMBER_FIELD)
  GRADIENT_SUMS_OF_RESIDUAL(READ_FIELD, WRITE_FIELD, NUMBER_FIELD)
};
struct InputGradientArguments {
  INPUT_GRADIENT_RESIDUAL_ARGUMENTS(READ_FIELD, WRITE_FIELD, NUMBER_FIELD)
  EPILOGUE_ARGUMENTS(NUMBER_FIELD)
};
