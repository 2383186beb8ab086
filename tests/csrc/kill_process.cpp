// Two processes share memory. One sends back all messages of the other, which are larger than a ring and follow one
// another without a pause. The test stops this process for a while, in which the sender must not wait, and continues
// it; then it kills it at a random moment, mostly in the middle of a message. All messages that have come must be
// whole, and the other process must soon know of the loss, although a forked child of the lost process lives on. Run
// under ThreadSanitizer and AddressSanitizer. Usage: kill_process [times]

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "processes/host_memory.h"

using namespace gluon_syncbn;

namespace {

long failures = 0;

void check(bool right, const std::string& what) {
  if (right) return;
  std::printf("%s\n", what.c_str());
  failures += 1;
}

void rest(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// The process that is killed.
[[noreturn]] void echo(const std::string& where) {
  std::shared_ptr<HostMemory> memory;
  std::mutex mutex;
  std::vector<Message> come;
  memory = std::make_shared<HostMemory>(where, 1, std::vector<int>{0, 1}, [&](int, Message message) {
    std::lock_guard<std::mutex> lock(mutex);
    come.push_back(std::move(message));
  });
  const pid_t child = fork();
  if (child == 0) {
    memory->forget();
    close(STDOUT_FILENO);  // a reader of the test's output need not wait for this child
    close(STDERR_FILENO);
    rest(5000);
    _exit(0);
  }
  for (;;) {
    std::vector<Message> messages;
    {
      std::lock_guard<std::mutex> lock(mutex);
      messages.swap(come);
    }
    for (const Message& message : messages) memory->send(message, {0});
    if (messages.empty()) rest(1);
  }
}

void run(uint64_t number) {
  std::mt19937_64 random(number);
  const HostMemory::Offer offer(2);
  const pid_t other = fork();  // before there are threads
  if (other == 0) echo(offer.where);
  std::atomic<long> come{0};
  {
    const auto memory =
        std::make_shared<HostMemory>(offer.where, 0, std::vector<int>{0, 1}, [&come](int from, Message message) {
          bool is_whole = from == 1 && message.numbers.size() == static_cast<size_t>(message.round);
          for (double value : message.numbers) is_whole = is_whole && value == static_cast<double>(message.key);
          check(is_whole && message.key == come, "a message has changed on its way");
          come += 1;
        });
    int64_t sent = 0;
    const auto send = [&] {
      const int64_t size = random() % 4 ? 150000 : static_cast<int64_t>(random() % 100);
      memory->send({Message::kVector, sent, size, std::vector<double>(static_cast<size_t>(size), double(sent))}, {1});
      sent += 1;
    };
    const auto wait_for = [&](const std::function<bool()>& is_so, const char* what) {
      const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (!is_so() && std::chrono::steady_clock::now() < until) rest(1);
      check(is_so(), what);
    };
    for (int i = 0; i < 3; ++i) send();
    wait_for([&] { return come == sent; }, "not all has come back");
    kill(other, SIGSTOP);
    const auto began = std::chrono::steady_clock::now();
    for (int i = 0; i < 8; ++i) send();
    check(std::chrono::steady_clock::now() - began < std::chrono::seconds(5), "the sender had to wait");
    check(!memory->has_lost(1), "a process that is stopped is taken for one that is gone");
    kill(other, SIGCONT);
    wait_for([&] { return come == sent; }, "not all has come back after it was stopped");
    for (int i = 0; i < 8; ++i) send();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 8000));
    kill(other, SIGKILL);
    int status = 0;
    waitpid(other, &status, 0);
    wait_for([&] { return memory->has_lost(1); }, "it is not known that it is gone");
  }
  check(come >= 11, "messages were lost");
}

}  // namespace

int main(int count, char** arguments) {
  const int times = count > 1 ? std::atoi(arguments[1]) : 20;
  for (int number = 0; number < times; ++number) run(static_cast<uint64_t>(number));
  std::printf("%d times, %ld failures\n", times, failures);
  return failures != 0;
}
