#include "meeting/statistics.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace gluon_syncbn {

std::vector<double> Moments::pack() const {
  std::vector<double> message;
  message.reserve(1 + 2 * mean.size());
  message.push_back(count);
  message.insert(message.end(), mean.begin(), mean.end());
  message.insert(message.end(), m2.begin(), m2.end());
  return message;
}

Moments merge(const Vectors& packed) {
  const size_t channels = (packed.front().size() - 1) / 2;
  Moments merged{0, std::vector<double>(channels, 0.0), std::vector<double>(channels, 0.0)};
  for (const std::vector<double>& part : packed) merged.count += part[0];
  std::vector<double> rest(channels, 0.0);  // taken from the mean by rounding; so equal means stay as they are
  for (const std::vector<double>& part : packed) {
    const double share = part[0] / merged.count;
    for (size_t c = 0; c < channels; ++c) merged.mean[c] += part[1 + c] * share;
  }
  for (const std::vector<double>& part : packed) {
    const double share = part[0] / merged.count;
    for (size_t c = 0; c < channels; ++c) rest[c] += (part[1 + c] - merged.mean[c]) * share;
  }
  for (size_t c = 0; c < channels; ++c) merged.mean[c] += rest[c];
  for (const std::vector<double>& part : packed) {
    for (size_t c = 0; c < channels; ++c) {
      const double distance = part[1 + c] - merged.mean[c];
      merged.m2[c] += part[1 + channels + c] + part[0] * distance * distance;
    }
  }
  return merged;
}

std::vector<double> add_ranks(const Vectors& vectors) {
  std::vector<double> total(vectors.front().size(), 0.0);
  for (const std::vector<double>& vector : vectors) {
    for (size_t i = 0; i < total.size(); ++i) total[i] += vector[i];
  }
  return total;
}

RenormVectors renorm_vectors(const RenormLimits& limits, double epsilon, const std::vector<double>& mean,
                             const std::vector<double>& variance, const std::vector<double>& running_mean,
                             const std::vector<double>& running_variance) {
  RenormVectors made;
  for (size_t c = 0; c < mean.size(); ++c) {  // NaN stays
    const double deviation = std::sqrt(running_variance[c] + epsilon);
    made.r.push_back(std::clamp(std::sqrt(variance[c] + epsilon) / deviation, 1 / limits.r_max, limits.r_max));
    made.d.push_back(std::clamp((mean[c] - running_mean[c]) / deviation, -limits.d_max, limits.d_max));
  }
  return made;
}

}  // namespace gluon_syncbn
