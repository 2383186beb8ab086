// Calls into Python that Ctrl-C cannot end in the middle.
//
// Python raises KeyboardInterrupt on its main thread, between any two of its instructions, also where MXNet has called
// it on that thread through ctypes. There the exception goes nowhere, what the callback should have filled in is not,
// and MXNet goes on with it: a wrong shape, or a segmentation fault. So such a call is made on another thread, while
// the main thread waits; it raises KeyboardInterrupt when it is back in the user's code. That takes 30 µs, and several
// times that where other threads run Python; a net that is hybridized with static_alloc makes no such call in a
// training step.
#pragma once

#include <functional>

namespace gluon_syncbn {

// Whether this thread has Python's interpreter lock.
bool holds_interpreter_lock();

// What `call` returns or throws, from another thread if this is Python's main thread.
int call_off_main_thread(const std::function<int()>& call);

}  // namespace gluon_syncbn
