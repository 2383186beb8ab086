// Where the devices of one layer meet. Each leaves a vector of float64 and goes on. When the last has come, each is
// called back with all vectors, or with one error. In a job of several processes it gets one vector per process.
//
// The protocol
// ------------
// Every device ("rank") arrives once per round. Each direction of each layer has a rendezvous of its own, and a round
// of it has a key. A round is in one of three states. The thread that takes it out of one calls nobody before the round
// is in the next:
//
//   gathering   In the table under its key, from the first arrival on. It ends with the last arrival, with a rank that
//               comes twice, with vectors of different lengths, or by the watchdog: after the timeout, or earlier
//               (waiting.h). Time in which this process waits for others, anywhere, does not count.
//   exchanging  Only where there are other processes: all ranks of this one are there, and their vectors are exchanged
//               (Exchange), which ends by itself.
//   over        All callbacks are called, once: with the vectors in rank order (same input, same order, same bits
//               everywhere), or with the error. The next arrival with this key opens a new round.
//
// Nobody waits here, and under the lock nothing else is called but `watch`. The callbacks run on the thread that ends
// the round: the last rank's, the watchdog's, or the one that ends the exchange. They must not wait for other rounds.
//
// Ownership: a round is owned by the table, or by the thread that ends it, and owns its callbacks; a callback owns the
// call that goes on in it, with its arrays, its operator and its group, and so this rendezvous. So a net that is
// dropped lives until its open rounds are over, which the watchdog sees to. A round that is open when the process ends
// is forgotten with it, and none is open when Python forks (step/exits.py).
//
// Keys: forward passes of one layer on one device run in program order (each writes the running statistics), so all of
// them share key 0, and the n-th round holds the n-th call of every device. Backward passes of a layer that is called
// several times per step come in any order, so their key is the number of their forward round.
//
// A rank that arrives after its round has failed opens a new round, and looks like one that starts the next step. Code
// that catches the error and goes on must let the stragglers finish first (abandon_step).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "meeting/statistics.h"
#include "meeting/watchdog.h"

namespace gluon_syncbn {

class RendezvousError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// How a round ended.
struct Outcome {
  std::shared_ptr<const Vectors> contributions;  // of all, in rank order
  int64_t round_id = 0;                          // from 1
  std::string error;                             // empty if it did not fail
};
using Then = std::function<void(const Outcome&)>;

// Connects a rendezvous with the same one in other processes; without `start` there are none.
struct Exchange {
  // Brings the vectors of all ranks in the round of this key; `done` is called once, on any thread, with the vectors of
  // all processes. May throw, and then `done` is not called.
  std::function<void(const Vectors& contributions, int64_t key, Then done)> start;
  // Called with the reason why a round failed among the devices of this process, so that others need not wait for it.
  std::function<void(const std::string& error)> fail;
};

class Rendezvous : public Watched, public std::enable_shared_from_this<Rendezvous> {
 public:
  // `what` begins errors, e.g. "SyncBatchNorm 'net_batchnorm0': forward pass"; `ranks` are names; `advice` ends the
  // error about a missing rank. To be made by std::make_shared.
  Rendezvous(std::string what, std::vector<std::string> ranks, double timeout_seconds, std::string advice,
             Exchange exchange = {});

  // Leaves `contribution` as `rank`; `then` is called once, perhaps before this returns. If this throws (there is no
  // memory, or no thread), it will not be called. A rank that brings nothing may come more than once.
  void arrive(size_t rank, std::vector<double> contribution, int64_t key, Then then);

  // Gives a rank another name.
  void rename(size_t rank, std::string name);

  OpenWaits end_overdue() override;

 private:
  struct Round {
    explicit Round(size_t ranks) : contributions(ranks), present(ranks, false) {}

    Vectors contributions;
    std::vector<bool> present;
    size_t arrived = 0;
    int64_t id = 0;
    Clock::time_point opened = Clock::now();
    Clock::duration elsewhere{0};  // how long this process had waited for others then
    std::vector<Then> then;
  };
  using RoundPtr = std::shared_ptr<Round>;

  void exchange(const RoundPtr& round, int64_t key);
  void fail(const RoundPtr& round, std::string error);
  void end(const RoundPtr& round, const Outcome& outcome);
  std::vector<std::string> names(const Round& round, bool present) const;

  const std::string what_;
  std::vector<std::string> ranks_;
  const double timeout_seconds_;
  const std::string advice_;
  const Exchange exchange_;
  std::mutex mutex_;
  std::unordered_map<int64_t, RoundPtr> gathering_;  // by key
  int64_t opened_ = 0;
};

// "cpu(0): 8, cpu(1): 9", or an empty text if all vectors have one length.
std::string different_lengths(const Vectors& vectors, const std::function<std::string(size_t)>& name_of);

// Waits until `start`'s callback has been called, for a thread that has nothing else to do. Throws as `start` does.
void wait_until_done(const std::function<void(std::function<void()>)>& start);

}  // namespace gluon_syncbn
