#include "meeting/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <thread>

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

// Counts exchanges with other processes that are held somewhere, and the time in which there were some. Never
// destroyed, because exchanges may be open while the process exits.
struct Exchanges {
  std::mutex mutex;
  int open = 0;
  Clock::time_point since;  // when the first of those that are open began
  Clock::duration before{0};

  void add(int change) {
    std::lock_guard<std::mutex> lock(mutex);
    if (open == 0) since = Clock::now();
    open += change;
    if (open == 0) before += Clock::now() - since;
  }
  bool are_open() {
    std::lock_guard<std::mutex> lock(mutex);
    return open > 0;
  }
  // How long this process has waited for others.
  Clock::duration time() {
    std::lock_guard<std::mutex> lock(mutex);
    return open > 0 ? before + (Clock::now() - since) : before;
  }
};
Exchanges& exchanges = *new Exchanges;

struct CountedExchange {
  CountedExchange() { exchanges.add(1); }
  ~CountedExchange() { exchanges.add(-1); }
  CountedExchange(const CountedExchange&) = delete;
};

}  // namespace

Rendezvous::Rendezvous(std::string what, std::vector<std::string> ranks, double timeout_seconds, std::string advice,
                       Exchange exchange)
    : what_(std::move(what)),
      ranks_(std::move(ranks)),
      timeout_seconds_(timeout_seconds),
      advice_(std::move(advice)),
      exchange_(std::move(exchange)) {}

void Rendezvous::arrive(size_t rank, std::vector<double> contribution, int64_t key, Then then) {
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
      round->elsewhere = exchanges.time();
      gathering_.emplace(key, round);
      round->id = ++opened_;
    }
    round->then.push_back(std::move(then));
    if (round->present[rank] && contribution.empty()) return;
    if (round->present[rank]) {
      error = what_ + ": " + ranks_[rank] + " arrived twice before " + joined(names(*round, false)) +
              " arrived. Every device must run this layer equally often per step, and in the same order.";
    } else {
      round->contributions[rank] = std::move(contribution);
      round->present[rank] = true;
      round->arrived += 1;
      if (round->arrived < ranks_.size()) return;
      const std::string lengths = different_lengths(round->contributions, [&](size_t at) { return ranks_[at]; });
      if (!lengths.empty()) error = what_ + ": the devices brought vectors of different lengths (" + lengths + ").";
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

OpenWaits Rendezvous::end_overdue() {
  OpenWaits open;
  std::vector<std::pair<RoundPtr, std::string>> missed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = gathering_.begin(); entry != gathering_.end();) {
      const RoundPtr round = entry->second;
      // A device that is missing may wait for another process in another layer, for longer than a device may take.
      const double elsewhere = Seconds(exchanges.time() - round->elsewhere).count();
      const double seconds = timeout_seconds_ + elsewhere;
      if (const auto waited = ended_wait(round->opened, seconds)) {
        missed.emplace_back(round, waited->error(what_, "devices", names(*round, true), names(*round, false), advice_));
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

void Rendezvous::exchange(const RoundPtr& round, int64_t key) {
  struct Exchanging {  // its members go in reverse order
    CountedExchange counted;
    std::shared_ptr<Rendezvous> place;
    RoundPtr round;
  };
  const auto held = std::make_shared<Exchanging>();
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

std::vector<std::string> Rendezvous::names(const Round& round, bool present) const {
  std::vector<std::string> found;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (round.present[rank] == present) found.push_back(ranks_[rank]);
  }
  return found;
}

std::string different_lengths(const Vectors& vectors, const std::function<std::string(size_t)>& name_of) {
  const auto differs = [&](const std::vector<double>& vector) { return vector.size() != vectors[0].size(); };
  if (std::none_of(vectors.begin(), vectors.end(), differs)) return "";
  std::string text;
  for (size_t rank = 0; rank < vectors.size(); ++rank) {
    text += (rank > 0 ? ", " : "") + name_of(rank) + ": " + std::to_string(vectors[rank].size());
  }
  return text;
}

void wait_until_done(const std::function<void(std::function<void()>)>& start) {
  struct Box {
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> is_full{false};
  };
  const auto box = std::make_shared<Box>();  // the thread that fills it may still hold it after the return
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

// Waits until nobody holds an exchange any more, for so many seconds at most.
EXPORTED void gluon_syncbn_wait_for_exchanges(double most) {
  using namespace gluon_syncbn;
  const auto until = Clock::now() + Seconds(most);
  while (exchanges.are_open() && Clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
