// Threads for work that may wait: an idle one, or a new one where all are busy.
//
// They are kept, and end with the process. A new thread for each exchange would cost more time, and memory: MXNet keeps
// some for each thread that has called it (1 kB a step, where 20 layers met other processes).
#pragma once

#include <functional>

namespace gluon_syncbn {

// Runs `work`, which must not throw, and may wait for anything. Throws std::system_error if there is no thread for it.
void run_on_a_thread(std::function<void()> work);

// In a process that was forked: its threads are not there any more, and one of them may have held the lock.
void forget_threads();

}  // namespace gluon_syncbn
