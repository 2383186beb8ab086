// An MXNet whose engine has another interface: MXEnginePushAsyncND calls its function with four arguments, as builds
// with an asynchronous engine for GPUs do. It stands before the real one.
#include <dlfcn.h>

namespace {

using Drop = void (*)(void*);
using Real = void (*)(void* context, void* on_complete, void* argument);
using Other = void (*)(void* context, void* on_start, void* on_complete, void* argument);

struct Pushed {
  Other function;
  void* argument;
  Drop drop;
};

void run(void* context, void* on_complete, void* argument) {
  const auto* pushed = static_cast<Pushed*>(argument);
  void* on_start[3] = {};
  pushed->function(context, on_start, on_complete, pushed->argument);
}

void drop(void* argument) {
  auto* pushed = static_cast<Pushed*>(argument);
  pushed->drop(pushed->argument);
  delete pushed;
}

}  // namespace

extern "C" int MXEnginePushAsyncND(Other function, void* argument, Drop drop_argument, const void* context,
                                   void** reads, int num_reads, void** writes, int num_writes, const void* property,
                                   int priority, const char* name, bool wait) {
  using Push = int (*)(Real, void*, Drop, const void*, void**, int, void**, int, const void*, int, const char*, bool);
  static const auto push = reinterpret_cast<Push>(dlsym(RTLD_NEXT, "MXEnginePushAsyncND"));
  return push(run, new Pushed{function, argument, drop_argument}, drop, context, reads, num_reads, writes, num_writes,
              property, priority, name, wait);
}
