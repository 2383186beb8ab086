// All `Processes` that Python has made, by their ids; and the communicator, whose messages Python carries.

#include <pthread.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <future>

#include "exported.h"
#include "processes/host_memory.h"
#include "processes/processes.h"

namespace gluon_syncbn {
namespace {

// The communicator (MPI or Horovod). A thread of Python's asks here for its next task, and hands messages that arrive
// to `Processes`.
class Outside : public Transport {
 public:
  struct Task {
    enum Kind : int {
      kNothing,     // the time is over
      kSend,        // this message, to these ranks
      kAskWhoCame,  // which of these ranks have come to the round of the message
      kAbandon,     // the step has failed here, as the text says
      kEnd,         // there is nothing more to do
    };
    Kind kind = kNothing;
    Message message;
    std::vector<int> ranks;
    std::string text;
  };

  // Waits for the next task. Returns kNothing after so many seconds under kAllTheTime, and after 100 ms under
  // kNowAndThen.
  Task next(double seconds, const std::function<Need()>& need) {
    const auto until = Clock::now() + Seconds(seconds);
    std::unique_lock<std::mutex> lock(mutex_);
    is_at_one_ = false;
    while (tasks_.empty()) {
      lock.unlock();
      const Need now = need();  // it asks `Processes`, which may be about to ask here
      lock.lock();
      if (!tasks_.empty()) break;
      if (now == kAllTheTime) {
        if (changed_.wait_until(lock, until) == std::cv_status::timeout && tasks_.empty()) return {};
      } else {
        // `look` tells of a new wait; a look now and then is for safety.
        changed_.wait_for(lock, std::chrono::milliseconds(100));
        if (now == kNowAndThen && tasks_.empty()) return {};
      }
    }
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    is_at_one_ = true;
    return task;
  }

  // The number of tasks that are not done; a task is done when Python asks for the next.
  size_t open_tasks() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.size() + (is_at_one_ ? 1 : 0);
  }

  // No tasks come any more.
  void end() { add(Task::kEnd, {}, {}, ""); }

  void send(const Message& message, const std::vector<int>& ranks) override { add(Task::kSend, message, ranks, ""); }
  bool look() noexcept override {
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_one();
    return true;
  }
  void ask_who_came(int64_t key, int64_t round, const std::vector<int>& ranks) override {
    add(Task::kAskWhoCame, {Message::kVector, key, round, {}}, ranks, "");
  }
  void abandon(const std::string& why) override { add(Task::kAbandon, {}, {}, why); }

 private:
  void add(Task::Kind kind, const Message& message, const std::vector<int>& ranks, const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back({kind, message, ranks, text});
    changed_.notify_one();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool is_at_one_ = false;
};

struct Registration {
  std::shared_ptr<Outside> outside;
  std::shared_ptr<Processes> processes;
  std::unique_ptr<HostMemory::Offer> offer;
  std::shared_ptr<HostMemory> memory;
  Outside::Task task;  // the last that Python was given, which still reads it
};

// Nothing is ever taken out, since messages may still come while the process exits. There are no locks, since a fork
// may come at any time.
constexpr size_t kMost = 1024;
struct {
  std::array<std::atomic<Registration*>, kMost> by_id{};
  std::atomic<size_t> count{0};
} entries;

Registration& entry(int64_t id) { return *entries.by_id.at(static_cast<size_t>(id)).load(); }

// In a child that was forked, which is not of the job: its open files would keep its parent's locks.
void forget_in_child() {
  for (const std::atomic<Registration*>& item : entries.by_id) {
    const Registration* const found = item;
    if (found && found->memory) found->memory->forget();
  }
}

// Returns the result that `start` is called back with, or throws its error.
Outcome awaited(const std::function<void(Then)>& start) {
  const SignalWatch watch;  // Python's main thread may wait here
  const auto promise = std::make_shared<std::promise<Outcome>>();
  start([promise](const Outcome& with) { promise->set_value(with); });
  Outcome with = promise->get_future().get();
  if (!with.error.empty()) throw RendezvousError(with.error);
  return with;
}

}  // namespace

std::shared_ptr<Processes> find_processes(int64_t id) { return entry(id).processes; }

}  // namespace gluon_syncbn

using namespace gluon_syncbn;

// Returns the id, or -1 if there are too many.
EXPORTED int64_t gluon_syncbn_make_processes(int rank, int size, const char* advice, int can_resume) {
  static const int is_watched = pthread_atfork(nullptr, nullptr, forget_in_child);
  static_cast<void>(is_watched);
  auto made = std::make_unique<Registration>();
  made->outside = std::make_shared<Outside>();
  made->processes = std::make_shared<Processes>(rank, size, advice, made->outside, can_resume != 0);
  const size_t id = entries.count++;
  if (id >= kMost) return -1;
  entries.by_id[id] = made.release();
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

// Waits for the next task of the thread that carries messages: for so many seconds at most while the thread is busy or
// needed all the time.
EXPORTED void gluon_syncbn_next_task(int64_t id, double seconds, int is_busy, OutsideTask* found) {
  Registration& mine = entry(id);
  mine.task = mine.outside->next(seconds, [&] { return is_busy ? kAllTheTime : mine.processes->need_of_carrier(); });
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
  entry(id).processes->receive(from, {kind, key, round, {numbers, numbers + count}});
}

// Nothing is known if `count` is negative.
EXPORTED void gluon_syncbn_hear_who_came(int64_t id, int64_t key, int64_t round, const int* ranks, int count) {
  std::optional<std::set<int>> came;
  if (count >= 0) came.emplace(ranks, ranks + count);
  entry(id).processes->hear_who_came(key, round, came);
}

EXPORTED void gluon_syncbn_lose_transport(int64_t id, const char* why) { entry(id).processes->lose_transport(why); }

EXPORTED void gluon_syncbn_end_processes(int64_t id, const char* why) { entry(id).processes->end(why); }

// Returns when all processes have brought a vector of `size` numbers, with their rows; or the error.
EXPORTED const char* gluon_syncbn_exchange(int64_t id, const char* what, int64_t key, double seconds,
                                           const double* vector, int64_t size, double* rows) {
  return error_of([&] {
    Processes& processes = *entry(id).processes;
    const Outcome all = awaited([&](Then done) {
      processes.exchange({what, key, processes.everyone(), seconds}, Processes::kNext, {vector, vector + size},
                         std::move(done));
    });
    for (const std::vector<double>& row : *all.contributions) rows = std::copy(row.begin(), row.end(), rows);
  });
}

// Measures so many exchanges, in microseconds; or returns the error. Each begins where the previous one has ended, as
// exchanges of layers do.
EXPORTED const char* gluon_syncbn_time_exchanges(int64_t id, int64_t key, int64_t numbers, int count,
                                                 double* microseconds) {
  struct Chain : std::enable_shared_from_this<Chain> {
    Chain(Processes& among, int64_t key, int64_t numbers, int count, double* found)
        : processes(among),
          channel{"exchange", key, among.everyone(), 60},
          vector(static_cast<size_t>(numbers), 1.0),
          left(count),
          microseconds(found) {}

    void next(Then done) {
      const auto began = Clock::now();
      processes.exchange(channel, Processes::kNext, vector,
                         [self = shared_from_this(), began, done](const Outcome& all) {
                           *self->microseconds++ = 1e6 * Seconds(Clock::now() - began).count();
                           const bool is_over = --self->left == 0 || !all.error.empty();
                           is_over ? done(all) : self->next(done);
                         });
    }

    Processes& processes;
    const Channel channel;
    const std::vector<double> vector;
    int left;
    double* microseconds;
  };
  return error_of([&] {
    const auto chain = std::make_shared<Chain>(*entry(id).processes, key, numbers, count, microseconds);
    awaited([&](Then done) { chain->next(std::move(done)); });
  });
}

EXPORTED void gluon_syncbn_fail_processes(int64_t id, const char* error) { entry(id).processes->fail(error); }

EXPORTED const char* gluon_syncbn_failure_of_processes(int64_t id) { return kept(entry(id).processes->failure()); }

EXPORTED void gluon_syncbn_state_of_processes(int64_t id, State* state) {
  *state = entry(id).processes->state();
  state->open_tasks = static_cast<int>(entry(id).outside->open_tasks());
}

// Returns why the step is abandoned.
EXPORTED const char* gluon_syncbn_abandon(int64_t id, int is_under_way, int64_t step) {
  return kept(entry(id).processes->abandon(is_under_way != 0, step));
}

// Returns when all processes have abandoned the step, or the error.
EXPORTED const char* gluon_syncbn_resume(int64_t id, const char* what, double seconds) {
  return error_of([&] { awaited([&](Then done) { entry(id).processes->resume(what, seconds, std::move(done)); }); });
}

// Tells the others that this process ends, for so many seconds at most.
EXPORTED void gluon_syncbn_leave(int64_t id, double most) {
  Registration& mine = entry(id);
  mine.processes->leave();
  mine.outside->end();
  if (mine.memory) mine.memory->flush(most);
}

EXPORTED void gluon_syncbn_name_processes(int64_t id, const char* const* names, int count) {
  entry(id).processes->name({names, names + count});
}

// Makes memory for so many processes. Returns where they find it; or an empty text, and the problem.
EXPORTED const char* gluon_syncbn_offer_memory(int64_t id, int size, const char** problem) {
  Registration& mine = entry(id);
  mine.offer = nullptr;
  *problem = error_of([&] { mine.offer = std::make_unique<HostMemory::Offer>(size); });
  return mine.offer ? mine.offer->where.c_str() : "";
}

// Joins these ranks there, and listens; or returns the problem.
EXPORTED const char* gluon_syncbn_join_memory(int64_t id, const char* where, const int* ranks, int count) {
  return error_of([&] {
    Registration& mine = entry(id);
    Processes& processes = *mine.processes;
    auto memory = std::make_shared<HostMemory>(
        where, processes.rank, std::vector<int>{ranks, ranks + count},
        [&processes](int from, Message message) { processes.receive(from, std::move(message)); });
    mine.memory.swap(memory);  // the other one goes last
    processes.share(mine.memory);
  });
}

// Sends messages there from now on, if all have joined; or drops the memory.
EXPORTED void gluon_syncbn_use_memory(int64_t id, int all_have_joined) {
  Registration& mine = entry(id);
  mine.offer = nullptr;
  if (all_have_joined) return mine.processes->agree_on_memory();
  mine.processes->share(nullptr);
  mine.memory = nullptr;
}
