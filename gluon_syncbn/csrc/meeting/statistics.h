// The arithmetic of per-channel vectors, in float64: of those that cross devices, and of Batch Renormalization.
#pragma once

#include <vector>

namespace gluon_syncbn {

using Vectors = std::vector<std::vector<double>>;  // one per rank, in rank order

// Per channel: number of values, their mean, and the centred sum of squares M2 = Σ (x − mean)².
struct Moments {
  double count = 0;
  std::vector<double> mean;
  std::vector<double> m2;

  // Returns one vector of 2C + 1 numbers: the whole forward message of a rank.
  std::vector<double> pack() const;
};

// Moments of the whole mini-batch from packed moments, by the pairwise formula of Chan, Golub and LeVeque ("Updating
// Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979) for many parts at once, in rank order.
Moments merge(const Vectors& packed);

// The sum of the vectors, first to last.
std::vector<double> add_ranks(const Vectors& vectors);

// Batch Renormalization (Ioffe, "Batch Renormalization: Towards Reducing Minibatch Dependence in Batch-Normalized
// Models", 2017): x̂·r + d takes the place of x̂, with
//
//   r = σ/σ_running, held between 1/r_max and r_max        d = (mean − running mean)/σ_running, held within ±d_max
//
// where σ = √(var + ε). Both count as constants in the backward pass. With r_max = 1 and d_max = 0 it is Batch
// Normalization.
struct RenormLimits {
  double r_max = 1;
  double d_max = 0;

  bool is_off() const { return r_max == 1 && d_max == 0; }
};

// r and d of each channel.
struct RenormVectors {
  std::vector<double> r, d;
};

// From the statistics of the mini-batch and the running statistics.
RenormVectors renorm_vectors(const RenormLimits& limits, double epsilon, const std::vector<double>& mean,
                             const std::vector<double>& variance, const std::vector<double>& running_mean,
                             const std::vector<double>& running_variance);

}  // namespace gluon_syncbn
