// The two messages that cross devices, side by side: nothing else ever does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "meeting/group.h"
#include "cpu/kernels.h"

namespace gluon_syncbn {

// In place of `taking_part` where the forward pass was in prediction mode, and no one met.
constexpr int64_t kPrediction = -1;

// Of the values of all devices that take part; and by which round they were found, for the backward pass. In prediction
// mode count and number are 0.
struct Statistics {
  double count;  // of values per channel
  std::vector<double> mean;
  std::vector<double> variance;  // biased
  uint64_t number;               // of the forward round
  int64_t taking_part;           // the list of those that took part
};

// Brings 2C + 1 numbers, this device's count, mean and M2, and merges those of all devices in rank order. Throws
// RendezvousError where a device does not come.
Statistics all_reduce_moments(Group& group, const std::string& device, const Moments& local);

// Brings 2C numbers, this device's S1 and S2, and adds up those of all devices in rank order. `number` and `taking_part`
// are those of the forward pass. Throws as above.
std::vector<double> all_reduce_sums(Group& group, const std::string& device, std::vector<double> local, uint64_t number,
                                    int64_t taking_part);

// Whether the statistics were those of the mini-batch, of count, number and taking_part as the forward pass has left
// them. Throws std::runtime_error if no forward pass has left this: MXNet runs the backward pass of a forward pass that
// it has not run, because its input had failed, once someone has been told of that.
bool was_training(const Group& group, const std::string& device, const double* left);

}  // namespace gluon_syncbn
