// When each device came to a meeting of a layer, and when it went on, for gluon_syncbn.profile. While the profile is
// off, a pass only reads a flag.
#pragma once

#include <cstdint>
#include <optional>
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

  struct Record {
    std::string layer, device;
    bool is_forward;
    Clock::time_point started, arrived{}, left{}, ended{};
    const void* place = nullptr;
    int64_t round_id = 0;
  };

 private:
  std::optional<Record> record_;  // none if the profile was off
};

}  // namespace gluon_syncbn
