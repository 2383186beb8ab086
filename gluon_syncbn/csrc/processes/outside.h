// What the processes have met by, MPI or Horovod, where Python carries the messages: a thread of Python's asks here for
// what is to be done, and hands what arrives to `Processes`.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "processes/transport.h"

namespace gluon_syncbn {

class Outside : public Transport {
 public:
  struct Task {
    enum Kind : int {
      kNothing,     // the time is over
      kSend,        // this message, to these ranks
      kAskWhoCame,  // of these ranks, to the round of the message
      kGiveUp,      // the step has failed here, as the text says
      kEnd,         // there is nothing more to do
    };
    Kind kind = kNothing;
    Message message;
    std::vector<int> ranks;
    std::string text;
  };

  // Whether who has come to a round shows only when one asks.
  explicit Outside(bool must_be_asked) : must_be_asked_(must_be_asked) {}

  enum Need { kNotNow, kNowAndThen, kAllTheTime };

  // The next task. Waits for it: for so many seconds at most while what arrives is needed all the time, and else until
  // there is something to do, or it is to be looked now and then.
  Task next(double seconds, const std::function<Need()>& need);

  // How many tasks are not done: a task is when the next is asked for.
  size_t open_tasks();

  // No tasks come any more.
  void end() { add(Task::kEnd, {}, {}, ""); }

  void send(const Message& message, const std::vector<int>& ranks) override { add(Task::kSend, message, ranks, ""); }
  bool look() noexcept override;
  bool must_be_asked() const override { return must_be_asked_; }
  void ask_who_came(int64_t key, int64_t round, const std::vector<int>& ranks) override {
    add(Task::kAskWhoCame, {Message::kVector, key, round, {}}, ranks, "");
  }
  void give_up(const std::string& why) override { add(Task::kGiveUp, {}, {}, why); }

 private:
  void add(Task::Kind kind, const Message& message, const std::vector<int>& ranks, const std::string& text);

  const bool must_be_asked_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool is_at_one_ = false;
};

}  // namespace gluon_syncbn
