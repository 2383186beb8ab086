// Four processes of a job, each a `Processes` of its own here, exchange vectors under several keys on several threads:
// through shared memory, as on one host, by messages that another thread carries, or by both, as on two hosts. In each
// step all processes come, or one abandons the step, does not come, or brings another length; then all abandon the step
// and go on together. A process may also abandon its next step before it goes on. At last one leaves. Every exchange
// must end once, with the rows of all in rank order or with the error, and no message of an abandoned step may reach
// the next. Run under ThreadSanitizer and AddressSanitizer. Usage: stress_processes [steps]

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "meeting/rendezvous.h"
#include "processes/host_memory.h"
#include "processes/processes.h"

using namespace gluon_syncbn;

namespace {

constexpr int kProcesses = 4;
constexpr int kKeys = 5;
std::atomic<long> failures{0}, met{0}, failed{0};

void check(bool right, const std::string& what) {
  if (right) return;
  std::printf("%s\n", what.c_str());
  failures += 1;
}

// Carries messages between processes in one, on a thread of its own, in their order.
class Carrier {
 public:
  ~Carrier() {
    is_over_ = true;
    thread_.join();
  }
  void connect(std::vector<std::shared_ptr<Processes>> all) { all_ = std::move(all); }
  void carry(int from, const Message& message, const std::vector<int>& ranks) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int to : ranks) waiting_.push_back({from, to, message});
  }

 private:
  struct Letter {
    int from, to;
    Message message;
  };
  void run() {
    while (!is_over_) {
      std::deque<Letter> letters;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        letters.swap(waiting_);
      }
      for (Letter& letter : letters) {
        all_[static_cast<size_t>(letter.to)]->receive(letter.from, std::move(letter.message));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  std::mutex mutex_;
  std::deque<Letter> waiting_;
  std::vector<std::shared_ptr<Processes>> all_;
  std::atomic<bool> is_over_{false};
  std::thread thread_{[this] { run(); }};
};

class ByCarrier : public Transport {
 public:
  ByCarrier(Carrier& carrier, int rank) : carrier_(carrier), rank_(rank) {}
  void send(const Message& message, const std::vector<int>& ranks) override { carrier_.carry(rank_, message, ranks); }

 private:
  Carrier& carrier_;
  const int rank_;
};

bool is_on_one_host = false;  // changes between jobs

enum Kind { kNormal, kAbandons, kAbandonsTwo, kMissing, kOtherLength, kKinds };

// Once on one host a vector is larger than a ring. ThreadSanitizer maps its shadow anew each time, which is slow.
size_t length_of(int step, int key) {
  const size_t lengths[] = {1, 33, 513, 1025};
  return step == 0 && key == 4 && is_on_one_host ? 140000 : lengths[(key + step) % 4];
}

double value_of(int rank, int key, int step) { return rank * 1e6 + key * 1e3 + step; }

Outcome exchanged(const std::shared_ptr<Processes>& mine, const Channel& channel, int64_t round,
                  std::vector<double> vector) {
  Outcome all;
  std::atomic<int> times{0};
  wait_until_done([&](std::function<void()> done) {
    mine->exchange(channel, round, std::move(vector), [&all, &times, done](const Outcome& brought) {
      all = brought;
      times += 1;
      done();
    });
  });
  check(times == 1, "an exchange has ended more than once");
  return all;
}

// One process's step: all keys forward, then backward in the opposite order.
void run_step(const std::shared_ptr<Processes>& mine, int step, Kind kind, int victim, std::atomic<long>& ended) {
  std::mt19937_64 random(static_cast<uint64_t>(step * kProcesses + mine->rank));
  const bool is_victim = kind != kNormal && mine->rank == victim;
  std::vector<int64_t> rounds(kKeys);
  for (int pass = 0; pass < 2 * kKeys; ++pass) {
    const bool is_forward = pass < kKeys;
    const int key = is_forward ? pass : 2 * kKeys - 1 - pass;
    if (is_victim && pass == static_cast<int>(random() % (2 * kKeys))) {
      if (kind == kAbandons || kind == kAbandonsTwo) return static_cast<void>(mine->abandon(true));
      if (kind == kMissing) return;
    }
    if (!is_forward && rounds[static_cast<size_t>(key)] == 0) continue;
    std::vector<double> vector(length_of(step, key) + (is_victim && kind == kOtherLength && pass == 3),
                               value_of(mine->rank, key, step));
    const Channel channel{"here", key + 100 * is_forward, {0, 1, 2, 3}, kind == kMissing ? 0.3 : 60};
    const int64_t round = is_forward ? Processes::kNext : rounds[static_cast<size_t>(key)];
    const Outcome all = exchanged(mine, channel, round, std::move(vector));
    ++ended;
    if (!all.error.empty()) {
      check(kind != kNormal, "an error in a normal step: " + all.error);
      failed += 1;
      return;
    }
    rounds[static_cast<size_t>(key)] = all.round_id;
    met += 1;
    check(all.contributions->size() == kProcesses, "not a row of each");
    for (int rank = 0; rank < kProcesses; ++rank) {
      const std::vector<double>& row = (*all.contributions)[static_cast<size_t>(rank)];
      check(row.size() == length_of(step, key) && row.front() == value_of(rank, key, step) && row.back() == row.front(),
            "step " + std::to_string(step) + ": not the vector of process " + std::to_string(rank));
    }
  }
}

void go_on(const std::shared_ptr<Processes>& mine) {
  std::string error = "none";
  wait_until_done([&](std::function<void()> done) {
    mine->resume("again", 60, [&error, done](const Outcome& with) {
      error = with.error;
      done();
    });
  });
  check(error.empty(), "the processes did not go on together: " + error);
}

// All of them abandon a step and go on.
void recover(const std::shared_ptr<Processes>& mine, bool abandons_two, bool is_victim) {
  if (mine->state().is_resuming == 0) mine->abandon(true);
  if (abandons_two && is_victim) {
    mine->abandon(true);  // the next step
  } else if (abandons_two) {
    go_on(mine);
    const Outcome next = exchanged(mine, {"next", 8, {0, 1, 2, 3}, 60}, Processes::kNext, {1.0});
    check(next.error.find("abandoned the step") != std::string::npos, "the next step: " + next.error);
    mine->abandon(true);
  }
  while (mine->state().is_resuming != 0) go_on(mine);
}

enum Way { kOneHost, kTwoHosts, kCarried };

void run_job(int steps, Way way) {
  is_on_one_host = way == kOneHost;
  Carrier carrier;
  std::vector<std::shared_ptr<Processes>> all;
  for (int rank = 0; rank < kProcesses; ++rank) {
    auto outside = std::make_shared<ByCarrier>(carrier, rank);
    all.push_back(std::make_shared<Processes>(rank, kProcesses, "", outside, true));
  }
  carrier.connect(all);
  std::mt19937_64 random(11);
  const auto in_all = [&](const std::function<void(const std::shared_ptr<Processes>&)>& work) {
    std::vector<std::thread> threads;
    for (const auto& mine : all) threads.emplace_back([&work, mine] { work(mine); });
    for (std::thread& thread : threads) thread.join();
  };
  if (way != kCarried) {
    const std::vector<std::vector<int>> hosts =
        way == kOneHost ? std::vector<std::vector<int>>{{0, 1, 2, 3}} : std::vector<std::vector<int>>{{0, 2, 3}, {1}};
    std::vector<std::string> names(kProcesses);
    std::vector<std::unique_ptr<HostMemory::Offer>> offers;
    for (const std::vector<int>& ranks : hosts) {
      for (int rank : ranks) names[static_cast<size_t>(rank)] = "host " + std::to_string(offers.size());
      offers.push_back(std::make_unique<HostMemory::Offer>(static_cast<int>(ranks.size())));
    }
    // Nobody is taken for one that has ended because it is late to join.
    in_all([&](const auto& mine) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100 * mine->rank));
      const auto host = static_cast<size_t>(names[static_cast<size_t>(mine->rank)].back() - '0');
      mine->name(names);
      mine->share(std::make_shared<HostMemory>(
          offers[host]->where, mine->rank, hosts[host],
          [raw = mine.get()](int from, Message message) { raw->receive(from, std::move(message)); }));
      const Outcome votes = exchanged(mine, {"votes", 9, {0, 1, 2, 3}, 60}, Processes::kNext, {1.0});
      check(votes.error.empty(), "the vote on memory: " + votes.error);
    });
    for (const auto& mine : all) mine->agree_on_memory();
  }
  for (int step = 0; step < steps; ++step) {
    const Kind kind = random() % 4 ? kNormal : static_cast<Kind>(random() % kKinds);
    const int victim = static_cast<int>(random() % kProcesses);
    std::atomic<long> ended{0};
    in_all([&](const auto& mine) { run_step(mine, step, kind, victim, ended); });
    if (kind == kNormal) check(ended == 2 * kKeys * kProcesses, "not every exchange has ended once");
    if (kind == kNormal) continue;
    in_all([&](const auto& mine) { recover(mine, kind == kAbandonsTwo, mine->rank == victim); });
  }
  all[2]->leave();
  const Outcome seen = exchanged(all[0], {"here", 7, {0, 1, 2, 3}, 60}, Processes::kNext, {1.0});
  check(seen.error.find("process 2 has ended") != std::string::npos, "a process that left: " + seen.error);
  for (const auto& mine : all) mine->share(nullptr);
}

}  // namespace

int main(int count, char** arguments) {
  waiting_times() = {Seconds(0.02), Seconds(0.005)};
  const int steps = count > 1 ? std::atoi(arguments[1]) : 200;
  for (const Way way : {kOneHost, kTwoHosts, kCarried}) run_job(steps, way);
  std::printf("%d steps, %ld met, %ld failed, %ld failures\n", steps, met.load(), failed.load(), failures.load());
  return failures != 0;
}
