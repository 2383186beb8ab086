// Kernels, rendezvous and launches as plain C functions, without MXNet, for tests and benchmarks (standalone.py).
// dtypes are MXNet's type flags; tensors are (outer, channels, inner); vectors are float64 of length `channels`.

#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/launch.h"
#include "exported.h"
#include "meeting/rendezvous.h"
#include "meeting/waiting.h"

using namespace gluon_syncbn;

namespace {

std::vector<double> vector_of(const double* values, int64_t size) { return {values, values + size}; }

Affine affine_of(int dtype, int64_t channels, const double* mean, const double* scale, const double* beta,
                 int activation, double slope) {
  return Affine::rounded(dtype_of(dtype), vector_of(mean, channels), vector_of(scale, channels),
                         vector_of(beta, channels), {static_cast<Activation::Kind>(activation), slope});
}

Outcome meet(void* rendezvous, int rank, std::vector<double> contribution, int64_t key) {
  return wait_for([&](Rendezvous::Then then) {
    (*static_cast<std::shared_ptr<Rendezvous>*>(rendezvous))
        ->arrive(static_cast<size_t>(rank), std::move(contribution), static_cast<uint64_t>(key), std::move(then));
  });
}

}  // namespace

EXPORTED void gluon_syncbn_moments(int dtype, const void* x, int64_t outer, int64_t channels, int64_t inner,
                                   int threads, double* mean, double* m2) {
  const Moments result = moments(dtype_of(dtype), x, {outer, channels, inner}, threads);
  std::memcpy(mean, result.mean.data(), result.mean.size() * sizeof(double));
  std::memcpy(m2, result.m2.data(), result.m2.size() * sizeof(double));
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
  std::memcpy(sums, result.dz.data(), result.dz.size() * sizeof(double));
  std::memcpy(centred, result.dz_centred.data(), result.dz_centred.size() * sizeof(double));
}

// dx = factor·dz + slope·(v − mean) + constant
EXPORTED void gluon_syncbn_input_gradient(int dtype, const void* values, const void* d_out, const void* out,
                                          int in_place, int64_t outer, int64_t channels, int64_t inner,
                                          const double* mean, const double* scale, const double* beta, int activation,
                                          double activation_slope, const double* factor, const double* slope,
                                          const double* constant, void* dx, int add, int threads) {
  const InputGradient gradient{vector_of(factor, channels), vector_of(slope, channels), vector_of(constant, channels)};
  input_gradient(dtype_of(dtype), {values, d_out, out, in_place != 0}, {outer, channels, inner},
                 affine_of(dtype, channels, mean, scale, beta, activation, activation_slope), gradient, dx, add != 0,
                 threads);
}

EXPORTED void* gluon_syncbn_rendezvous_new(const char* what, int num_ranks, double timeout_seconds) {
  waiting_times() = {Seconds(2), Seconds(0.1)};  // which in the product come from Python
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
  try {
    const Outcome gathered = meet(rendezvous, rank, vector_of(values, size), key);
    std::memset(values, 0, static_cast<size_t>(size) * sizeof(double));
    for (const std::vector<double>& contribution : *gathered.contributions) {
      for (size_t i = 0; i < contribution.size(); ++i) values[i] += contribution[i];
    }
    return static_cast<int64_t>(gathered.round_id);
  } catch (const RendezvousError& problem) {
    std::snprintf(error, static_cast<size_t>(error_size), "%s", problem.what());
    return 0;
  }
}

// Meets, for benchmarks, `meetings` times as `rank`, and stores when it arrived and when it was released, in seconds,
// as pairs in `times`.
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

// Threads and unroll of a GPU's kernels as the operator has them.
EXPORTED void gluon_syncbn_default_tuning(int64_t* numbers) {
  numbers[0] = Tuning().threads;
  numbers[1] = Tuning().unroll;
}

// How a GPU's kernels are launched for tensors at these `count` addresses; `launch` gets rows, aligned, grid (2), block
// (2), and the sizes of partials and counters. `tuning` is threads, unroll and blocks, or null for what the operator
// takes.
EXPORTED void gluon_syncbn_launch_for(int dtype, int64_t outer, int64_t channels, int64_t inner,
                                      const void* const* addresses, int count, const int64_t* tuning, int64_t* launch) {
  const Layout layout{outer, channels, inner};
  const Tuning tuned = tuning ? Tuning{tuning[0], tuning[1], tuning[2]} : Tuning{};
  const Launch chosen =
      launch_for(dtype_of(dtype), layout, std::vector<const void*>(addresses, addresses + count), tuned);
  const int64_t numbers[] = {chosen.rows,    chosen.aligned, chosen.grid_x,           chosen.grid_y,
                             chosen.block_x, chosen.block_y, chosen.partials(layout), chosen.counters()};
  std::memcpy(launch, numbers, sizeof numbers);
}
