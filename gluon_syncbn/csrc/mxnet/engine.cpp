#include "mxnet/engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "exported.h"
#include "meeting/step.h"
#include "mxnet/array.h"
#include "mxnet/c_api.h"

namespace gluon_syncbn {
namespace {

// The CPU thread of the engine on which all gates are.
constexpr int kGateThread = 0;

// What is thrown is in the engine's list of exceptions by then; or also what the engine is yet to run.
constexpr std::chrono::microseconds kTimeToThrow{500}, kTimeToRunAndThrow{5000};

void throw_error(const std::string& error) { throw dmlc::Error(error); }

// Written by who looks at a head of a backward pass.
const Array& heads() {
  static const auto* token = new Array(new_token());  // never destroyed, like the step
  return *token;
}

// Returns when those who were here before have had the time that they wanted for what they throw.
void wait_for_turn(std::chrono::microseconds time) {
  struct Turns {
    std::mutex mutex;
    Clock::time_point free;
  };
  static auto* turns = new Turns;  // never destroyed, because operators may still fail while the process exits
  Clock::time_point mine;
  {
    std::lock_guard<std::mutex> lock(turns->mutex);
    mine = std::max(Clock::now(), turns->free);
    turns->free = mine + time;
  }
  std::this_thread::sleep_until(mine);
}

// How many have counted themselves of those who must.
struct Count {
  explicit Count(int expected) : expected(expected) {}

  bool is_complete() const { return present == expected; }

  const int expected;
  std::atomic<int> present{0};
};

struct Watch : Count {
  Watch(int expected, std::string error) : Count(expected), error(std::move(error)) {}

  const std::string error;  // of the step, if something was skipped
};

void look(Watch& watch) {
  if (!watch.is_complete()) step().fail(watch.error);
}

void protect(Watch& watch) {
  if (watch.is_complete() && !step().has_failed()) return;
  step().fail(watch.error);
  wait_for_turn(kTimeToThrow);
  throw dmlc::Error("These running statistics were not updated, because the step had failed: " + step().failure());
}

// Numbers of gates that have not opened. A gate leaves when it opens; one that is still here when nothing runs any more
// has held its update back.
struct Gates {
  std::mutex mutex;
  int64_t last = 0;
  std::set<int64_t> closed;
};
Gates& gates() {
  static auto* all = new Gates;  // never destroyed, like the step
  return *all;
}

struct Gate : Count {
  Gate(int64_t number, std::string skipped_text, std::string advice)
      : Count(1), number(number), skipped_text(std::move(skipped_text)), advice(std::move(advice)) {}

  const int64_t number;
  const std::string skipped_text, advice;
};

// Throws if the update must not be.
void pass(Gate& gate) {
  if (!gate.is_complete() || step().has_failed()) {
    step().fail(gate.skipped_text);
    wait_for_turn(kTimeToThrow);
    const std::string failure = step().failure();
    const bool has_advice = failure.find("To go on, ") != std::string::npos;  // as in base/errors.py
    throw dmlc::Error("This update was not made, because its step had failed: " + failure +
                      (has_advice ? "" : " " + gate.advice));
  }
  std::lock_guard<std::mutex> lock(gates().mutex);
  gates().closed.erase(gate.number);
}

// The engine drops this when the operation is over, run or skipped.
struct Reading {
  ~Reading() { is_over.set_value(has_run); }

  std::promise<bool> is_over;
  bool has_run = false;
};

void read(Reading& reading) { reading.has_run = true; }

struct Nothing {};

void do_nothing(Nothing&) {}

void count(Count& all) { all.present += 1; }

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
  push(throw_error, std::make_shared<const std::string>(error), EngineProperty::kNoSkip, kGateThread, {}, {array});
}

}  // namespace gluon_syncbn

// What Python calls (base/library.py)

using namespace gluon_syncbn;

// Whoever reads `array` gets this error.
EXPORTED int gluon_syncbn_poison(void* array, const char* error) {
  return or_code([&] { poison(array, error); });
}

// Watches `arrays` of one device, and protects the running `statistics` that the same call writes, from the device's
// own `thread`. `error` is that of the step if something was skipped. Gates wait for those that are `heads` of a
// backward pass. No handle may stand twice in `statistics`.
EXPORTED int gluon_syncbn_watch(void** arrays, int num_arrays, void** statistics, int num_statistics, int are_heads,
                                int thread, const char* error) {
  return or_code([&] {
    const auto watch = std::make_shared<Watch>(num_arrays, error);
    // One array alone needs no token: who writes it comes after who reads it.
    const Array token(num_arrays + num_statistics > 1 ? new_token() : nullptr);
    const std::vector<void*> tokens(token.handle() ? 1 : 0, token.handle());
    for (int i = 0; i < num_arrays; ++i) {
      push<Count>(count, watch, EngineProperty::kOrdinary, thread, {arrays[i]}, tokens);
    }
    for (int i = 0; i < num_arrays; ++i) {  // each on its own: two of them may be the same memory
      std::vector<void*> writes{arrays[i]};
      if (are_heads) writes.push_back(heads().handle());
      push<Watch>(look, watch, EngineProperty::kNoSkip, thread, tokens, writes);
    }
    if (num_statistics > 0) {
      push<Watch>(protect, watch, EngineProperty::kNoSkip, thread, tokens,
                  std::vector<void*>(statistics, statistics + num_statistics));
    }
  });
}

// Waits until `array` is computed. Returns 1 if it is, 0 if it has an error instead, which is still to be thrown to who
// reads it; -1 as the others.
EXPORTED int gluon_syncbn_is_readable(void* array) {
  try {
    int device_type = 0, device = 0;
    check_mxnet(mxnet().array_context(array, &device_type, &device), "no array");
    if (device_type == 0) return 1;  // nothing to compute
    auto reading = std::make_shared<Reading>();
    auto has_run = reading->is_over.get_future();
    push<Reading>(read, std::move(reading), EngineProperty::kOrdinaryAtOnce, kGateThread, {array}, {}, "WaitToRead");
    return has_run.get();
  } catch (const MXNetFailure&) {
    return -1;
  }
}

// Gates before the updates that read these gradients: `counts[i]` of them, on all devices, at gate i of `num_gates`,
// one after the other. Gives the number of the first gate in `first`; those of the others follow.
EXPORTED int gluon_syncbn_gate(void** gradients, const int* counts, int num_gates, const char* skipped_text,
                               const char* advice, int64_t* first) {
  return or_code([&] {
    {
      std::lock_guard<std::mutex> lock(gates().mutex);
      *first = gates().last + 1;
      while (gates().last < *first + num_gates - 1) gates().closed.insert(++gates().last);
    }
    for (int i = 0; i < num_gates; gradients += counts[i++]) {
      const std::vector<void*> guarded(gradients, gradients + counts[i]);
      const auto gate = std::make_shared<Gate>(*first + i, skipped_text, advice);
      push<Count>(count, gate, EngineProperty::kOrdinary, kGateThread, guarded, {});
      // One gate for all needs no heads: a failure shows in some gradient.
      const std::vector<void*> heads_of_step(num_gates > 1, heads().handle());
      push<Gate>(pass, gate, EngineProperty::kNoSkip, kGateThread, heads_of_step, guarded);
    }
  });
}

// Whoever reads one of `arrays` from now on comes after all that has been asked for with any of them. No handle may
// stand twice in it.
EXPORTED int gluon_syncbn_seal(void** arrays, int num_arrays) {
  return or_code([&] {
    push(do_nothing, std::make_shared<Nothing>(), EngineProperty::kNoSkip, kGateThread, {},
         std::vector<void*>(arrays, arrays + num_arrays));
  });
}

// Gives the engine's list of exceptions memory for `exceptions`: it doubles it when it is full. Nothing may be running.
// The exceptions that this takes are still there afterwards.
EXPORTED int gluon_syncbn_reserve(int exceptions) {
  return or_code([&] {
    const Array token(new_token());
    const auto error = std::make_shared<const std::string>("gluon_syncbn: this error is of no account.");
    for (int i = 0; i < exceptions / 2 + 1; ++i) {
      push(throw_error, error, EngineProperty::kNoSkip, kGateThread, {}, {token.handle()});
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
