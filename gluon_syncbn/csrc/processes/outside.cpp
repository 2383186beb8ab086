#include "processes/outside.h"

#include <chrono>
#include <utility>

namespace gluon_syncbn {

Outside::Task Outside::next(double seconds, const std::function<Need()>& need) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
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

size_t Outside::open_tasks() {
  std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.size() + (is_at_one_ ? 1 : 0);
}

bool Outside::look() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_one();
  return true;
}

void Outside::add(Task::Kind kind, const Message& message, const std::vector<int>& ranks, const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back({kind, message, ranks, text});
  changed_.notify_one();
}

}  // namespace gluon_syncbn
