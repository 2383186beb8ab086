// When each device came to a meeting of a layer, and when it went on, for gluon_syncbn.profile. While the profile is
// off, a pass only reads a flag.
#pragma once

#include <cstdint>
#include <string>

#include "meeting/step.h"

namespace gluon_syncbn {

// One pass of one layer on one device, whose threads take part one after the other. Its destructor records the times,
// if the profile was on when the pass began, and the devices have met.
class ProfiledPass {
 public:
  ProfiledPass(const std::string& layer, const std::string& device, bool is_forward);
  ~ProfiledPass();
  ProfiledPass(const ProfiledPass&) = delete;
  ProfiledPass& operator=(const ProfiledPass&) = delete;

  // The device is about to leave its message.
  void arrive();

  // The devices have met in this round; `at` is the rendezvous.
  void leave(const void* at, int64_t round_id);

 private:
  const std::string &layer_, &device_;
  const bool is_forward_, is_on_;
  Clock::time_point started_{}, arrived_{}, left_{};
  const void* place_ = nullptr;
  int64_t round_id_ = 0;
};

}  // namespace gluon_syncbn
