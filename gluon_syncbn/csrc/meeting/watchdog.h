// The one thread that ends waits in vain: open rounds of each rendezvous and exchanges of processes, after their
// timeout or earlier (waiting.h).
//
// It looks at each object that has ever had a wait open, once per poll interval, or at the earliest deadline, as long
// as a wait is open or has been opened since the last look. Otherwise it sleeps, and the next `watch` wakes it. So in
// training an open round costs some atomic operations, and the thread wakes ten times per second.
//
// While a wait has been open for longer than the poll interval, Ctrl-C and SIGTERM are noticed (SignalWatch).
//
// A fork copies no thread, but it copies locks that threads hold. So Python has the watchdog stand still between two
// looks before it forks (`gluon_syncbn_before_fork`), and the child gets another with the next `watch`. At exit the
// thread keeps running: its data are never destroyed.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "meeting/waiting.h"

namespace gluon_syncbn {

// The open waits: since when, and until when at most. A new one has none.
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

  // Ends waits that have lasted long enough, and returns the others. Called by the watchdog, without a lock.
  virtual OpenWaits end_overdue() = 0;

 private:
  friend void watch(const std::shared_ptr<Watched>& item);
  std::atomic<const void*> known_to_{nullptr};  // the watchdog
};

// Must be called under the lock of `item` before a wait is opened there. Throws std::system_error if there can be no
// thread.
void watch(const std::shared_ptr<Watched>& item);

}  // namespace gluon_syncbn
