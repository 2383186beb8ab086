// How long a device waits for the others: the layer's timeout, or less once the wait can no longer succeed.
//
// There are three such cases. Every wait ends a grace period after them, or after it has begun, whichever is later:
//
//   Python says so: the process ends, or a step has been abandoned. It holds for all waits from then on, until Python
//   takes it back. The grace period is for devices that are on their way and may still arrive.
//
//   Ctrl-C, or a SIGTERM that the program handles. Python runs its handlers on the main thread and between two of its
//   own instructions; that thread is in MXNet, and waits for what waits here. So the signal is noticed here, too: while
//   something has waited for longer than the poll interval there is a handler before the one that was found, which
//   notes the time and calls that one. It ends the waits that had begun by then.
//   A signal that is ignored, or ends the process anyway, is left alone.
//
//   The step has failed (step.h): who has not come by now will hardly come.
//
// The watchdog (watchdog.h) looks once per poll interval whether waits have been cut short. No one has to wake it for
// that, least of all a signal handler, which could not.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "meeting/step.h"

namespace gluon_syncbn {

using Seconds = std::chrono::duration<double>;

// Python has the numbers, and says what they are for (meeting/waiting.py). They change while nothing waits.
struct WaitingTimes {
  Seconds grace{0}, poll{0};
};
WaitingTimes& waiting_times();

// Between these two, each called equally often, Ctrl-C and SIGTERM are noticed.
void begin_watch();
void end_watch();

struct SignalWatch {
  SignalWatch() { begin_watch(); }
  ~SignalWatch() { end_watch(); }
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;
};

// When the last signal came that a SignalWatch noticed; before all waits, if there was none.
Clock::time_point signalled_at();

// A wait in vain.
struct Waited {
  double seconds;
  std::string because;  // why it ended before the timeout; empty if it did not

  // "waited 60 s for WHOM", or if it ended before the timeout, "waited only 2 s for WHOM, because ...".
  std::string text(const std::string& whom) const;

  // What an error says at its end, of what `usual` says: where it is known why, only the last line, what to do.
  std::string advice(const std::string& usual) const;
};

// When a wait that began at `began` ends now, and why; nothing if it goes on. Python says how long the grace period is
// when it cuts waits short, and that of waits for other processes.
std::optional<Waited> ended_wait(Clock::time_point began, double timeout_seconds, bool is_for_processes = false);

// A time for the clock, as long as it can tell.
Clock::duration ticks(double seconds);

}  // namespace gluon_syncbn
