// Kernels, rendezvous and launches as plain C functions, without MXNet, for tests and benchmarks (standalone.py).
// dtypes are MXNet's type flags; tensors are (outer, channels, inner); vectors are float64 of length `channels`.

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/driver.h"
#include "cuda/launch.h"
#include "cuda/program.h"
#include "exported.h"
#include "meeting/rendezvous.h"
#include "meeting/waiting.h"

using namespace gluon_syncbn;

namespace {

std::vector<double> vector_of(const double* values, int64_t size) { return {values, values + size}; }
void copy(const std::vector<double>& from, double* to) { std::copy(from.begin(), from.end(), to); }

Affine affine_of(int dtype, int64_t channels, const double* mean, const double* scale, const double* beta,
                 int activation, double slope) {
  return Affine::rounded(dtype_of(dtype), vector_of(mean, channels), vector_of(scale, channels),
                         vector_of(beta, channels), {static_cast<Activation::Kind>(activation), slope});
}

// Leaves the text of an exception in `error`. Returns 0, or 1.
template <typename Action>
int or_error(char* error, int64_t error_size, const Action& action) {
  try {
    action();
    return 0;
  } catch (const std::exception& problem) {
    std::snprintf(error, static_cast<size_t>(error_size), "%s", problem.what());
    return 1;
  }
}

Outcome meet(void* rendezvous, int rank, std::vector<double> contribution, int64_t key) {
  Outcome outcome;
  wait_until_done([&](const std::function<void()>& done) {
    (*static_cast<std::shared_ptr<Rendezvous>*>(rendezvous))
        ->arrive(static_cast<size_t>(rank), std::move(contribution), key, [&outcome, done](const Outcome& seen) {
          outcome = seen;
          done();
        });
  });
  if (!outcome.error.empty()) throw RendezvousError(outcome.error);
  return outcome;
}

}  // namespace

EXPORTED void gluon_syncbn_moments(int dtype, const void* x, int64_t outer, int64_t channels, int64_t inner,
                                   int threads, double* mean, double* m2) {
  const Moments result = moments(dtype_of(dtype), x, {outer, channels, inner}, threads);
  copy(result.mean, mean);
  copy(result.m2, m2);
}

// y = activation((x − mean)·scale + beta + skip); null is no skip. Activations are numbered as Activation::Kind.
EXPORTED void gluon_syncbn_normalize(int dtype, const void* x, const void* skip, int64_t outer, int64_t channels,
                                     int64_t inner, const double* mean, const double* scale, const double* beta,
                                     int activation, double slope, void* y, int threads) {
  normalize(dtype_of(dtype), x, skip, {outer, channels, inner},
            affine_of(dtype, channels, mean, scale, beta, activation, slope), y, threads);
}

// Σ dz and Σ dz·(v − mean), mean rounded to the tensor's precision; see BackwardInput. Null is no `out`, and no
// `d_skip`.
EXPORTED void gluon_syncbn_gradient_sums(int dtype, const void* values, const void* d_out, const void* out,
                                         int in_place, int64_t outer, int64_t channels, int64_t inner,
                                         const double* mean, const double* scale, const double* beta, int activation,
                                         double slope, void* d_skip, int add_to_skip, int threads, double* sums,
                                         double* centred) {
  const GradientSums result = gradient_sums(
      dtype_of(dtype), {values, d_out, out, in_place != 0}, {outer, channels, inner},
      affine_of(dtype, channels, mean, scale, beta, activation, slope), d_skip, add_to_skip != 0, threads);
  copy(result.dz, sums);
  copy(result.dz_centred, centred);
}

// dx = scale·dz + slope·(v − mean) + constant
EXPORTED void gluon_syncbn_input_gradient(int dtype, const void* values, const void* d_out, const void* out,
                                          int in_place, int64_t outer, int64_t channels, int64_t inner,
                                          const double* mean, const double* scale, const double* beta, int activation,
                                          double activation_slope, const double* slope, const double* constant,
                                          void* dx, int add, int threads) {
  const InputGradient gradient{vector_of(slope, channels), vector_of(constant, channels)};
  input_gradient(dtype_of(dtype), {values, d_out, out, in_place != 0}, {outer, channels, inner},
                 affine_of(dtype, channels, mean, scale, beta, activation, activation_slope), gradient, dx, add != 0,
                 threads);
}

EXPORTED void* gluon_syncbn_rendezvous_new(const char* what, int num_ranks, double timeout_seconds) {
  waiting_times() = {Seconds(0.5), Seconds(0.05)};  // the first is GRACE of the tests
  std::vector<std::string> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) ranks.push_back("rank " + std::to_string(rank));
  return new std::shared_ptr<Rendezvous>(std::make_shared<Rendezvous>(what, ranks, timeout_seconds, ""));
}

EXPORTED void gluon_syncbn_rendezvous_free(void* rendezvous) {
  delete static_cast<std::shared_ptr<Rendezvous>*>(rendezvous);
}

// Leaves `values`, waits, and writes the sum over ranks there. Returns the id of the round, or 0 with the error's
// text in `error`.
EXPORTED int64_t gluon_syncbn_rendezvous_meet(void* rendezvous, int rank, double* values, int64_t size, int64_t key,
                                              char* error, int64_t error_size) {
  int64_t round_id = 0;
  or_error(error, error_size, [&] {
    const Outcome gathered = meet(rendezvous, rank, vector_of(values, size), key);
    copy(add_ranks(*gathered.contributions), values);
    round_id = gathered.round_id;
  });
  return round_id;
}

// Meets `meetings` times as `rank`, for benchmarks, and stores pairs of times in seconds: of arrival and of release.
EXPORTED void gluon_syncbn_rendezvous_bench(void* rendezvous, int rank, int64_t size, int64_t meetings, double* times) {
  const auto seconds = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  for (int64_t i = 0; i < meetings; ++i) {
    std::vector<double> contribution(static_cast<size_t>(size), 1.0);
    times[2 * i] = seconds();
    meet(rendezvous, rank, std::move(contribution), 0);
    times[2 * i + 1] = seconds();
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels for GPUs. `kind` is dtype, activation, whether there is a residual, and whether the layer works in place.

namespace {

// `blocks` is tiles, parts, threads.
void launch(void* function, const unsigned* blocks, void* arguments, void* stream) {
  void* addresses[] = {arguments};
  check_cuda(cuda().launch(function, blocks[0], blocks[1], 1, blocks[2], 1, 1, 0, stream, addresses, nullptr),
             "a kernel could not be launched");
}

}  // namespace

// The operator's options for NVRTC, separated by spaces.
EXPORTED void gluon_syncbn_kernel_options(const int* kind, char* text, int64_t size) {
  const KernelKind chosen{dtype_of(kind[0]), static_cast<Activation::Kind>(kind[1]), kind[2] != 0, kind[3] != 0};
  std::string options;
  for (const std::string& option : GpuProgram::options(chosen)) options += option + ' ';
  std::snprintf(text, static_cast<size_t>(size), "%s", options.c_str());
}

// How a GPU's kernels are launched for tensors at these `count` addresses; `launch` gets rows, aligned, tile, width,
// thread_rows, tiles, parts, threads, and the sizes of partials and counters.
EXPORTED int gluon_syncbn_launch_for(int dtype, int64_t outer, int64_t channels, int64_t inner,
                                     const void* const* addresses, int count, int64_t multiprocessors, int64_t* launch,
                                     char* error, int64_t error_size) {
  return or_error(error, error_size, [&] {
    const Layout layout{outer, channels, inner};
    const Launch chosen =
        launch_for(dtype_of(dtype), layout, std::vector<const void*>(addresses, addresses + count), multiprocessors);
    const Shape& shape = chosen.shape;
    const int64_t numbers[] = {chosen.rows,  shape.aligned, shape.tile,     shape.width,       shape.rows,
                               chosen.tiles, chosen.parts,  chosen.threads, chosen.partials(), chosen.counters()};
    std::memcpy(launch, numbers, sizeof numbers);
  });
}

// Compiles as the operator does, with `count` options. Returns a text that is never freed, or null with an error's
// text.
EXPORTED const char* gluon_syncbn_compile(const char* source, const char* const* options, int count, char* error,
                                          int64_t error_size) {
  auto* ptx = new std::string;
  const auto compile = [&] { *ptx = compile_cuda(source, {options, options + count}); };
  return or_error(error, error_size, compile) == 0 ? ptx->c_str() : nullptr;
}

// Loads a compiled program onto GPU number 0.
EXPORTED void* gluon_syncbn_load(const char* ptx, char* error, int64_t error_size) {
  void* module = nullptr;
  or_error(error, error_size, [&] {
    const GpuContext context(0);
    check_cuda(cuda().load_module(&module, ptx, 0, nullptr, nullptr), "the kernels could not be loaded");
  });
  return module;
}

EXPORTED void* gluon_syncbn_function(void* module, const char* name, char* error, int64_t error_size) {
  void* function = nullptr;
  or_error(error, error_size, [&] { check_cuda(cuda().get_function(&function, module, name), name); });
  return function;
}

// An attribute (CUfunction_attribute) of a kernel.
EXPORTED int gluon_syncbn_attribute(void* function, int attribute) {
  int value = -1;
  int (*get)(int*, int, void*) = nullptr;
  find_function(dlopen("libcuda.so.1", RTLD_NOW), "cuFuncGetAttribute", get);
  if (get) get(&value, attribute, function);
  return value;
}

// Launches with a struct of arguments, on a stream of GPU number 0.
EXPORTED int gluon_syncbn_launch(void* function, const unsigned* blocks, void* arguments, void* stream, char* error,
                                 int64_t error_size) {
  return or_error(error, error_size, [&] {
    const GpuContext context(0);
    launch(function, blocks, arguments, stream);
  });
}

// Two kernels as in a forward pass, on a stream of GPU number 0, `rounds` times. Six times of each round, in
// microseconds: to launch the first; until all numbers are seen in `message`; until the stream is idle; to launch the
// second; until a value of the output at `y`, `value_size` bytes in pinned memory, is seen to change; until the stream
// is idle.
EXPORTED int gluon_syncbn_latencies(void* moments, void* normalize, const unsigned* moments_blocks,
                                    const unsigned* normalize_blocks, MomentsArguments* first,
                                    NormalizeArguments* second, volatile uint64_t* message, void* y, int value_size,
                                    int rounds, double* times, char* error, int64_t error_size) {
  return or_error(error, error_size, [&] {
    using Time = std::chrono::steady_clock;
    const GpuContext context(0);
    void* stream = nullptr;
    check_cuda(cuda().create_stream(&stream, 1), "a stream could not be created");
    const auto wait = [&](const auto& is_done) {
      const Time::time_point until = Time::now() + std::chrono::seconds(10);
      while (!is_done()) {
        if (Time::now() > until) throw CudaFailure("a kernel has not ended within 10 s");
      }
    };
    const auto is_idle = [&] { return cuda().query_stream(stream) == 0; };
    std::vector<char> untouched(static_cast<size_t>(value_size), 0x55);
    const int64_t numbers = 2 * first->shape.channels;
    const double half = 0.5;
    uint64_t bits_of_half;
    std::memcpy(&bits_of_half, &half, sizeof half);
    for (int round = 0; round < rounds; ++round) {
      std::memcpy(y, untouched.data(), untouched.size());
      for (int64_t i = 0; i < numbers; ++i) message[i] = kNotThere;
      Time::time_point seen[7] = {Time::now()};
      launch(moments, moments_blocks, first, stream);
      seen[1] = Time::now();
      int64_t there = 0;
      wait([&] {
        while (there < numbers && message[there] != kNotThere) ++there;
        return there == numbers;
      });
      seen[2] = Time::now();
      wait(is_idle);
      seen[3] = Time::now();
      for (int64_t i = 0; i < numbers; ++i) message[i] = bits_of_half;
      launch(normalize, normalize_blocks, second, stream);
      seen[4] = Time::now();
      wait([&] { return std::memcmp(y, untouched.data(), untouched.size()) != 0; });
      seen[5] = Time::now();
      wait(is_idle);
      seen[6] = Time::now();
      for (int i = 0; i < 6; ++i) {
        times[6 * round + i] = std::chrono::duration<double, std::micro>(seen[i + 1] - seen[i]).count();
      }
    }
  });
}
