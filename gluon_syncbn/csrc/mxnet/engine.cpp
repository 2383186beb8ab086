#include "mxnet/engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "exported.h"
#include "meeting/step.h"

namespace gluon_syncbn {
namespace {

// The CPU thread of the engine on which all gates are.
constexpr int kGateThread = 0;

// After this time the engine has added an exception to its list; or has also run all operations that hand it on.
constexpr std::chrono::microseconds kTimeToThrow{500}, kTimeToRunAndThrow{5000};

struct Gates {
  const Array heads{new_token()};  // a look at a head of a backward pass writes this token
  std::mutex mutex;
  // The numbers of gates that have not opened. A gate leaves when it opens; a gate that is still here when nothing runs
  // any more has held its update back.
  std::set<int64_t> closed;
  int64_t last = 0;
  Clock::time_point free_turn;  // when the next error may be thrown
};

// Never destroyed, because operators may still fail while the process exits.
Gates& gates() {
  static auto* all = new Gates;
  return *all;
}

// Returns when earlier errors have had the time that they reserved here.
void wait_for_turn(std::chrono::microseconds time) {
  Clock::time_point mine;
  {
    std::lock_guard<std::mutex> lock(gates().mutex);
    mine = std::max(Clock::now(), gates().free_turn);
    gates().free_turn = mine + time;
  }
  std::this_thread::sleep_until(mine);
}

// Throws if the update must not be.
void pass_gate(int64_t number, bool has_gradients, const std::string& skipped_text, const std::string& advice) {
  if (!has_gradients || step().has_failed()) {
    step().fail(skipped_text);
    wait_for_turn(kTimeToThrow);
    const std::string failure = step().failure();
    const bool has_advice = failure.find("To go on, ") != std::string::npos;  // as in base/errors.py
    throw dmlc::Error("This update was not made, because its step had failed: " + failure +
                      (has_advice ? "" : " " + advice));
  }
  std::lock_guard<std::mutex> lock(gates().mutex);
  gates().closed.erase(number);
}

// Returns 0, or -1 after leaving MXNet's text for MXGetLastError.
template <typename Body>
int or_code(const Body& body) {
  try {
    body();
    return 0;
  } catch (const MXNetFailure&) {
    return -1;
  }
}

}  // namespace

void push(std::function<void()> operation, EngineProperty property, int thread, std::vector<void*> reads,
          std::vector<void*> writes, const char* name) {
  using Operation = std::function<void()>;
  const auto run = [](void*, void* pushed) { (*static_cast<Operation*>(pushed))(); };
  const auto drop = [](void* pushed) { delete static_cast<Operation*>(pushed); };
  const int context[] = {kCpu, thread};
  // The engine drops the operation, also if it refuses it.
  check_mxnet(mxnet().engine_push(run, new Operation(std::move(operation)), drop, context, reads.data(),
                                  static_cast<int>(reads.size()), writes.data(), static_cast<int>(writes.size()),
                                  &property, kPriority, name),
              "MXNet's engine took no operation");
}

void push_async(std::function<void(OnComplete)> operation, int thread, void* token) {
  // Builds of MXNet with an asynchronous engine for GPUs pass one argument more, before `on_complete`.
  struct Operation {
    const Operation* self;
    std::function<void(OnComplete)> run;
  };
  const auto run = [](void*, void* on_complete, void* pushed) {
    if (static_cast<Operation*>(pushed)->self != pushed) throw dmlc::Error("another interface");
    const auto mine = static_cast<Operation*>(pushed)->run;  // the engine drops it when the operation is complete
    mine(*static_cast<OnComplete*>(on_complete));
  };
  const auto drop = [](void* pushed) { delete static_cast<Operation*>(pushed); };
  const int context[] = {kCpu, thread};
  const EngineProperty property = EngineProperty::kOrdinary;
  auto* const pushed = new Operation{nullptr, std::move(operation)};
  pushed->self = pushed;
  check_mxnet(mxnet().engine_push_async(run, pushed, drop, context, nullptr, 0, &token, 1, &property, kPriority,
                                        "SyncBatchNorm", false),
              "MXNet's engine took no operation");
}

void* new_token() {
  const unsigned shape[] = {1};
  const int delay_alloc = 1, float32 = 0;
  void* token = nullptr;
  check_mxnet(mxnet().array_create(shape, 1, kCpu, 0, delay_alloc, float32, &token), "no token");
  return token;
}

void throw_in_turn(const std::string& error) {
  wait_for_turn(kTimeToRunAndThrow);
  throw dmlc::Error(error);
}

void poison(void* array, const std::string& error) {
  wait_for_turn(kTimeToRunAndThrow);
  push([error] { throw dmlc::Error(error); }, EngineProperty::kNoSkip, kGateThread, {}, {array});
}

}  // namespace gluon_syncbn

using namespace gluon_syncbn;

// Gives `array` this error.
EXPORTED int gluon_syncbn_poison(void* array, const char* error) {
  return or_code([&] { poison(array, error); });
}

// Watches `arrays` of one device, and protects the running `statistics` that the same call writes, from the device's
// own `thread`. If the engine has skipped something, the step fails with `error`. Gates wait for arrays that are the
// `heads` of a backward pass. No handle may stand twice in `statistics`.
EXPORTED int gluon_syncbn_watch(void** arrays, int num_arrays, void** statistics, int num_statistics, int are_heads,
                                int thread, const char* error) {
  return or_code([&] {
    const auto present = std::make_shared<std::atomic<int>>(0);
    const auto text = std::make_shared<const std::string>(error);  // for all that look
    const auto look = [present, num_arrays, text] {
      if (*present != num_arrays) step().fail(*text);
    };
    // One array alone needs no token: the look writes it, and so comes after the count, which reads it.
    const Array token(num_arrays + num_statistics > 1 ? new_token() : nullptr);
    const std::vector<void*> tokens(token.handle() ? 1 : 0, token.handle());
    for (int i = 0; i < num_arrays; ++i) {
      push([present] { *present += 1; }, EngineProperty::kOrdinary, thread, {arrays[i]}, tokens);
    }
    for (int i = 0; i < num_arrays; ++i) {  // each on its own: two of them may be the same memory
      std::vector<void*> writes{arrays[i]};
      if (are_heads) writes.push_back(gates().heads.handle());
      push(look, EngineProperty::kNoSkip, thread, tokens, writes);
    }
    if (num_statistics == 0) return;
    const auto protect = [look, text] {
      look();
      if (!step().has_failed()) return;
      step().fail(*text);  // it is known now that the failure has stopped something of a layer
      wait_for_turn(kTimeToThrow);
      throw dmlc::Error("These running statistics were not updated, because the step had failed: " + step().failure());
    };
    push(protect, EngineProperty::kNoSkip, thread, tokens, std::vector<void*>(statistics, statistics + num_statistics));
  });
}

// Waits until `array` is computed. Returns 1 if it is, and 0 if it has an error instead, which its next reader gets.
EXPORTED int gluon_syncbn_is_readable(void* array) {
  try {
    int device_type = 0, device = 0;
    check_mxnet(mxnet().array_context(array, &device_type, &device), "no array");
    if (device_type == 0) return 1;  // nothing to compute
    auto has_run = std::make_shared<std::promise<void>>();
    std::future<void> is_over = has_run->get_future();
    push([has_run = std::move(has_run)] { has_run->set_value(); }, EngineProperty::kOrdinaryAtOnce, kGateThread,
         {array}, {}, "WaitToRead");
    is_over.get();
    return 1;
  } catch (const std::future_error&) {  // the engine has dropped the promise: it has skipped the operation
    return 0;
  } catch (const MXNetFailure&) {
    return -1;
  }
}

// Sets gates before updates. Gate i of `num_gates` opens if `num_gradients[i]` arrays could be computed, on all
// devices; the `num_others[i]` arrays after them, weights and the like, are only written by the update. Some updates
// write these without a look at a gradient. The gates have consecutive numbers, from `first` on.
EXPORTED int gluon_syncbn_gate(void** arrays, const int* num_gradients, const int* num_others, int num_gates,
                               const char* skipped_text, const char* advice, int64_t* first) {
  return or_code([&] {
    {
      std::lock_guard<std::mutex> lock(gates().mutex);
      *first = gates().last + 1;
      while (gates().last < *first + num_gates - 1) gates().closed.insert(++gates().last);
    }
    for (int i = 0; i < num_gates; ++i) {
      const std::vector<void*> gradients(arrays, arrays + num_gradients[i]);
      arrays += num_gradients[i] + num_others[i];
      const std::vector<void*> guarded(arrays - num_gradients[i] - num_others[i], arrays);
      const auto has_gradients = std::make_shared<std::atomic<bool>>(false);
      push([has_gradients] { *has_gradients = true; }, EngineProperty::kOrdinary, kGateThread, gradients, {});
      // One gate for all needs no heads: a failure shows in some gradient.
      const std::vector<void*> heads_of_step(num_gates > 1, gates().heads.handle());
      push([=, number = *first + i, skipped = std::string(skipped_text),
            end = std::string(advice)] { pass_gate(number, *has_gradients, skipped, end); },
           EngineProperty::kNoSkip, kGateThread, heads_of_step, guarded);
    }
  });
}

// Makes a read of one of `arrays` wait, from now on, for all operations that were pushed with any of them, on this CPU
// `thread` of the engine. No handle may stand twice in it.
EXPORTED int gluon_syncbn_seal(void** arrays, int num_arrays, int thread) {
  const std::vector<void*> sealed(arrays, arrays + num_arrays);
  return or_code([&] { push([] {}, EngineProperty::kNoSkip, thread, {}, sealed); });
}

// Gives the engine's list of exceptions memory for `exceptions`: it doubles it when it is full. Nothing may be running.
// The exceptions that this takes are still there afterwards.
EXPORTED int gluon_syncbn_reserve(int exceptions, const char* text) {
  return or_code([&] {
    const Array token(new_token());
    for (int i = 0; i < exceptions / 2 + 1; ++i) {
      push([error = std::string(text)] { throw dmlc::Error(error); }, EngineProperty::kNoSkip, kGateThread, {},
           {token.handle()});
    }
  });
}

// Whether a gate has opened.
EXPORTED int gluon_syncbn_gate_has_opened(int64_t number) {
  std::lock_guard<std::mutex> lock(gates().mutex);
  return gates().closed.count(number) == 0;
}

// Forgets the gates that held updates back. Nothing may be running.
EXPORTED void gluon_syncbn_forget_gates() {
  std::lock_guard<std::mutex> lock(gates().mutex);
  gates().closed.clear();
}
