// The communicator (MPI or Horovod), whose messages Python carries: a thread of Python's asks here for its next task,
// and hands messages that arrive to `Processes`.
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
      kAskWhoCame,  // which of these ranks have come to the round of the message
      kAbandon,     // the step has failed here, as the text says
      kEnd,         // there is nothing more to do
    };
    Kind kind = kNothing;
    Message message;
    std::vector<int> ranks;
    std::string text;
  };

  explicit Outside(bool must_be_asked) : must_be_asked_(must_be_asked) {}

  // How often Python must look for messages that arrive.
  enum Need { kNotNow, kNowAndThen, kAllTheTime };

  // Waits for the next task. Returns kNothing after so many seconds under kAllTheTime, and after 100 ms under
  // kNowAndThen.
  Task next(double seconds, const std::function<Need()>& need);

  // The number of tasks that are not done; a task is done when Python asks for the next.
  size_t open_tasks();

  // No tasks come any more.
  void end() { add(Task::kEnd, {}, {}, ""); }

  void send(const Message& message, const std::vector<int>& ranks) override { add(Task::kSend, message, ranks, ""); }
  bool look() noexcept override;
  bool must_be_asked() const override { return must_be_asked_; }
  void ask_who_came(int64_t key, int64_t round, const std::vector<int>& ranks) override {
    add(Task::kAskWhoCame, {Message::kVector, key, round, {}}, ranks, "");
  }
  void abandon(const std::string& why) override { add(Task::kAbandon, {}, {}, why); }

 private:
  void add(Task::Kind kind, const Message& message, const std::vector<int>& ranks, const std::string& text);

  const bool must_be_asked_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool is_at_one_ = false;
};

}  // namespace gluon_syncbn
