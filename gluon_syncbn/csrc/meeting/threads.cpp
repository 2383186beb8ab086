#include "meeting/threads.h"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace gluon_syncbn {
namespace {

struct Threads {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  size_t idle = 0;  // at least as many threads as there is work to take are idle, or have just been made
};

// Never destroyed, because threads wait in it while the process exits; replaced in a process that was forked.
std::atomic<Threads*> current{new Threads};

void serve(Threads& threads) {
  std::unique_lock<std::mutex> lock(threads.mutex);
  for (;;) {
    threads.idle += 1;
    threads.changed.wait(lock, [&] { return !threads.work.empty(); });
    threads.idle -= 1;
    std::function<void()> work = std::move(threads.work.front());
    threads.work.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // its captures go now, not with the next work
    lock.lock();
  }
}

}  // namespace

void run_on_a_thread(std::function<void()> work) {
  Threads& threads = *current;
  std::lock_guard<std::mutex> lock(threads.mutex);
  threads.work.push_back(std::move(work));
  if (threads.idle >= threads.work.size()) {
    threads.changed.notify_one();
    return;
  }
  try {
    std::thread([&threads] { serve(threads); }).detach();
  } catch (...) {
    threads.work.pop_back();
    throw;
  }
}

void forget_threads() { current = new Threads; }

}  // namespace gluon_syncbn
