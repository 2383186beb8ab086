#include "mxnet/python.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "exported.h"

namespace gluon_syncbn {
namespace {

thread_local std::string left_behind;

struct {
  PythonFunctions functions;
  std::atomic<int> calls{0};  // that are under way
  std::atomic<bool> is_gone{false};
} interpreter;

}  // namespace

const PythonFunctions& python() { return interpreter.functions; }

void warn_user(const std::string& text) {
  // A user's hook for warnings may wait for this thread's work. So this thread waits for it no longer than a second, in
  // which every other hook ends.
  const auto said = std::make_shared<std::promise<void>>();
  std::thread([text, said] {
    while_python_lives([&] { python().warn(text.c_str()); });
    said->set_value();
  }).detach();
  said->get_future().wait_for(std::chrono::seconds(1));
}

bool holds_interpreter_lock() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check && check();
}

int call_off_main_thread(const std::function<int()>& call) {
  // Another thread would wait for the interpreter lock for ever. MXNet releases it wherever it is called through
  // ctypes.
  if (syscall(SYS_gettid) != getpid() || holds_interpreter_lock()) return call();
  std::packaged_task<int()> task(call);
  std::future<int> returned = task.get_future();
  try {
    std::thread(std::move(task)).detach();
  } catch (const std::system_error&) {  // no thread can be had
    return call();
  }
  return returned.get();
}

void while_python_lives(const std::function<void()>& call) {
  // The threads that were in a call are not there in a child.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { interpreter.calls = 0; });
  static_cast<void>(registered);
  const struct Counted {
    Counted() { interpreter.calls += 1; }
    ~Counted() { interpreter.calls -= 1; }
  } counted;  // before the look at `is_gone`, or stop_calling_python could miss this call
  if (!interpreter.is_gone) call();
}

std::string take_error() { return std::exchange(left_behind, ""); }

}  // namespace gluon_syncbn

// Hands over Python's own functions.
EXPORTED void gluon_syncbn_use_python(const gluon_syncbn::PythonFunctions* functions) {
  gluon_syncbn::interpreter.functions = *functions;
}

// Sets the text of the error in which the callback that runs on this thread ends.
EXPORTED void gluon_syncbn_leave_error(const char* text) { gluon_syncbn::left_behind = text; }

// The interpreter is about to end. Called without the interpreter lock, for which a call may be waiting. A call that
// does not return, in a hook of the user's, keeps the process for ten seconds.
EXPORTED void gluon_syncbn_stop_calling_python() {
  gluon_syncbn::interpreter.is_gone = true;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (gluon_syncbn::interpreter.calls > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}
