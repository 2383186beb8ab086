// How long a device waits for the others: the layer's timeout, or less once waiting has lost its sense.
//
// It has in two cases, and then every wait ends kMoment later, or kMoment after it has begun, whichever is later:
//
//   Python says so (limit_patience): the process ends, or a step has been abandoned. It holds for all waits from then
//   on, until Python takes it back. A moment is left because devices that are on their way may still arrive.
//
//   Ctrl-C, or a SIGTERM that the program handles. Python runs its handlers on the main thread and between two of its
//   own instructions; that thread is in MXNet, and waits for what waits here. So the signal is noticed here, too: a
//   device that has waited for longer than kLook puts a handler before the one that it finds, which notes the time and
//   calls that one. It ends the waits that had begun by then, and the last of them takes the handler away. A signal that
//   is ignored, or ends the process anyway, is left alone.
//
// A waiting device looks every kLook whether its patience has been limited. No one has to wake it for that, least of
// all a signal handler, which could not.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>

namespace gluon_syncbn {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kMoment{2000};
constexpr std::chrono::milliseconds kLook{100};

// From now on waits end after kMoment, "because" of this; an empty text takes it back.
void limit_patience(std::string because);

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

  // "waited 60 s for WHOM", and if it ended before the timeout, why.
  std::string text(const std::string& whom) const;
};

// When a wait that began at `began` ends now, and why; nothing if it goes on.
std::optional<Waited> out_of_patience(Clock::time_point began, double timeout_seconds);

// Waits on `changed`, whose mutex `lock` holds, until `enough()`: then nothing; or until patience ends.
template <typename Enough>
std::optional<Waited> wait_patiently(std::unique_lock<std::mutex>& lock, std::condition_variable& changed,
                                     Clock::time_point began, double timeout_seconds, Enough enough) {
  using Seconds = std::chrono::duration<double>;
  std::optional<SignalWatch> watch;
  while (!enough()) {
    if (auto ended = out_of_patience(began, timeout_seconds)) return ended;
    const Seconds look = std::min<Seconds>(kLook, Seconds(timeout_seconds) - (Clock::now() - began));
    if (changed.wait_for(lock, look) == std::cv_status::timeout && !watch) watch.emplace();
  }
  return std::nullopt;
}

}  // namespace gluon_syncbn
