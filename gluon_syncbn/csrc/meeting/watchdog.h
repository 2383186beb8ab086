// The one thread that ends what would wait in vain: rounds of the rendezvous whose timeout has passed, or whose wait is
// to end earlier (waiting.h).
//
// It looks at everything that has ever had something open, once per poll interval, or at the earliest deadline, as long
// as something is open or has been opened since the last look. Otherwise it sleeps, and the next `watch` wakes it. So
// in training an open round costs some atomic operations, and the thread wakes ten times per second.
//
// While something has been open for longer than the poll interval, Ctrl-C and SIGTERM are noticed (SignalWatch).
//
// A fork takes no thread along, but the locks that threads hold. So Python has the watchdog stand still between two
// looks before it forks (`gluon_syncbn_before_fork`), and the child gets another with the next `watch`. At exit it is
// left alone: what it needs is never destroyed.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "meeting/waiting.h"

namespace gluon_syncbn {

// What is open: since when, and until when at most. As they are made, nothing.
struct OpenWaits {
  Clock::time_point oldest = Clock::time_point::max(), deadline = Clock::time_point::max();

  void add(Clock::time_point began, Clock::time_point until) {
    oldest = std::min(oldest, began);
    deadline = std::min(deadline, until);
  }
};

class Watched {
 public:
  virtual ~Watched() = default;

  // Ends what has waited long enough, and returns what is still open. Called by the watchdog, without a lock.
  virtual OpenWaits end_overdue() = 0;

 private:
  friend void watch(const std::shared_ptr<Watched>& who);
  std::atomic<const void*> known_to_{nullptr};  // the watchdog
};

// Must be called under the lock of `who` before something is opened there. Throws std::system_error if there can be no
// thread.
void watch(const std::shared_ptr<Watched>& who);

}  // namespace gluon_syncbn
