// 8 threads meet 100,000 times with random delays; now and then one does not come, or brings a vector of another
// length. All threads must get all contributions in rank order, or all the same error, and the next meeting must be
// clean. Meanwhile the test cuts waits short and takes that back, and sends signals; these change nothing, because the
// timeout is shorter than the grace period. Run under ThreadSanitizer. Usage: stress_rendezvous [generations]

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "meeting/rendezvous.h"
#include "meeting/waiting.h"

using namespace gluon_syncbn;

extern "C" void gluon_syncbn_cut_waits_short(const char* because, double grace, double process_grace);

namespace {

constexpr size_t kRanks = 8;
std::atomic<long> failures{0}, meetings{0}, errors{0};

void check(bool right, const char* what, uint64_t generation) {
  if (right) return;
  std::printf("generation %llu: %s\n", static_cast<unsigned long long>(generation), what);
  failures += 1;
}

// After a failed meeting every thread waits here, so that no straggler joins the next one.
class Barrier {
 public:
  void wait() {
    const long round = arrived_.fetch_add(1) / static_cast<long>(kRanks);
    while (arrived_.load() < (round + 1) * static_cast<long>(kRanks)) std::this_thread::yield();
  }

 private:
  std::atomic<long> arrived_{0};
};

enum Kind { kNormal, kMissing, kOtherLength };

// The events of a generation, the same for all threads.
struct Plan {
  explicit Plan(uint64_t generation) {
    std::mt19937_64 random(generation);
    const uint64_t draw = random() % 2000;
    kind = draw == 0 ? kMissing : draw == 1 ? kOtherLength : kNormal;
    victim = random() % kRanks;
    size = 1 + random() % 9;
  }
  Kind kind;
  size_t victim, size;
};

Outcome meet(Rendezvous& place, size_t rank, const std::vector<double>& mine, int64_t key) {
  Outcome outcome;
  wait_until_done([&](const std::function<void()>& done) {
    place.arrive(rank, mine, key, [&outcome, done](const Outcome& seen) {
      outcome = seen;
      done();
    });
  });
  if (!outcome.error.empty()) throw RendezvousError(outcome.error);
  return outcome;
}

void run(size_t rank, uint64_t generations, Rendezvous& forward, Rendezvous& backward, Barrier& barrier) {
  std::mt19937_64 random(1000 + rank);
  for (uint64_t generation = 0; generation < generations; ++generation) {
    const Plan plan(generation);
    if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    const bool is_victim = rank == plan.victim;
    if (plan.kind == kMissing && is_victim) {
      barrier.wait();
      continue;
    }
    std::vector<double> mine(plan.size + (plan.kind == kOtherLength && is_victim ? 1 : 0),
                             static_cast<double>(generation * kRanks + rank));
    try {
      // Backward meetings have a key each, forward ones share key 0.
      Rendezvous& place = generation % 2 ? backward : forward;
      const Outcome gathered = meet(place, rank, mine, generation % 2 ? static_cast<int64_t>(generation) : 0);
      check(plan.kind == kNormal, "should have failed", generation);
      check(gathered.contributions->size() == kRanks, "contributions are missing", generation);
      for (size_t other = 0; other < gathered.contributions->size(); ++other) {
        const std::vector<double>& seen = (*gathered.contributions)[other];
        check(seen.size() == plan.size && seen.back() == static_cast<double>(generation * kRanks + other),
              "a contribution is another generation's", generation);
      }
      meetings += 1;
    } catch (const RendezvousError& problem) {
      const std::string text = problem.what();
      const std::string victim = "rank " + std::to_string(plan.victim);
      check(plan.kind != kNormal, text.c_str(), generation);
      const std::string words = plan.kind == kMissing ? "Missing: " + victim + "." : "of different lengths";
      check(text.find(words) != std::string::npos, text.c_str(), generation);
      errors += 1;
    }
    if (plan.kind != kNormal) barrier.wait();
  }
}

std::atomic<bool> done{false};
std::atomic<long> handled{0}, noticed{0};  // the latter by the watchdog alone

void disturb() {
  for (long turn = 0; !done; ++turn) {
    std::optional<SignalWatch> watch;
    if (turn % 2) watch.emplace();  // as a wait in Python has, beside the watchdog's
    const auto before = signalled_at();
    gluon_syncbn_cut_waits_short("of a test", 2, 2);
    kill(getpid(), SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (!watch && signalled_at() > before) noticed += 1;
    gluon_syncbn_cut_waits_short("", 2, 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

// Checks that the user's handler, flags and mask of a signal, set between two watches, stand again after the second.
void set_anew() {
  for (const int flags : {0, SA_RESTART}) {
    for (const int masked : {SIGUSR1, SIGUSR2, 0}) {
      struct sigaction own {};
      own.sa_handler = [](int) { handled += 1; };
      own.sa_flags = flags;
      sigemptyset(&own.sa_mask);
      if (masked) sigaddset(&own.sa_mask, masked);
      sigaction(SIGTERM, &own, nullptr);
      { const SignalWatch watch; }
      struct sigaction found {};
      sigaction(SIGTERM, nullptr, &found);
      bool same = found.sa_handler == own.sa_handler && (found.sa_flags & SA_RESTART) == flags;
      for (const int number : {SIGUSR1, SIGUSR2})
        same = same && sigismember(&found.sa_mask, number) == (number == masked);
      check(same, "another handler, flag or mask stands after a watch", static_cast<uint64_t>(masked));
    }
  }
}

}  // namespace

// An action that is replaced stays, since a handler may still read it.
extern "C" const char* __lsan_default_suppressions() { return "leak:gluon_syncbn::begin_watch"; }

int main(int count, char** arguments) {
  waiting_times() = {Seconds(2), Seconds(0.1)};
  const uint64_t generations = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 100000;
  std::vector<std::string> names;
  for (size_t rank = 0; rank < kRanks; ++rank) names.push_back("rank " + std::to_string(rank));
  // The timeout is long enough that no thread of a busy machine misses it by accident.
  const auto forward = std::make_shared<Rendezvous>("forward", names, 1.5, "");
  const auto backward = std::make_shared<Rendezvous>("backward", names, 1.5, "");
  Barrier barrier;
  signal(SIGINT, [](int) { handled += 1; });
  set_anew();
  std::thread disturber(disturb);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] { run(rank, generations, *forward, *backward, barrier); });
  }
  for (std::thread& thread : threads) thread.join();
  done = true;
  disturber.join();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the watchdog looks, and finds nothing that waits
  check(handled > 0, "the program's own handler was not called", generations);
  check(noticed > 0, "no signal was noticed", generations);
  struct sigaction found;
  sigaction(SIGINT, nullptr, &found);
  check(!(found.sa_flags & SA_SIGINFO), "the program's own handler was not put back", generations);
  for (const auto& place : {forward, backward}) {
    check(place->end_overdue().oldest == Clock::time_point::max(), "rounds were left open", generations);
  }
  std::printf("%llu generations, %ld meetings, %ld errors, %ld failures\n",
              static_cast<unsigned long long>(generations), meetings.load(), errors.load(), failures.load());
  return failures == 0 ? 0 : 1;
}
