// Rounds in which no thread waits: 4 ranks arrive on threads of their own, and the rendezvous calls them back. The last
// reference to the rendezvous from outside goes during the round. Now and then a rank does not come, comes twice, or
// brings a vector of another length; with other processes the exchange may fail, or not even begin. The rendezvous must
// call every callback exactly once, all of a round with the same outcome, and leave nothing. Run under ThreadSanitizer
// and AddressSanitizer. Usage: stress_rounds [rounds]

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "meeting/rendezvous.h"

using namespace gluon_syncbn;

namespace {

constexpr size_t kRanks = 4;
std::atomic<long> failures{0}, met{0}, failed{0};

void check(bool right, const std::string& what, uint64_t number) {
  if (right) return;
  std::printf("round %llu: %s\n", static_cast<unsigned long long>(number), what.c_str());
  failures += 1;
}

enum Kind { kNormal, kMissing, kTwice, kOtherLength, kThrows, kRefused, kKinds };

void rest(uint64_t microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// The outcomes with which the ranks of one round were called back.
struct Seen {
  std::mutex mutex;
  std::vector<Outcome> outcomes;
};

void run(uint64_t number) {
  std::mt19937_64 random(number);
  const Kind kind = random() % 8 ? kNormal : static_cast<Kind>(random() % kKinds);
  const bool exchanges = kind == kThrows || kind == kRefused || random() % 2;
  const size_t victim = random() % kRanks;
  const auto seen = std::make_shared<Seen>();
  const auto count = [seen] {
    std::lock_guard<std::mutex> lock(seen->mutex);
    return seen->outcomes.size();
  };
  const auto until = Clock::now() + std::chrono::seconds(20);
  Exchange exchange;
  if (exchanges) {
    exchange.fail = [](const std::string&) {};
    exchange.start = [kind, delay = random() % 100](const Vectors& contributions, int64_t, Then done) {
      if (kind == kRefused) throw RendezvousError("no memory");
      std::thread([kind, delay, contributions, done] {
        rest(delay);
        if (kind == kThrows) return done({nullptr, 77, "a process is gone"});
        Vectors all = contributions;
        all.insert(all.end(), contributions.begin(), contributions.end());
        done({std::make_shared<const Vectors>(std::move(all)), 77, ""});
      }).detach();
    };
  }
  std::vector<std::string> names;
  for (size_t rank = 0; rank < kRanks; ++rank) names.push_back("rank " + std::to_string(rank));
  const double timeout = kind == kMissing ? 0.03 : 5;
  auto place = std::make_shared<Rendezvous>("here", names, timeout, "", exchange);
  const std::weak_ptr<Rendezvous> left = place;
  // The callback owns the place until the round is over, as a pass does.
  const auto arrive = [&](size_t rank, const std::shared_ptr<Rendezvous>& at) {
    std::vector<double> mine(3 + (kind == kOtherLength && rank == victim), static_cast<double>(rank));
    at->arrive(rank, std::move(mine), 5, [seen, at](const Outcome& outcome) {
      std::lock_guard<std::mutex> lock(seen->mutex);
      seen->outcomes.push_back(outcome);
    });
  };
  size_t expected = kRanks;
  std::vector<std::thread> threads;
  if (kind == kTwice) {
    expected = 2;
    arrive(victim, place);
    arrive(victim, place);
  } else {
    for (size_t rank = 0; rank < kRanks; ++rank) {
      if (kind == kMissing && rank == victim) continue;
      threads.emplace_back([&arrive, rank, place, delay = random() % 300] {
        if (delay < 100) rest(delay);
        arrive(rank, place);
      });
    }
    expected = threads.size();
  }
  place.reset();
  for (std::thread& thread : threads) thread.join();
  while ((count() < expected || !left.expired()) && Clock::now() < until) rest(20);
  check(left.expired(), "the rendezvous was not freed", number);
  std::lock_guard<std::mutex> lock(seen->mutex);
  check(seen->outcomes.size() == expected, "called back " + std::to_string(seen->outcomes.size()) + " times", number);
  static const char* const words[] = {"",        "Missing: rank ",         "arrived twice", "of different lengths",
                                      "is gone", "cannot begin: no memory"};
  for (const Outcome& outcome : seen->outcomes) {
    // On a busy machine one may come so late that its round is another.
    check(kind == kMissing || outcome.error == seen->outcomes[0].error, "different outcomes", number);
    check(outcome.error.empty() == (kind == kNormal) && outcome.error.find(words[kind]) != std::string::npos,
          "kind " + std::to_string(kind) + ": " + outcome.error, number);
    if (kind != kNormal || !outcome.error.empty()) continue;
    check(outcome.contributions->size() == kRanks * (1 + exchanges) && outcome.contributions->back()[2] == kRanks - 1 &&
              outcome.round_id == (exchanges ? 77 : 1),
          "not the contributions", number);
  }
  (kind == kNormal ? met : failed) += 1;
}

}  // namespace

int main(int count, char** arguments) {
  waiting_times() = {Seconds(0.02), Seconds(0.005)};
  const uint64_t rounds = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 10000;
  std::atomic<uint64_t> next{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (uint64_t number = next++; number < rounds; number = next++) run(number);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%llu rounds, %ld met, %ld failed, %ld failures\n", static_cast<unsigned long long>(rounds), met.load(),
              failed.load(), failures.load());
  return failures == 0 ? 0 : 1;
}
