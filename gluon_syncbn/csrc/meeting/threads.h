// Threads for what may take its time: an idle one, or a new one where all are busy.
//
// They are kept, and end with the process. A thread of its own for each exchange would cost more, and memory: MXNet
// leaves something behind in each thread that has called it (1 kB a step, where 20 layers met other processes).
//
// The work may wait for whatever it likes: nothing else waits for its thread.
#pragma once

#include <functional>

namespace gluon_syncbn {

// Runs `work`, which must not throw. Throws std::system_error if there is no thread for it.
void run_on_a_thread(std::function<void()> work);

// In a process that was forked: its threads are not there any more, and the lock may be held by one of them.
void forget_threads();

}  // namespace gluon_syncbn
