#include "mxnet/off_main_thread.h"

#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <system_error>

#include "meeting/threads.h"

namespace gluon_syncbn {
namespace {

bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

}  // namespace

bool holds_interpreter_lock() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check && check();
}

int call_off_main_thread(const std::function<int()>& call) {
  // Another thread would wait for the interpreter lock for ever. MXNet releases it wherever it is called through
  // ctypes.
  if (!is_main_thread() || holds_interpreter_lock()) return call();
  const auto task = std::make_shared<std::packaged_task<int()>>(call);  // its end comes after this function's
  std::future<int> returned = task->get_future();
  try {
    run_on_a_thread([task] { (*task)(); });
  } catch (const std::system_error&) {  // no thread can be had
    return call();
  }
  return returned.get();
}

}  // namespace gluon_syncbn
