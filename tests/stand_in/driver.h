// The functions of the driver's stand-in that the runtime's stand-in calls.
#pragma once

#include <cstddef>
#include <functional>

// Runs `action` unless there is an error. Returns the error.
template <typename Action>
int unless(int error, const Action& action) {
  if (!error) action();
  return error;
}

#define BETWEEN __attribute__((visibility("default")))

BETWEEN int stand_in_begin();  // before each use; an error if a process was forked by one that has used it
BETWEEN int stand_in_count();
BETWEEN int stand_in_current();         // device of this thread's context, or -1
BETWEEN int stand_in_bind(int device);  // gives this thread the primary context of a device
// Defined by runtime.cpp, if that is loaded: the context decides, not the last cudaSetDevice.
BETWEEN __attribute__((weak)) void stand_in_forget_device();
BETWEEN void* stand_in_allocate(size_t size);
BETWEEN int stand_in_release(void* address);
BETWEEN void* stand_in_new_stream();
BETWEEN void stand_in_copy(void* to, const void* from, size_t size, void* stream);
BETWEEN void stand_in_set(void* to, int value, size_t size, void* stream);
BETWEEN void* stand_in_seen(const void* address);  // as a kernel sees it
BETWEEN void stand_in_run(const std::function<void()>& task, void* stream);
BETWEEN void stand_in_wait(void* stream);
BETWEEN void* stand_in_new_event();
BETWEEN void stand_in_record(void* event, void* stream);
BETWEEN void stand_in_wait_event(void* stream, void* event);
