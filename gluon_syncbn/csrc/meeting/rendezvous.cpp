#include "meeting/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <thread>
#include <utility>

#include "exported.h"
#include "meeting/threads.h"

namespace gluon_syncbn {
namespace {

// How long a thread looks before it sleeps: GPUs of one kind mostly arrive together, and to wake a thread costs more.
constexpr std::chrono::microseconds kSpin{60};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Threads of exchanges that have not ended.
std::atomic<int> exchanges{0};

struct CountedExchange {
  CountedExchange() { exchanges += 1; }
  ~CountedExchange() { exchanges -= 1; }
};

Clock::duration ticks(double seconds) {
  constexpr double kMost = 1e9;  // more would not fit into a time
  return std::chrono::duration_cast<Clock::duration>(Seconds(std::min(seconds, kMost)));
}

}  // namespace

Rendezvous::Rendezvous(std::string what, std::vector<std::string> ranks, double timeout_seconds, std::string advice,
                       Exchange exchange)
    : what_(std::move(what)),
      ranks_(std::move(ranks)),
      timeout_seconds_(timeout_seconds),
      advice_(std::move(advice)),
      exchange_(std::move(exchange)) {}

void Rendezvous::arrive(size_t rank, std::vector<double> contribution, uint64_t key, Then then) {
  RoundPtr round;
  std::string error;
  bool is_exchanged = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = gathering_.find(key);
    if (entry != gathering_.end()) {
      round = entry->second;
    } else {
      watch(shared_from_this());
      round = std::make_shared<Round>(ranks_.size());
      gathering_.emplace(key, round);
      round->id = ++opened_;
    }
    round->then.push_back(std::move(then));
    if (round->present[rank] && contribution.empty()) return;
    if (round->present[rank]) {
      error = twice_text(*round, rank);
    } else {
      round->contributions[rank] = std::move(contribution);
      round->present[rank] = true;
      round->arrived += 1;
      if (round->arrived < ranks_.size()) return;
      error = different_lengths_text(*round);
    }
    gathering_.erase(key);
    is_exchanged = error.empty() && exchange_.exchange;
    if (is_exchanged) {
      round->exchange_ends = Clock::now() + ticks(exchange_.timeout_seconds + 2 * waiting_times().grace.count());
      exchanging_.insert(round);
    }
  }
  if (is_exchanged) {
    try {
      const auto counted = std::make_shared<CountedExchange>();
      run_on_a_thread([counted, self = shared_from_this(), round, key]() mutable {
        const auto last = std::move(counted);  // goes when all else that the thread holds has gone
        const auto place = std::move(self);
        const auto mine = std::move(round);
        place->exchange(mine, key);
      });
    } catch (const std::exception& problem) {
      fail(round, what_ + ": no thread for the exchange between processes: " + problem.what());
    }
  } else if (error.empty()) {
    end(round, {std::shared_ptr<const Vectors>(round, &round->contributions), round->id, ""});
  } else {
    fail(round, error);
  }
}

void Rendezvous::rename(size_t rank, std::string name) {
  std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank] = std::move(name);
}

size_t Rendezvous::open_rounds() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return gathering_.size();
}

uint64_t Rendezvous::rounds() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return opened_;
}

OpenWaits Rendezvous::end_overdue() {
  OpenWaits open;
  std::vector<std::pair<RoundPtr, std::string>> missed, stuck;
  const auto now = Clock::now();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = gathering_.begin(); entry != gathering_.end();) {
      const RoundPtr round = entry->second;
      if (const auto waited = ended_wait(round->opened, timeout_seconds_)) {
        missed.emplace_back(round, missing_text(*round, *waited));
        entry = gathering_.erase(entry);
        continue;
      }
      open.add(round->opened, round->opened + ticks(timeout_seconds_));
      ++entry;
    }
    for (const RoundPtr& round : exchanging_) {
      if (now >= round->exchange_ends) {
        stuck.emplace_back(round, what_ + ": all devices arrived, but the exchange between processes did not return.");
      } else {
        open.add(round->opened, round->exchange_ends);
      }
    }
  }
  for (const auto& [round, error] : missed) fail(round, error);
  for (const auto& [round, error] : stuck) end(round, {nullptr, round->id, error});
  return open;
}

void Rendezvous::exchange(const RoundPtr& round, uint64_t key) {
  Outcome outcome{nullptr, round->id, ""};
  try {
    outcome.contributions =
        std::make_shared<const Vectors>(exchange_.exchange(round->contributions, key, outcome.round_id));
  } catch (const std::exception& problem) {
    outcome.error = problem.what();
  }
  end(round, outcome);
}

void Rendezvous::fail(const RoundPtr& round, std::string error) {
  if (exchange_.fail) exchange_.fail(error);
  end(round, {nullptr, round->id, std::move(error)});
}

void Rendezvous::end(const RoundPtr& round, const Outcome& outcome) {
  std::vector<Then> then;  // none if the round has been ended already: an exchange that returned after all
  {
    std::lock_guard<std::mutex> lock(mutex_);
    then.swap(round->then);
    exchanging_.erase(round);
  }
  for (Then& next : then) next(outcome);
}

std::string Rendezvous::names(const Round& round, bool present) const {
  std::string text, last;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (round.present[rank] != present || ranks_[rank] == last) continue;  // several may go by one name
    last = ranks_[rank];
    text += (text.empty() ? "" : ", ") + last;
  }
  return text;
}

std::string Rendezvous::twice_text(const Round& round, size_t rank) const {
  return what_ + ": " + ranks_[rank] + " arrived twice before " + names(round, false) +
         " arrived. Every device must run this layer equally often per step, and in the same order.";
}

std::string Rendezvous::missing_text(const Round& round, const Waited& waited) const {
  const std::string whom =
      std::to_string(ranks_.size() - round.arrived) + " of " + std::to_string(ranks_.size()) + " devices";
  return what_ + " " + waited.text(whom) + ". Arrived: " + names(round, true) + ". Missing: " + names(round, false) +
         ". " + advice_;
}

std::string Rendezvous::different_lengths_text(const Round& round) const {
  std::string sizes;
  bool differ = false;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const size_t size = round.contributions[rank].size();
    differ = differ || size != round.contributions[0].size();
    sizes += (rank ? ", " : "") + ranks_[rank] + ": " + std::to_string(size);
  }
  return differ ? what_ + ": the devices brought vectors of different lengths (" + sizes + ")." : "";
}

void wait_until_done(const std::function<void(std::function<void()>)>& start) {
  struct Box {
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> is_full{false};
  };
  const auto box = std::make_shared<Box>();  // whoever fills it may still hold it when we have left
  start([box] {
    std::lock_guard<std::mutex> lock(box->mutex);
    box->is_full.store(true, std::memory_order_release);
    box->changed.notify_one();
  });
  const auto spin_until = Clock::now() + kSpin;
  while (!box->is_full.load(std::memory_order_acquire) && Clock::now() < spin_until) pause();
  std::unique_lock<std::mutex> lock(box->mutex);
  box->changed.wait(lock, [&] { return box->is_full.load(); });
}

}  // namespace gluon_syncbn

// What Python calls (base/library.py), without the interpreter lock. Waits until no thread of an exchange runs, for so
// many seconds at most.
EXPORTED void gluon_syncbn_wait_for_exchanges(double most) {
  using namespace gluon_syncbn;
  const auto until = Clock::now() + Seconds(most);
  while (exchanges > 0 && Clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
