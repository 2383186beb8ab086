#include "mxnet/off_main_thread.h"

#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <system_error>
#include <thread>

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
  int returned = 0;
  std::exception_ptr thrown;
  std::thread thread;
  try {
    thread = std::thread([&] {
      try {
        returned = call();
      } catch (...) {
        thrown = std::current_exception();
      }
    });
  } catch (const std::system_error&) {  // no thread can be had
    return call();
  }
  thread.join();
  if (thrown) std::rethrow_exception(thrown);
  return returned;
}

}  // namespace gluon_syncbn
