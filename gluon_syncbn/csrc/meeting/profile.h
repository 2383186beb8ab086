// When each device came to a meeting of a layer, and when it went on: what gluon_syncbn.profile shows. Off, it costs a
// look at a flag per call.
#pragma once

#include <cstdint>
#include <string>

#include "meeting/waiting.h"

namespace gluon_syncbn {

// One pass of one layer on one device, whose threads take part one after the other. What it has seen is kept when it
// goes, if the profile was on when it was made, and the devices have met.
class ProfiledPass {
 public:
  ProfiledPass(const std::string& layer, const std::string& device, bool is_forward);
  ~ProfiledPass();
  ProfiledPass(const ProfiledPass&) = delete;
  ProfiledPass& operator=(const ProfiledPass&) = delete;

  // The device is about to leave what it brings.
  void arrive();

  // They have met, `at` which place in which round.
  void leave(const void* at, uint64_t round_id);

 private:
  const std::string &layer_, &device_;
  const bool is_forward_, is_on_;
  Clock::time_point started_{}, arrived_{}, left_{};
  const void* place_ = nullptr;
  uint64_t round_id_ = 0;
};

}  // namespace gluon_syncbn
