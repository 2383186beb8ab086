#include "mxnet/off_main_thread.h"

#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <future>
#include <system_error>

#include "meeting/threads.h"

namespace gluon_syncbn {
namespace {

bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

// Another thread would wait for it for ever. MXNet releases it wherever it is called through ctypes.
bool holds_interpreter_lock() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check && check();
}

}  // namespace

int call_off_main_thread(const std::function<int()>& call) {
  if (!is_main_thread() || holds_interpreter_lock()) return call();
  std::packaged_task<int()> task(call);
  std::future<int> returned = task.get_future();
  try {
    run_on_a_thread([&task] { task(); });
  } catch (const std::system_error&) {  // no thread can be had
    return call();
  }
  return returned.get();
}

}  // namespace gluon_syncbn
