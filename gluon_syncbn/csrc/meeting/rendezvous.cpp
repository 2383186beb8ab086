#include "meeting/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <thread>
#include <utility>

#include "exported.h"

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

// Exchanges with other processes that somebody still holds, and for how long there have been some. Never destroyed,
// because exchanges may be open while the process exits.
struct Exchanges {
  std::mutex mutex;
  int open = 0;
  Clock::time_point since;  // there have been some now
  Clock::duration before{0};
};
Exchanges& exchanges() {
  static auto* all = new Exchanges;
  return *all;
}

// For how long this process has waited for others.
Clock::duration time_in_exchanges() {
  Exchanges& all = exchanges();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.open > 0 ? all.before + (Clock::now() - all.since) : all.before;
}

struct CountedExchange {
  CountedExchange() {
    Exchanges& all = exchanges();
    std::lock_guard<std::mutex> lock(all.mutex);
    if (all.open++ == 0) all.since = Clock::now();
  }
  ~CountedExchange() {
    Exchanges& all = exchanges();
    std::lock_guard<std::mutex> lock(all.mutex);
    if (--all.open == 0) all.before += Clock::now() - all.since;
  }
  CountedExchange(const CountedExchange&) = delete;
  CountedExchange& operator=(const CountedExchange&) = delete;
};

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
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = gathering_.find(key);
    if (entry != gathering_.end()) {
      round = entry->second;
    } else {
      watch(shared_from_this());
      round = std::make_shared<Round>(ranks_.size());
      round->elsewhere = time_in_exchanges();
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
  }
  if (error.empty() && exchange_.start) {
    exchange(round, key);
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
  std::vector<std::pair<RoundPtr, std::string>> missed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = gathering_.begin(); entry != gathering_.end();) {
      const RoundPtr round = entry->second;
      // A device that is missing may wait for another process in another layer, for longer than a device may take.
      const double elsewhere = Seconds(time_in_exchanges() - round->elsewhere).count();
      const double seconds = timeout_seconds_ + elsewhere;
      if (const auto waited = ended_wait(round->opened, seconds)) {
        missed.emplace_back(round, missing_text(*round, *waited));
        entry = gathering_.erase(entry);
        continue;
      }
      open.add(round->opened, round->opened + ticks(seconds));
      ++entry;
    }
  }
  for (const auto& [round, error] : missed) fail(round, error);
  return open;
}

void Rendezvous::exchange(const RoundPtr& round, uint64_t key) {
  struct Held {  // they go in reverse order
    CountedExchange counted;
    std::shared_ptr<Rendezvous> place;
    RoundPtr round;
  };
  const auto held = std::make_shared<Held>();
  held->place = shared_from_this();
  held->round = round;
  try {
    exchange_.start(round->contributions, key,
                    [held](const Outcome& outcome) { held->place->end(held->round, outcome); });
  } catch (const std::exception& problem) {
    fail(round, what_ + ": the exchange between processes cannot begin: " + problem.what());
  }
}

void Rendezvous::fail(const RoundPtr& round, std::string error) {
  if (exchange_.fail) exchange_.fail(error);
  end(round, {nullptr, round->id, std::move(error)});
}

void Rendezvous::end(const RoundPtr& round, const Outcome& outcome) {
  const std::vector<Then> then = std::move(round->then);
  for (const Then& next : then) next(outcome);
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
         ". " + waited.advice(advice_);
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

// What Python calls (base/library.py), without the interpreter lock. Waits until nobody holds an exchange any more, for
// so many seconds at most.
EXPORTED void gluon_syncbn_wait_for_exchanges(double most) {
  using namespace gluon_syncbn;
  const auto until = Clock::now() + Seconds(most);
  const auto are_open = [] {
    std::lock_guard<std::mutex> lock(exchanges().mutex);
    return exchanges().open > 0;
  };
  while (are_open() && Clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
