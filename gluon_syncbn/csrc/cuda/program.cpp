#include "cuda/program.h"

#include <algorithm>
#include <memory>
#include <type_traits>

#include "cuda/context.h"

namespace gluon_syncbn {
namespace {

// The types of arrays of which each program has its own.
struct value_t;
struct real_t;

// MXNet's flag for a type in arguments.cuh, in the program for activations of type `values`.
template <typename Type>
int flag_of(DType values) {
  if constexpr (std::is_same_v<Type, value_t>) {
    return static_cast<int>(values);
  } else if constexpr (std::is_same_v<Type, real_t>) {
    return static_cast<int>(values == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32);
  } else if constexpr (std::is_same_v<Type, int>) {
    return kInt32;
  } else if constexpr (std::is_same_v<Type, int64>) {
    return kInt64;
  } else {
    static_assert(std::is_same_v<Type, double>);
    return static_cast<int>(DType::kFloat64);
  }
}

#define READ_PARAMETER(type, name) {true, true, flag_of<type>(dtype)},
#define WRITE_PARAMETER(type, name) {true, false, flag_of<type>(dtype)},
#define NUMBER_PARAMETER(type, name) {false, true, flag_of<type>(dtype)},
#define PARAMETERS(LIST) {LIST(READ_PARAMETER, WRITE_PARAMETER, NUMBER_PARAMETER)}

// Arguments as MXNet takes them: handles of arrays, and addresses of numbers.
#define ARRAY_ADDRESS(type, name) arguments.name->handle(),
#define NUMBER_ADDRESS(type, name) &arguments.name,
#define ADDRESSES(LIST) {LIST(ARRAY_ADDRESS, ARRAY_ADDRESS, NUMBER_ADDRESS)}

std::string& source() {
  static auto* text = new std::string;
  return *text;
}

}  // namespace

void GpuProgram::set_source(const char* text) { source() = text; }

GpuProgram& GpuProgram::of(DType dtype) {
  // Never destroyed: CUDA may be gone when the process ends.
  static auto* mutex = new std::mutex;
  static auto* programs = new std::map<DType, std::unique_ptr<GpuProgram>>;
  std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<GpuProgram>& program = (*programs)[dtype];
  if (!program) program.reset(new GpuProgram(dtype));
  return *program;
}

GpuProgram::GpuProgram(DType dtype) {
  const Tuning tuning;
  const std::string type = "-DVALUE_TYPE=" + std::to_string(static_cast<int>(dtype));
  const std::string threads = "-DTHREADS=" + std::to_string(tuning.threads);
  const std::string unroll = "-DUNROLL=" + std::to_string(tuning.unroll);
  const char* options[] = {"--std=c++11", type.c_str(), threads.c_str(), unroll.c_str()};
  void* program = nullptr;
  check_mxnet(mxnet().program_create(source().c_str(), 4, options, 0, nullptr, &program),
              "the CUDA kernels could not be compiled at run time");
#define CREATE(kernel, Arguments, LIST, has_residual) \
  create(program, #kernel "_rows", PARAMETERS(LIST)); \
  create(program, #kernel "_columns", PARAMETERS(LIST));
  KERNELS(CREATE)
#undef CREATE
  create(program, "fill_nan", PARAMETERS(FILL_NAN_ARGUMENTS));
}

void GpuProgram::create(void* program, const std::string& kernel, const std::vector<Parameter>& parameters) {
  std::vector<int> is_array, is_const, dtypes;
  for (const Parameter& parameter : parameters) {
    is_array.push_back(parameter.is_array);
    is_const.push_back(parameter.is_const);
    dtypes.push_back(parameter.dtype);
  }
  check_mxnet(mxnet().kernel_create(program, kernel.c_str(), static_cast<int>(parameters.size()), is_array.data(),
                                    is_const.data(), dtypes.data(), &kernels_[kernel]),
              "CUDA kernel " + kernel + " was not made");
}

#define DEFINE(kernel, Arguments, LIST, has_residual)                                                    \
  void GpuProgram::kernel(int device, const Launch& launch, const Layout& layout, Arguments arguments) { \
    arguments.outer = layout.outer;                                                                      \
    arguments.channels = layout.channels;                                                                \
    arguments.inner = layout.inner;                                                                      \
    arguments.aligned = launch.aligned;                                                                  \
    const unsigned grid[] = {launch.grid_x, launch.grid_y}, block[] = {launch.block_x, launch.block_y};  \
    void* addresses[] = ADDRESSES(LIST);                                                                 \
    call(launch.rows ? #kernel "_rows" : #kernel "_columns", device, grid, block, addresses);            \
  }
KERNELS(DEFINE)
#undef DEFINE

void GpuProgram::fill_nan(int device, const Array& values, int64_t size) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(1024, (size + 1023) / 1024));
  const unsigned grid[] = {blocks, 1}, block[] = {256, 1};
  struct {
    const Array* values;
    int64 size;
  } arguments{&values, size};
  void* addresses[] = ADDRESSES(FILL_NAN_ARGUMENTS);
  call("fill_nan", device, grid, block, addresses);
}

void GpuProgram::call(const std::string& kernel, int device, const unsigned* grid, const unsigned* block,
                      void** arguments) {
  const GpuContext context(device);
  std::lock_guard<std::mutex> lock(mutex_);
  check_mxnet(
      mxnet().kernel_call(kernels_.at(kernel), device, arguments, grid[0], grid[1], 1, block[0], block[1], 1, 0),
      "CUDA kernel " + kernel + " could not be launched on gpu(" + std::to_string(device) + ")");
}

const double* find_moments(GpuProgram& program, int device, const Launch& launch, const Layout& layout, const Array& x,
                           const Array& running_mean, const Array& running_var, bool wants_running,
                           const Scratch& scratch) {
  const double ticket = Scratch::next_ticket();
  MomentsArguments arguments{};
  arguments.x = &x;
  arguments.running_mean = &running_mean;
  arguments.running_var = &running_var;
  arguments.partials = &scratch.partials;
  arguments.counters = &scratch.counters;
  arguments.message = &scratch.message;
  arguments.ticket = ticket;
  arguments.wants_running = wants_running;
  program.moments(device, launch, layout, arguments);
  return scratch.wait(ticket);
}

void check_gpu(int device) {
  GpuProgram& program = GpuProgram::of(DType::kFloat32);
  const float values[] = {1, 2, 3, 6};
  const Layout layout{1, 1, 4};
  const Array x(new_array(kGpu, device, static_cast<int>(DType::kFloat32), 4));
  check_mxnet(mxnet().array_copy_from_cpu(x.handle(), values, 4), "numbers could not be copied to a GPU");
  const Launch launch = launch_for(DType::kFloat32, layout, {x.data()});
  const auto scratch = Scratch::lease(device, launch, layout);
  const Array unused(new_array(kGpu, device, static_cast<int>(DType::kFloat32), 1));
  const Array unused_too(new_array(kGpu, device, static_cast<int>(DType::kFloat32), 1));
  const double* numbers = find_moments(program, device, launch, layout, x, unused, unused_too, false, *scratch);
  if (numbers[0] != 3 || numbers[1] != 14) {
    throw MXNetFailure("the moments of 1, 2, 3, 6 came out as " + std::to_string(numbers[0]) + " and " +
                       std::to_string(numbers[1]) + ", not 3 and 14");
  }
  Scratch::give_back(scratch);
}

}  // namespace gluon_syncbn
