#include "mxnet/pass.h"

#include <dlfcn.h>

#include <atomic>
#include <exception>
#include <future>
#include <string>
#include <utility>

#include "exported.h"
#include "meeting/rendezvous.h"
#include "meeting/step.h"
#include "mxnet/array.h"
#include "mxnet/c_api.h"
#include "mxnet/engine.h"

namespace gluon_syncbn {
namespace {

std::atomic<bool> engine_completes{false};

// What the two operations share.
struct Run {
  std::shared_ptr<Pass> pass;
  std::string error;

  void fail(const std::exception& problem) {
    error = problem.what();
    step().fail(error);
  }
};
using RunPtr = std::shared_ptr<Run>;

// MXNet completes no call that throws anything but its own kind of error.
void lose(Pass& pass) {
  try {
    pass.lose();
  } catch (const std::exception&) {
  }
}

void bring(void*, void* on_complete, void* argument) {
  const OnComplete done = *static_cast<OnComplete*>(on_complete);
  const RunPtr run = *static_cast<RunPtr*>(argument);  // MXNet deletes the argument when the operation is complete
  try {
    run->pass->bring([run, done] { done(); });
  } catch (const std::exception& problem) {
    run->fail(problem);
    done();
  }
}

void finish(Run& run) {
  if (run.error.empty()) {
    try {
      return run.pass->finish();
    } catch (const std::exception& problem) {
      run.fail(problem);
    }
  }
  lose(*run.pass);
  throw_in_turn(run.error);
}

// Hands an operation to the engine that writes `token`, and is complete when what `function` is given has been called.
// The engine deletes the argument, also if it refuses the operation.
template <typename Argument>
void push_async(void (*function)(void*, void*, void*), Argument* argument, int device, void* token) {
  const auto drop = [](void* dropped) { delete static_cast<Argument*>(dropped); };
  const int context[] = {kCpu, device};
  const EngineProperty property = EngineProperty::kOrdinary;
  const int priority = 1;  // as in `push`
  check_mxnet(mxnet().engine_push_async(function, argument, drop, context, nullptr, 0, &token, 1, &property, priority,
                                        "SyncBatchNorm", false),
              "MXNet's engine took no operation");
}

void run_here(Pass& pass) {
  try {
    wait_until_done([&](std::function<void()> done) { pass.bring(std::move(done)); });
    pass.finish();
  } catch (...) {
    lose(pass);
    throw;
  }
}

bool is_in_libmxnet(const void* address) {
  Dl_info found{}, known{};
  return dladdr(address, &found) && dladdr(reinterpret_cast<const void*>(mxnet().engine_push), &known) &&
         found.dli_fbase == known.dli_fbase;
}

// Hands on what completes it.
void try_operation(void*, void* on_complete, void* argument) {
  const OnComplete done = *static_cast<OnComplete*>(on_complete);
  // What is thrown completes the operation.
  if (!is_in_libmxnet(reinterpret_cast<const void*>(done.callback))) throw dmlc::Error("no OnComplete");
  static_cast<std::promise<OnComplete>*>(argument)->set_value(done);
}

}  // namespace

void run(std::shared_ptr<Pass> pass, int device, void* token) {
  if (!engine_completes) return run_here(*pass);
  const RunPtr run = std::make_shared<Run>(Run{std::move(pass), ""});
  push_async(bring, new RunPtr(run), device, token);
  push<Run>(finish, run, EngineProperty::kOrdinary, device, {}, {token});
}

}  // namespace gluon_syncbn

// Tries whether MXNet's engine has operations completed as pass.h would have them, and returns it. To be called before
// the first pass, on no thread of the engine, and not with the NaiveEngine.
EXPORTED int gluon_syncbn_try_engine() {
  using namespace gluon_syncbn;
  const Array token(new_token());
  try {
    auto* promise = new std::promise<OnComplete>;
    std::future<OnComplete> future = promise->get_future();
    push_async(try_operation, promise, 0, token.handle());
    future.get()();  // or the promise was broken
    check_mxnet(mxnet().array_wait(token.handle()), "the operation failed");
    engine_completes = true;
  } catch (const std::exception&) {
    mxnet().array_wait(token.handle());  // which takes the error away
    engine_completes = false;
  }
  return engine_completes;
}
