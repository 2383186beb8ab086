#include "meeting/watchdog.h"

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "exported.h"

namespace gluon_syncbn {
namespace {

// It stands still for a fork for so long at most: threads that keep the fork from happening may need it.
constexpr Seconds kStandstill{2};

struct Watchdog {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::weak_ptr<Watched>> watched;
  std::optional<SignalWatch> signals;
  bool runs = false, looks = false, stands_still = false;
  // `watch` sets `opened` before it reads `sleeps`, and the thread sets `sleeps` before it reads `opened`: one of the
  // two sees the other.
  std::atomic<uint64_t> opened{0};
  std::atomic<bool> sleeps{false};
};

// Never destroyed, because rounds may be open while the process exits; replaced in a process that was forked.
std::atomic<Watchdog*> current{new Watchdog};

// Returns the waits that are still open.
OpenWaits look(Watchdog& dog, std::unique_lock<std::mutex>& lock) {
  dog.looks = true;
  std::vector<std::shared_ptr<Watched>> all;
  for (const std::weak_ptr<Watched>& item : dog.watched) {
    if (auto alive = item.lock()) all.push_back(std::move(alive));
  }
  dog.watched.assign(all.begin(), all.end());
  lock.unlock();
  OpenWaits open;
  for (std::shared_ptr<Watched>& item : all) {
    const OpenWaits its = item->end_overdue();
    open.add(its.oldest, its.deadline);
    item.reset();
  }
  const auto now = Clock::now();
  const bool is_long = open.oldest < now && now - open.oldest > waiting_times().poll;
  lock.lock();
  if (!is_long) {
    dog.signals.reset();
  } else if (dog.signals) {
    renew_watch();
  } else {
    dog.signals.emplace();
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

void watch(const std::shared_ptr<Watched>& item) {
  Watchdog& dog = *current;
  dog.opened += 1;
  if (item->known_to_ == &dog && !dog.sleeps) return;
  std::lock_guard<std::mutex> lock(dog.mutex);
  if (!dog.runs) std::thread([&dog] { run(dog); }).detach();
  dog.runs = true;
  if (item->known_to_ != &dog) dog.watched.push_back(item);
  item->known_to_ = &dog;
  dog.opened += 1;  // again: a look that has begun since does not see `item`
  dog.changed.notify_all();
}

}  // namespace gluon_syncbn

using namespace gluon_syncbn;

// Returns when the watchdog stands still, until `gluon_syncbn_after_fork`.
EXPORTED void gluon_syncbn_before_fork() {
  Watchdog& dog = *current;
  std::unique_lock<std::mutex> lock(dog.mutex);
  dog.changed.wait(lock, [&] { return !dog.looks; });
  dog.stands_still = true;
  dog.signals.reset();
}

EXPORTED void gluon_syncbn_after_fork(int is_child) {
  if (is_child) {
    current = new Watchdog;  // a thread that is gone may hold the lock of the other
    return;
  }
  Watchdog& dog = *current;
  std::lock_guard<std::mutex> lock(dog.mutex);
  dog.stands_still = false;
  dog.changed.notify_all();
}
