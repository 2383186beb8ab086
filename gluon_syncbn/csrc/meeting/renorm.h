// Batch Renormalization (Ioffe, "Batch Renormalization: Towards Reducing Minibatch Dependence in Batch-Normalized
// Models", 2017): x̂·r + d takes the place of x̂, with
//
//   r = σ/σ_running, held between 1/r_max and r_max        d = (mean − running mean)/σ_running, held within ±d_max
//
// where σ = √(var + ε). Both count as constants in the backward pass. With r_max = 1 and d_max = 0 it is Batch
// Normalization.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gluon_syncbn {

struct RenormLimits {
  double r_max = 1;
  double d_max = 0;

  // r and d of a channel; `ratio` is σ/σ_running, `distance` (mean − running mean)/σ_running.
  double r(double ratio) const { return held(ratio, 1 / r_max, r_max); }
  double d(double distance) const { return held(distance, -d_max, d_max); }
  bool is_off() const { return r_max == 1 && d_max == 0; }

 private:
  static double held(double value, double low, double high) {  // NaN stays
    return value < low ? low : value > high ? high : value;
  }
};

// r and d of each channel, from the statistics of the mini-batch and the running statistics.
struct RenormVectors {
  RenormVectors(const RenormLimits& limits, double epsilon, const std::vector<double>& mean,
                const std::vector<double>& variance, const std::vector<double>& running_mean,
                const std::vector<double>& running_variance)
      : r(mean.size()), d(mean.size()) {
    for (size_t c = 0; c < mean.size(); ++c) {
      const double deviation = std::sqrt(running_variance[c] + epsilon);
      r[c] = limits.r(std::sqrt(variance[c] + epsilon) / deviation);
      d[c] = limits.d((mean[c] - running_mean[c]) / deviation);
    }
  }

  std::vector<double> r, d;
};

}  // namespace gluon_syncbn
