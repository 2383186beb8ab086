// The two messages that cross devices, side by side: nothing else does.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "meeting/group.h"
#include "meeting/profile.h"
#include "meeting/statistics.h"

namespace gluon_syncbn {

// The facts that a backward pass needs of its forward pass, saved after mean and invstd. In prediction mode, where
// devices do not meet, count and round are 0.
struct ForwardCall {
  static constexpr int kSize = 3;  // as numbers
  static constexpr int64_t kPrediction = -1;

  double count = 0;  // of values per channel, on all devices
  int64_t round_id = 0;
  int64_t active_set = kPrediction;

  bool is_training() const { return active_set != kPrediction; }
  void save(double* numbers) const;

  // Calls `throw_never_ran` if no forward pass has saved this: MXNet skips a forward pass whose input has failed, and
  // runs its backward pass after the error has been thrown.
  static ForwardCall load(const Group& group, const std::string& device, const double* numbers);
};

// The error of a backward pass whose forward pass never ran.
[[noreturn]] void throw_never_ran(const Group& group, const std::string& device);

// Statistics of the values of all devices in the active set.
struct Statistics {
  ForwardCall call;
  std::vector<double> mean;
  std::vector<double> variance;  // biased
};

// One pass of one device through its layer's rendezvous: it brings a message, and has the result when `done` is called,
// once and on any thread. It must not move until then. If `bring_...` throws, `done` is not called.
class Meeting {
 public:
  Meeting(Group& group, const std::string& device, bool is_forward)
      : group_(group), device_(device), is_forward_(is_forward) {}

  using Done = std::function<void()>;

  // Begin and end of the pass, for the profile.
  void begin_pass() { profile_.emplace(group_.name, device_, is_forward_); }
  void end_pass() { profile_.reset(); }

  // 2C + 1 numbers: this device's count, mean and M2.
  void bring_moments(Moments local, Done done);

  // 2C numbers: this device's S1 and S2.
  void bring_sums(std::vector<double> local, const ForwardCall& call, Done done);

  // Merged, or added up, in rank order. Throw RendezvousError where a device did not come.
  Statistics statistics() const;
  std::vector<double> sums() const;

 private:
  void bring(std::vector<double> local, int64_t key, Done done);
  const Vectors& brought() const;

  Group& group_;
  const std::string& device_;
  const bool is_forward_;
  std::optional<ProfiledPass> profile_;
  int64_t active_set_ = 0;
  Outcome outcome_;
};

}  // namespace gluon_syncbn
