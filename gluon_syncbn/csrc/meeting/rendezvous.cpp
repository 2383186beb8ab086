#include "meeting/rendezvous.h"

#include <thread>
#include <utility>

namespace gluon_syncbn {
namespace {

// How long a rank looks before it sleeps.
constexpr std::chrono::microseconds kSpin{60};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

Rendezvous::Rendezvous(std::string what, std::vector<std::string> ranks, double timeout_seconds, std::string advice,
                       Exchange exchange)
    : what_(std::move(what)),
      ranks_(std::move(ranks)),
      timeout_seconds_(timeout_seconds),
      advice_(std::move(advice)),
      exchange_(std::move(exchange)) {}

Rendezvous::Gathered Rendezvous::all_gather(size_t rank, std::vector<double> contribution, uint64_t key) {
  std::shared_ptr<Round> round;
  bool leads = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Round>& entry = rounds_[key];
    if (!entry) {
      entry = std::make_shared<Round>(ranks_.size());
      entry->id = ++opened_;
    }
    round = entry;
    if (round->present[rank]) {
      fail(*round, key, twice_text(*round, rank));
    } else {
      round->contributions[rank] = std::move(contribution);
      round->present[rank] = true;
      round->arrived += 1;
      if (round->arrived == ranks_.size()) {
        const std::string error = different_lengths_text(*round);
        leads = error.empty() && exchange_.exchange;
        if (!error.empty()) {
          fail(*round, key, error);
        } else if (leads) {
          round->state.store(kExchanging, std::memory_order_release);
          rounds_.erase(key);
        } else {
          finish(*round, key, kComplete, "");
        }
      }
    }
  }
  if (leads) {
    lead(*round, key);
  } else {
    wait(round, key);
  }
  if (round->state == kFailed) throw RendezvousError(round->error);
  return {std::shared_ptr<const Vectors>(round, &round->contributions), round->id};
}

size_t Rendezvous::open_rounds() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return rounds_.size();
}

uint64_t Rendezvous::rounds() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return opened_;
}

void Rendezvous::lead(Round& round, uint64_t key) {
  Vectors rows;
  uint64_t id = round.id;
  std::string error;
  try {
    rows = exchange_.exchange(round.contributions, key, id);
  } catch (const std::exception& problem) {
    error = problem.what();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (round.is_over()) return;  // the others have given it up
  if (error.empty()) {
    round.contributions = std::move(rows);
    round.id = id;
  }
  finish(round, key, error.empty() ? kComplete : kFailed, error);
}

void Rendezvous::wait(const std::shared_ptr<Round>& round, uint64_t key) {
  const auto spin_until = Clock::now() + kSpin;
  while (!round->is_over() && Clock::now() < spin_until) pause();
  if (round->is_over()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto waited = wait_until(lock, round->changed, round->opened, timeout_seconds_,
                                     [&] { return round->state != kGathering; });
  if (waited) return fail(*round, key, missing_text(*round, *waited));
  const auto guard = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        Seconds(exchange_.timeout_seconds) + 2 * waiting_times().grace);
  if (!round->changed.wait_until(lock, guard, [&] { return round->is_over(); })) {
    finish(*round, key, kFailed, what_ + ": all devices arrived, but the exchange between processes did not return.");
  }
}

void Rendezvous::fail(Round& round, uint64_t key, std::string error) {
  if (exchange_.fail) exchange_.fail(error);
  finish(round, key, kFailed, std::move(error));
}

void Rendezvous::finish(Round& round, uint64_t key, State state, std::string error) {
  round.error = std::move(error);
  round.state.store(state, std::memory_order_release);
  round.changed.notify_all();
  const auto entry = rounds_.find(key);
  // Last: it may hold the only reference but ours.
  if (entry != rounds_.end() && entry->second.get() == &round) rounds_.erase(entry);
}

std::string Rendezvous::names(const Round& round, bool present) const {
  std::string text;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (round.present[rank] == present) text += (text.empty() ? "" : ", ") + ranks_[rank];
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

}  // namespace gluon_syncbn
