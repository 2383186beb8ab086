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
#include "mxnet/engine.h"

namespace gluon_syncbn {
namespace {

std::atomic<bool> engine_completes{false};

// MXNet completes no call that throws anything but its own kind of error.
void lose(EnginePass& pass) {
  try {
    pass.lose();
  } catch (const std::exception&) {
  }
}

void run_here(EnginePass& pass) {
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

}  // namespace

void run(std::shared_ptr<EnginePass> pass, int device, void* token) {
  if (!engine_completes) return run_here(*pass);
  // Both operations have it.
  const auto error = std::make_shared<std::string>();
  const auto fail = [error](const std::exception& problem) {
    *error = problem.what();
    step().fail(*error);
  };
  const auto bring = [pass, fail](OnComplete done) {
    try {
      pass->bring([pass, done] { done(); });
    } catch (const std::exception& problem) {
      fail(problem);
      done();
    }
  };
  const auto finish = [pass, fail, error] {
    if (error->empty()) {
      try {
        return pass->finish();
      } catch (const std::exception& problem) {
        fail(problem);
      }
    }
    lose(*pass);
    throw_in_turn(*error);
  };
  push_async(bring, device, token);
  push(finish, EngineProperty::kOrdinary, device, {}, {token});
}

}  // namespace gluon_syncbn

// Tries whether MXNet's engine completes operations as pass.h describes, and returns it. To be called before the first
// pass, on no thread of the engine, and not with the NaiveEngine.
EXPORTED int gluon_syncbn_try_engine() {
  using namespace gluon_syncbn;
  const Array token(new_token());
  try {
    auto promise = std::make_shared<std::promise<OnComplete>>();
    std::future<OnComplete> future = promise->get_future();
    // The engine has the only promise, and breaks it where it drops the operation.
    push_async(
        [promise = std::move(promise)](OnComplete done) {
          // The error completes the operation.
          if (!is_in_libmxnet(reinterpret_cast<const void*>(done.callback))) throw dmlc::Error("no OnComplete");
          promise->set_value(done);
        },
        0, token.handle());
    future.get()();  // or the promise was broken
    check_mxnet(mxnet().array_wait(token.handle()), "the operation failed");
    engine_completes = true;
  } catch (const std::exception&) {
    mxnet().array_wait(token.handle());  // which takes the error away
    engine_completes = false;
  }
  return engine_completes;
}
