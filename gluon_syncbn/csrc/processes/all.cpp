#include "processes/all.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <future>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "exported.h"
#include "meeting/rendezvous.h"
#include "processes/host_memory.h"
#include "processes/outside.h"

namespace gluon_syncbn {
namespace {

struct Entry {
  std::shared_ptr<Outside> outside;
  std::shared_ptr<Processes> processes;
  std::unique_ptr<HostMemory::Offer> offer;
  std::shared_ptr<HostMemory> memory;
  Outside::Task task;  // the last that Python was given, which still reads it
};

// Nothing is ever taken out, since messages may still come while the process exits. There are no locks, since a fork
// may come at any time.
constexpr size_t kMost = 1024;
std::array<std::atomic<Entry*>, kMost> entries{};
std::atomic<size_t> num_entries{0};

Entry& entry(int64_t id) { return *entries.at(static_cast<size_t>(id)).load(); }

// In a child that was forked, which is none of the job: what it keeps open would keep its parent's lock.
void forget_in_child() {
  for (const std::atomic<Entry*>& item : entries) {
    const Entry* const found = item;
    if (found && found->memory) found->memory->forget();
  }
}

// A text that the caller reads before its thread calls again.
const char* kept(std::string text) {
  thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}

// The text of what `call` throws, or an empty one.
template <typename Call>
const char* error_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& problem) {
    return kept(problem.what());
  }
  return "";
}

// What `start` is called back with. Throws the error, if it is one.
Exchanged awaited(const std::function<void(Processes::Done)>& start) {
  const SignalWatch watch;  // Python's main thread may wait here
  const auto promise = std::make_shared<std::promise<Exchanged>>();
  start([promise](Exchanged with) { promise->set_value(std::move(with)); });
  Exchanged with = promise->get_future().get();
  if (!with.error.empty()) throw RendezvousError(with.error);
  return with;
}

}  // namespace

std::shared_ptr<Processes> find_processes(int64_t id) { return entry(id).processes; }

}  // namespace gluon_syncbn

// What Python calls (base/library.py), all without the interpreter lock. A text that is returned is empty if there is
// nothing to say, and holds until the same thread calls again.

using namespace gluon_syncbn;

EXPORTED int64_t gluon_syncbn_make_processes(int rank, int size, const char* advice, int can_resume,
                                             int must_be_asked) {
  static const int is_watched = pthread_atfork(nullptr, nullptr, forget_in_child);
  static_cast<void>(is_watched);
  auto made = std::make_unique<Entry>();
  made->outside = std::make_shared<Outside>(must_be_asked != 0);
  made->processes = std::make_shared<Processes>(rank, size, advice, made->outside, can_resume != 0);
  const size_t id = num_entries++;
  entries.at(id) = made.release();
  return static_cast<int64_t>(id);
}

struct OutsideTask {
  int kind;
  int64_t message, key, round;
  const double* numbers;
  int64_t num_numbers;
  const int* ranks;
  int64_t num_ranks;
  const char* text;
};

// What the thread that carries messages has to do next; it waits for so many seconds at most while it is needed, or
// busy, and else until there is something.
EXPORTED void gluon_syncbn_next_task(int64_t id, double seconds, int is_busy, OutsideTask* found) {
  Entry& mine = entry(id);
  mine.task =
      mine.outside->next(seconds, [&] { return is_busy ? Outside::kAllTheTime : mine.processes->need_of_carrier(); });
  const Outside::Task& task = mine.task;
  *found = {task.kind,
            task.message.kind,
            task.message.key,
            task.message.round,
            task.message.numbers.data(),
            static_cast<int64_t>(task.message.numbers.size()),
            task.ranks.data(),
            static_cast<int64_t>(task.ranks.size()),
            task.text.c_str()};
}

EXPORTED void gluon_syncbn_receive(int64_t id, int from, int64_t kind, int64_t key, int64_t round,
                                   const double* numbers, int64_t count) {
  find_processes(id)->receive(from, {kind, key, round, {numbers, numbers + count}});
}

// Nothing is known if `count` is negative.
EXPORTED void gluon_syncbn_hear_who_came(int64_t id, int64_t key, int64_t round, const int* ranks, int count) {
  std::optional<std::set<int>> came;
  if (count >= 0) came.emplace(ranks, ranks + count);
  find_processes(id)->hear_who_came(key, round, came);
}

EXPORTED void gluon_syncbn_lose_transport(int64_t id, const char* why) { find_processes(id)->lose_transport(why); }

EXPORTED void gluon_syncbn_end_processes(int64_t id, const char* why) { find_processes(id)->end(why); }

// Returns when all processes have brought a vector of `size` numbers, with their rows; or the error.
EXPORTED const char* gluon_syncbn_exchange(int64_t id, const char* what, int64_t key, double seconds,
                                           const double* vector, int64_t size, double* rows) {
  return error_of([&] {
    const auto processes = find_processes(id);
    const Channel channel{what, key, processes->everyone(), seconds};
    const Exchanged all = awaited([&](Processes::Done done) {
      processes->exchange(channel, Processes::kNext, {vector, vector + size}, std::move(done));
    });
    for (const std::vector<double>& row : all.rows) rows = std::copy(row.begin(), row.end(), rows);
  });
}

// Microseconds of each of so many exchanges, of which one begins where the one before has ended, as layers' do; or the
// error.
EXPORTED const char* gluon_syncbn_time_exchanges(int64_t id, int64_t key, int64_t numbers, int count,
                                                 double* microseconds) {
  struct Chain : std::enable_shared_from_this<Chain> {
    std::shared_ptr<Processes> processes;
    Channel channel;
    size_t numbers = 0;
    int left = 0;
    double* found = nullptr;
    std::promise<std::string> over;

    void next() {
      const auto began = Clock::now();
      processes->exchange(channel, Processes::kNext, std::vector<double>(numbers, 1.0),
                          [self = shared_from_this(), began](Exchanged all) {
                            *self->found++ = 1e6 * Seconds(Clock::now() - began).count();
                            const bool is_over = --self->left == 0 || !all.error.empty();
                            is_over ? self->over.set_value(all.error) : self->next();
                          });
    }
  };
  return error_of([&] {
    const auto chain = std::make_shared<Chain>();
    chain->processes = find_processes(id);
    chain->channel = {"exchange", key, chain->processes->everyone(), 60};
    chain->numbers = static_cast<size_t>(numbers);
    chain->left = count;
    chain->found = microseconds;
    chain->next();
    const std::string error = chain->over.get_future().get();
    if (!error.empty()) throw RendezvousError(error);
  });
}

EXPORTED void gluon_syncbn_fail_processes(int64_t id, const char* error) { find_processes(id)->fail(error); }

EXPORTED const char* gluon_syncbn_failure_of_processes(int64_t id) { return kept(find_processes(id)->failure()); }

EXPORTED void gluon_syncbn_state_of_processes(int64_t id, State* state) {
  *state = find_processes(id)->state();
  state->open_tasks = static_cast<int>(entry(id).outside->open_tasks());
}

// Why the step is abandoned.
EXPORTED const char* gluon_syncbn_abandon(int64_t id, int is_under_way) {
  return kept(find_processes(id)->abandon(is_under_way != 0));
}

// Returns when all processes have abandoned the step, or the error.
EXPORTED const char* gluon_syncbn_resume(int64_t id, const char* what, double seconds) {
  return error_of(
      [&] { awaited([&](Processes::Done done) { find_processes(id)->resume(what, seconds, std::move(done)); }); });
}

// Tells the others that this process ends, which may take so many seconds.
EXPORTED void gluon_syncbn_leave(int64_t id, double most) {
  Entry& mine = entry(id);
  mine.processes->leave();
  mine.outside->end();
  if (mine.memory) mine.memory->flush(most);
}

EXPORTED void gluon_syncbn_go_to_round(int64_t id, int64_t floor) { find_processes(id)->go_to_round(floor); }

EXPORTED void gluon_syncbn_name_processes(int64_t id, const char* const* names, int count) {
  find_processes(id)->name({names, names + count});
}

// Where so many processes find memory that they can share; or an empty text, and why it cannot be had.
EXPORTED const char* gluon_syncbn_offer_memory(int64_t id, int size, const char** problem) {
  Entry& mine = entry(id);
  mine.offer = nullptr;
  *problem = error_of([&] { mine.offer = std::make_unique<HostMemory::Offer>(size); });
  return mine.offer ? mine.offer->where.c_str() : "";
}

// Joins these ranks there, and listens; why it cannot.
EXPORTED const char* gluon_syncbn_join_memory(int64_t id, const char* where, const int* ranks, int count) {
  return error_of([&] {
    Entry& mine = entry(id);
    Processes& processes = *mine.processes;
    auto joined =
        HostMemory::join(where, processes.rank, {ranks, ranks + count},
                         [&processes](int from, Message message) { processes.receive(from, std::move(message)); });
    mine.memory.swap(joined);  // the other one goes last
    processes.share(mine.memory);
  });
}

// All have joined it: messages go there from now on; or not all could, and it goes.
EXPORTED void gluon_syncbn_use_memory(int64_t id, int all_have_joined) {
  Entry& mine = entry(id);
  mine.offer = nullptr;
  if (all_have_joined) return mine.processes->agree_on_memory();
  mine.processes->share(nullptr);
  mine.memory = nullptr;
}
