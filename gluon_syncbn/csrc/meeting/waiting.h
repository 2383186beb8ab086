// How long a device waits for the others: for the layer's timeout, or less once the wait can no longer succeed.
//
// There are three such cases. Each ends a wait a grace period after the event, or after the wait began if it is later:
//
//   Python cuts waits short, because the process ends or a step was abandoned. This holds for all waits from then on,
//   until Python takes it back. In the grace period, devices that are on their way may still arrive.
//
//   Ctrl-C, or a SIGTERM that the program handles. Python runs signal handlers on the main thread, between two of its
//   own instructions; but that thread is in MXNet, and waits for a device that waits here. So while something has
//   waited for longer than the poll interval, a handler of our own notes the time of the signal, and then calls the
//   handler that the program had installed. It ends the waits that had begun by then. A signal that the program
//   ignores, or that ends the process anyway, is left alone.
//
//   The step has failed (step.h): a device that has not come by now will hardly come.
//
// The watchdog (watchdog.h) looks once per poll interval, as a signal handler could not wake it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "meeting/step.h"

namespace gluon_syncbn {

// Python sets the numbers, and explains them (meeting/waiting.py). They change while nothing waits.
struct WaitingTimes {
  Seconds grace{0}, poll{0};
};
WaitingTimes& waiting_times();

// Ctrl-C and SIGTERM are noticed between the first two, each called equally often. `renew_watch` is to be called from
// time to time in between: the program may have set another action. Eight different actions are followed, no more.
void begin_watch();
void end_watch();
void renew_watch();

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

  // The end of an error: `usual`, or only its last line, the remedy, where the reason is known.
  std::string advice(const std::string& usual) const;

  // The error of `what`, which some of the "devices" or "processes" have not come to.
  std::string error(const std::string& what, const std::string& kind, const std::vector<std::string>& arrived,
                    const std::vector<std::string>& missing, const std::string& usual) const;
};

// When a wait that began at `began` ends now, and why; nothing if it goes on. Waits for other processes have a grace
// period of their own when Python cuts waits short.
std::optional<Waited> ended_wait(Clock::time_point began, double timeout_seconds, bool is_for_processes = false);

// A time for the clock, as long as it can tell.
Clock::duration ticks(double seconds);

// The names with commas between them; equal neighbours are one.
std::string joined(const std::vector<std::string>& names);

}  // namespace gluon_syncbn
