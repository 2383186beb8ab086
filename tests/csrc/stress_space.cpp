// Three devices' threads ask for temporary space while steps open and close, and a simulated engine runs the operators
// late. Two devices may never get one buffer. In an open step, no call may get a buffer that pending operators of
// another call use, unless it is told that the space is crowded. Run under ThreadSanitizer and AddressSanitizer. Usage:
// stress_space [requests]

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "mxnet/c_api.h"
#include "mxnet/temporary_space.h"

using namespace gluon_syncbn;

namespace {

constexpr int kDevices = 3;
std::atomic<long> failures{0}, crowded{0}, none{0};

struct Variable : EngineVariable {
  size_t version() override { return written; }
  std::atomic<size_t> written{0};
  std::atomic<int> owner{-1}, pending{0};
  StepClock::Number step = 0;  // of its device's thread, as `call`
  uint64_t call = 0;
};

// Runs the operations in the order in which they were pushed, some at a time.
struct Engine {
  std::mutex mutex;
  std::deque<std::function<void()>> waiting;

  void push(std::function<void()> operation) {
    const std::lock_guard<std::mutex> lock(mutex);
    waiting.push_back(std::move(operation));
  }
  void run(size_t kept) {
    std::deque<std::function<void()>> now;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      for (; waiting.size() > kept; waiting.pop_front()) now.push_back(std::move(waiting.front()));
    }
    for (const auto& operation : now) operation();
  }
};
Engine engines[kDevices];

int push(void (*function)(void*, void*), void* argument, void (*)(void*), const void* context, void*, int, void*, int,
         const void*, int, const char*) {
  engines[static_cast<const DeviceContext*>(context)->id].push([=] { function(nullptr, argument); });
  return 0;
}

void use(const std::optional<Resource>& found, int device, StepClock::Number step, uint64_t call, bool is_crowded) {
  crowded += is_crowded;
  none += !found;
  if (!found) return;
  Variable& variable = *static_cast<Variable*>(found->variable);
  int owner = -1;
  if (!variable.owner.compare_exchange_strong(owner, device) && owner != device) {
    std::printf("devices %d and %d share a buffer\n", owner, device);
    failures += 1;
  }
  if (StepClock::is_open(step) && !is_crowded && variable.step == step && variable.call != call &&
      variable.pending > 0) {
    std::printf("device %d: two calls of an open step share a buffer\n", device);
    failures += 1;
  }
  variable.step = step;
  variable.call = call;
  variable.pending += 1;
  engines[device].push([&variable] {
    variable.written += 1;
    variable.pending -= 1;
  });
}

void ask(int device, long requests, DeviceBuffers& buffers, Stock (&stocks)[2], StepClock& step,
         const std::vector<std::shared_ptr<BufferOwner>>& graphs) {
  std::mt19937 random(static_cast<unsigned>(device));
  KeptBuffers kept(device);
  uint64_t call = 0;
  for (long request = 0; request < requests; ++request) {
    if (random() % 4 == 0) ++call;
    if (device == 0 && random() % 40 == 0) StepClock::is_open(step.number()) ? step.close() : step.open();
    const StepClock::Number now = step.number();
    const bool is_alone = random() % 8 == 0;
    if (is_alone) ++call;
    bool is_crowded = false;
    const std::optional<Resource> found = buffers.next(stocks[0], now, is_alone ? 0 : call + 1, is_crowded);
    use(found, device, now, call + 1, is_crowded);
    if (is_alone) ++call;
    if (random() % 16 == 0) {
      const std::shared_ptr<BufferOwner>& graph = graphs[random() % graphs.size()];
      graph->call(device, now);
      if (random() % 64 == 0) graph->is_gone = true;
      bool is_shared = false;
      use(kept.next(stocks[1], now, graph, is_shared), device, 0, 0, is_shared);
    }
    if (random() % 8 == 0) std::this_thread::yield();
  }
}

}  // namespace

const MXNetFunctions& gluon_syncbn::mxnet() {
  static const MXNetFunctions functions = [] {
    MXNetFunctions made{};
    made.engine_push_variables = push;
    return made;
  }();
  return functions;
}

int main(int count, char** arguments) {
  const long requests = count > 1 ? std::atol(arguments[1]) : 20000;
  std::vector<Variable> variables(800);
  Stock stocks[2];  // of buffers that go round, and that graphs keep
  for (size_t i = 0; i < variables.size(); ++i) stocks[i / 400].add({{}, &variables[i], 0, nullptr});
  StepClock step;
  std::vector<std::shared_ptr<BufferOwner>> graphs(12);
  for (auto& graph : graphs) graph = std::make_shared<BufferOwner>();
  std::deque<DeviceBuffers> buffers;  // for as long as the engine runs
  for (int device = 0; device < kDevices; ++device) buffers.emplace_back(device);
  std::atomic<int> running{kDevices};
  std::vector<std::thread> threads;
  for (int device = 0; device < kDevices; ++device) {
    threads.emplace_back([&, device] {
      ask(device, requests, buffers[static_cast<size_t>(device)], stocks, step, graphs);
      running -= 1;
    });
  }
  std::thread engine([&] {
    std::mt19937 random(99);
    while (running > 0) {
      for (Engine& one : engines) one.run(random() % 64);
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : threads) thread.join();
  engine.join();
  std::printf("%ld requests, %ld of them crowded, %ld without a buffer, %ld failures\n", kDevices * requests,
              crowded.load(), none.load(), failures.load());
  return failures == 0 ? 0 : 1;
}
