// Calls into Python.
//
// Ctrl-C does no harm. Python raises KeyboardInterrupt on its main thread, between any two of its instructions, also in
// a callback that MXNet runs there; the callback then does half of its work. So such a call is made on another thread
// while the main thread waits, and KeyboardInterrupt is raised when the main thread is back in the user's code. That
// takes 30 µs, and several times as long where other threads run Python; a net that is hybridized with static_alloc
// makes no such call in a training step.
//
// Exits are clean. A thread of MXNet's engine that calls Python while the interpreter shuts down is unwound, which C++
// answers with "terminate called". gluon_syncbn_stop_calling_python, at exit, waits for the calls that are under way;
// from then on none is made.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace gluon_syncbn {

// The functions of backends/native.py that the core calls. Functions that return a number leave the text of an error if
// it is -1. Call them within while_python_lives or call_off_main_thread.
struct PythonFunctions {
  // Makes a group of a description; returns its id.
  int64_t (*make_group)(const char* description);
  // Fills in the number of processes, the number of this process's first device, the seconds that processes wait for
  // each other, and their id (processes/all.cpp).
  int (*connect)(int64_t group, double* facts);
  // Fills in the key of a subgroup and its members, and returns how many members there are.
  int (*prepare)(int64_t group, int64_t subgroup, int64_t active_set, int64_t* key, int* members);
  void (*drop)(int64_t group);
  void (*warn)(const char* text);
};
const PythonFunctions& python();

// Has Python warn the user, and returns after a second at most. Not with the interpreter lock.
void warn_user(const std::string& text);

// Whether this thread has Python's interpreter lock.
bool holds_interpreter_lock();

// Returns or throws as `call` does; on another thread if this is Python's main thread.
int call_off_main_thread(const std::function<int()>& call);

// Runs `call`, which is Python's, unless the interpreter has ended or is about to.
void while_python_lives(const std::function<void()>& call);

// Takes the text that Python left behind, with gluon_syncbn_leave_error on this thread, for an error that C++ is to
// throw; empty if there is none.
std::string take_error();

}  // namespace gluon_syncbn
