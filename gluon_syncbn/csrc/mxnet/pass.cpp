#include "mxnet/pass.h"

#include <dlfcn.h>

#include <atomic>
#include <exception>
#include <future>
#include <stdexcept>
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

void finish(void*, void* argument) {
  Run& run = **static_cast<RunPtr*>(argument);
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

void drop(void* argument) { delete static_cast<RunPtr*>(argument); }

void run_here(Pass& pass) {
  try {
    wait_for([&](const Rendezvous::Then& then) { pass.bring([then] { then({}); }); });
    pass.finish();
  } catch (...) {
    lose(pass);
    throw;
  }
}

}  // namespace

void run(std::shared_ptr<Pass> pass, int device, void* token) {
  if (!engine_completes) return run_here(*pass);
  const RunPtr run = std::make_shared<Run>(Run{std::move(pass), ""});
  const int context[] = {kCpu, device};
  const EngineProperty property = EngineProperty::kOrdinary;
  const int priority = 1;  // so that it is not bundled with other operators, which would then wait with it
  check_mxnet(mxnet().engine_push_async(bring, new RunPtr(run), drop, context, nullptr, 0, &token, 1, &property,
                                        priority, "SyncBatchNorm", false),
              "MXNet's engine took no operation");
  check_mxnet(mxnet().engine_push(finish, new RunPtr(run), drop, context, nullptr, 0, &token, 1, &property, priority,
                                  "SyncBatchNorm"),
              "MXNet's engine took no operation");
}

}  // namespace gluon_syncbn

namespace {

bool is_in_libmxnet(const void* address) {
  Dl_info found{}, known{};
  return dladdr(address, &found) && dladdr(reinterpret_cast<const void*>(gluon_syncbn::mxnet().engine_push), &known) &&
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

// Tries whether MXNet's engine has operations completed as pass.h would have them, and returns it. To be called before
// the first pass, on no thread of the engine, and not with the NaiveEngine.
EXPORTED int gluon_syncbn_try_engine() {
  using namespace gluon_syncbn;
  const Token token;
  void* const handle = token.handle();
  try {
    auto* promise = new std::promise<OnComplete>;
    std::future<OnComplete> future = promise->get_future();
    const int context[] = {kCpu, 0};
    const EngineProperty property = EngineProperty::kOrdinary;
    check_mxnet(mxnet().engine_push_async(try_operation, promise,
                                          [](void* made) { delete static_cast<std::promise<OnComplete>*>(made); },
                                          context, nullptr, 0, const_cast<void**>(&handle), 1, &property, 1,
                                          "SyncBatchNorm", false),
                "MXNet's engine took no operation");
    future.get()();  // or the promise was broken
    check_mxnet(mxnet().array_wait(handle), "the operation failed");
    engine_completes = true;
  } catch (const std::exception&) {
    mxnet().array_wait(handle);  // which takes the error away
    engine_completes = false;
  }
  return engine_completes;
}
