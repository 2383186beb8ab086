#include "meeting/watchdog.h"

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "exported.h"
#include "meeting/threads.h"

namespace gluon_syncbn {
namespace {

// How long it stands still for a fork at most: one that other threads keep from happening may need it.
constexpr Seconds kStandstill{2};

struct Watchdog {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::weak_ptr<Watched>> watched;
  std::optional<SignalWatch> signals;
  bool runs = false, looks = false, stands_still = false;
  // A new one comes before the look at `sleeps`, `sleeps` before the look at `opened`: one of the two sees the other.
  std::atomic<uint64_t> opened{0};
  std::atomic<bool> sleeps{false};
};

// Never destroyed, because rounds may be open while the process exits; replaced in a process that was forked.
std::atomic<Watchdog*> current{new Watchdog};

// What is still open.
OpenWaits look(Watchdog& dog, std::unique_lock<std::mutex>& lock) {
  dog.looks = true;
  std::vector<std::shared_ptr<Watched>> all;
  for (size_t i = 0; i < dog.watched.size();) {
    if (auto who = dog.watched[i].lock()) {
      all.push_back(std::move(who));
      ++i;
    } else {
      std::swap(dog.watched[i], dog.watched.back());
      dog.watched.pop_back();
    }
  }
  lock.unlock();
  OpenWaits open;
  for (std::shared_ptr<Watched>& who : all) {
    const OpenWaits its = who->end_overdue();
    open.add(its.oldest, its.deadline);
    who.reset();
  }
  const auto now = Clock::now();
  const bool is_long = open.oldest < now && now - open.oldest > waiting_times().poll;
  lock.lock();
  if (is_long != dog.signals.has_value()) {
    if (is_long) {
      dog.signals.emplace();
    } else {
      dog.signals.reset();
    }
  }
  dog.looks = false;
  dog.changed.notify_all();
  return open;
}

void run(Watchdog& dog) {
  std::unique_lock<std::mutex> lock(dog.mutex);
  for (;;) {
    if (!dog.changed.wait_for(lock, kStandstill, [&] { return !dog.stands_still; })) dog.stands_still = false;
    const uint64_t opened = dog.opened;
    const OpenWaits open = look(dog, lock);
    if (open.oldest == Clock::time_point::max()) {
      dog.sleeps = true;
      if (dog.opened == opened) dog.changed.wait(lock, [&] { return dog.opened != opened; });
      dog.sleeps = false;
    }
    const auto now = Clock::now();
    const Seconds left = open.deadline > now ? Seconds(open.deadline - now) : Seconds(0);
    dog.changed.wait_for(lock, std::min<Seconds>(waiting_times().poll, left));
  }
}

}  // namespace

void watch(const std::shared_ptr<Watched>& who) {
  Watchdog& dog = *current;
  dog.opened += 1;
  if (who->known_to_ == &dog && !dog.sleeps) return;
  std::lock_guard<std::mutex> lock(dog.mutex);
  if (!dog.runs) std::thread([&dog] { run(dog); }).detach();
  dog.runs = true;
  if (who->known_to_ != &dog) dog.watched.push_back(who);
  who->known_to_ = &dog;
  dog.opened += 1;  // again: a look that has begun since does not see `who`
  dog.changed.notify_all();
}

}  // namespace gluon_syncbn

// What Python calls (base/library.py), without the interpreter lock

// Returns when the watchdog stands still, until `gluon_syncbn_after_fork`.
EXPORTED void gluon_syncbn_before_fork() {
  gluon_syncbn::Watchdog& dog = *gluon_syncbn::current;
  std::unique_lock<std::mutex> lock(dog.mutex);
  dog.changed.wait(lock, [&] { return !dog.looks; });
  dog.stands_still = true;
  dog.signals.reset();
}

EXPORTED void gluon_syncbn_after_fork(int is_child) {
  if (is_child) {
    gluon_syncbn::current = new gluon_syncbn::Watchdog;  // the lock of the other may be held, by a thread that is gone
    gluon_syncbn::forget_threads();
    return;
  }
  gluon_syncbn::Watchdog& dog = *gluon_syncbn::current;
  std::lock_guard<std::mutex> lock(dog.mutex);
  dog.stands_still = false;
  dog.changed.notify_all();
}
