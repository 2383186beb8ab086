// The arithmetic of per-channel vectors that cross devices, in float64.
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

}  // namespace gluon_syncbn
