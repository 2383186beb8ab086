// Where the devices of one layer meet: a barrier that hands everyone all that was brought, or one error. In a job of
// several processes that is what all processes have brought.
//
// The protocol
// ------------
// Every device ("rank") runs on a thread of its own and comes with one vector of float64, its contribution. Ranks meet
// in rounds ("generations"). Each direction of each layer has a rendezvous of its own, and a round of it has a key. A
// round is in one of four states:
//
//   gathering  Opened by the first rank to arrive, from when its timeout counts. It is in the table under its key. Ranks
//              that arrive leave their contribution and wait. It waits for ranks, and for nothing else.
//   exchanging Only where there are other processes. The last rank has arrived, and has taken the round out of the table,
//              so that whoever comes again opens the next one. It exchanges what all have brought with the other
//              processes (Exchange), while the others wait for it, without holding a lock.
//   complete   The last rank has arrived, and taken the round out of the table. It wakes the others. Contributions no longer change; every rank reads them all, without
//              a lock, and reduces them for itself in rank order: same input, same order, same bits everywhere.
//   failed     A wait ended without the missing rank, or a rank arrived twice, or the last to arrive found that vectors
//              differ in length, or the exchange failed. Whoever finds it takes the round out of the table, stores the error, and wakes the others: all of
//              them throw that text. The next arrival opens a new round, so the next step starts clean.
//
// What ends every wait: the last arrival, the timeout or less (waiting.h), or the failure of the round; for those who wait
// for an exchange, its own timeout and the grace period. No wait is without an end, and no lock is held while waiting. A waiting rank looks at the state for some
// microseconds before it sleeps, because devices of one kind mostly arrive together and to wake a thread costs more than
// that.
//
// A round is owned by the table and by the ranks in it, and goes when the last of them has left.
//
// Which rounds belong together: forward passes of one layer on one device run in program order (each writes the
// running statistics), so all of them share key 0, and the n-th round holds the n-th call of every device. Backward
// passes of a layer that is called several times per step come in any order, so their key is the number of the forward
// round that they answer.
//
// A rank that arrives after its round has failed opens a new round, and cannot be told from one that starts the next
// step. Whoever catches the error and goes on must let the stragglers finish first (abandon_step).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "meeting/statistics.h"
#include "meeting/waiting.h"

namespace gluon_syncbn {

class RendezvousError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What connects a rendezvous with the same one in other processes; without an `exchange` there are none.
struct Exchange {
  // Called by the last rank to arrive with what all have brought and the round's key; returns what all processes have
  // brought, and changes the number of the round to theirs. May throw.
  std::function<Vectors(const Vectors& contributions, uint64_t key, uint64_t& round_id)> exchange;
  // Told why a round failed among the devices of this process, so that others need not wait for it.
  std::function<void(const std::string& error)> fail;
  double timeout_seconds = 0;
};

class Rendezvous {
 public:
  // What a rank takes home; valid as long as it is held.
  struct Gathered {
    std::shared_ptr<const Vectors> contributions;
    uint64_t round_id;  // from 1
  };

  // `what` is how errors call it, e.g. "SyncBatchNorm 'net_batchnorm0': forward pass"; `ranks` are the participants'
  // names; `advice` ends the error about a missing rank.
  Rendezvous(std::string what, std::vector<std::string> ranks, double timeout_seconds, std::string advice,
             Exchange exchange = {});

  // Leaves `contribution` as `rank` and waits for the others. Throws RendezvousError, with the same text on every rank
  // of the round, if a rank does not arrive within the timeout, arrives twice, or brings a vector of another length.
  Gathered all_gather(size_t rank, std::vector<double> contribution, uint64_t key = 0);

  // Rounds that wait for ranks now.
  size_t open_rounds() const;

  // Rounds that were ever opened.
  uint64_t rounds() const;

 private:
  enum State : int { kGathering, kExchanging, kComplete, kFailed };

  struct Round {
    explicit Round(size_t ranks) : contributions(ranks), present(ranks, false) {}

    Vectors contributions;
    std::vector<bool> present;
    size_t arrived = 0;
    uint64_t id = 0;
    Clock::time_point opened = Clock::now();
    std::string error;
    std::atomic<int> state{kGathering};

    bool is_over() const { return state.load(std::memory_order_acquire) > kExchanging; }
    std::condition_variable changed;
  };

  void lead(Round& round, uint64_t key);
  void wait(const std::shared_ptr<Round>& round, uint64_t key);
  void fail(Round& round, uint64_t key, std::string error);                 // with the lock held
  void finish(Round& round, uint64_t key, State state, std::string error);  // with the lock held
  std::string names(const Round& round, bool present) const;
  std::string twice_text(const Round& round, size_t rank) const;
  std::string missing_text(const Round& round, const Waited& waited) const;
  std::string different_lengths_text(const Round& round) const;  // empty if they are the same

  const std::string what_;
  const std::vector<std::string> ranks_;
  const double timeout_seconds_;
  const std::string advice_;
  const Exchange exchange_;
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Round>> rounds_;
  uint64_t opened_ = 0;
};

}  // namespace gluon_syncbn
