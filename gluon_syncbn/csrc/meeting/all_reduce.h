// The two messages that cross devices, side by side: nothing else ever does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "meeting/group.h"
#include "meeting/profile.h"
#include "meeting/statistics.h"

namespace gluon_syncbn {

// What the backward pass must know of its forward pass, besides mean and invstd, behind which it is saved. In prediction
// mode, where nobody meets, count and round are 0.
struct ForwardCall {
  static constexpr int kSize = 3;  // as numbers
  static constexpr int64_t kPrediction = -1;

  double count = 0;  // of values per channel, on all devices
  uint64_t round_id = 0;
  int64_t active_set = kPrediction;

  bool is_training() const { return active_set != kPrediction; }
  void save(double* numbers) const;

  // Throws std::runtime_error if no forward pass has saved this: MXNet runs the backward pass of a forward pass that it
  // has not run, because its input had failed, once someone has been told of that.
  static ForwardCall load(const Group& group, const std::string& device, const double* numbers);
};

// Of the values of all devices in the active set.
struct Statistics {
  ForwardCall call;
  std::vector<double> mean;
  std::vector<double> variance;  // biased
  RenormLimits renorm = {};      // of this step
};

// Brings 2C + 1 numbers, this device's count, mean and M2 (and the step, `Moments`), and merges those of all devices in
// rank order. Throws RendezvousError where a device does not come.
Statistics all_reduce_moments(Group& group, const std::string& device, Moments local, ProfiledPass& pass);

// Brings 2C numbers, this device's S1 and S2, and adds up those of all devices in rank order. Throws as above.
std::vector<double> all_reduce_sums(Group& group, const std::string& device, std::vector<double> local,
                                    const ForwardCall& call, ProfiledPass& pass);

}  // namespace gluon_syncbn
