#include "meeting/waiting.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "exported.h"
#include "numbers.h"

namespace gluon_syncbn {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};
constexpr size_t kNumSignals = sizeof kSignals / sizeof *kSignals;

// The program's own actions for each signal. A handler of ours belongs to each, and calls it: the program may set an
// action that calls the handler that it has found, ours, or puts it back later (as faulthandler does). An action never
// changes, since a handler may be reading it.
constexpr size_t kMostActions = 8;
struct Actions {
  struct sigaction all[kMostActions];
  size_t count = 0;
};

// Never destroyed, because devices may still wait while the process exits.
struct Waits {
  WaitingTimes times;
  // Time of the last signal, by the steady clock. The handler writes nothing else.
  std::atomic<int64_t> signalled{INT64_MIN};
  Actions actions[kNumSignals];

  std::mutex mutex;  // of all that follows, and of additions to the actions
  int watches = 0;
  Clock::time_point cut_short_at;
  Seconds grace{0}, process_grace{0};
  std::string because;
};
Waits& waits = *new Waits;

template <size_t kPlace>
void on_signal(int number, siginfo_t* information, void* context) {
  waits.signalled.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  const struct sigaction& own = waits.actions[number == kSignals[0] ? 0 : 1].all[kPlace];
  if (own.sa_flags & SA_SIGINFO) {
    own.sa_sigaction(number, information, context);
  } else {
    own.sa_handler(number);
  }
}

using Handler = void (*)(int, siginfo_t*, void*);
constexpr Handler kHandlers[kMostActions] = {on_signal<0>, on_signal<1>, on_signal<2>, on_signal<3>,
                                             on_signal<4>, on_signal<5>, on_signal<6>, on_signal<7>};

// The place of the action whose handler of ours this is; kMostActions if it is none of ours.
size_t place_of(const struct sigaction& action) {
  if (!(action.sa_flags & SA_SIGINFO)) return kMostActions;
  return static_cast<size_t>(std::find(kHandlers, kHandlers + kMostActions, action.sa_sigaction) - kHandlers);
}

bool is_same(const struct sigaction& a, const struct sigaction& b) {
  if (a.sa_flags != b.sa_flags || a.sa_handler != b.sa_handler) return false;
  for (int number = 1; number < NSIG; ++number) {  // the rest of a mask is not defined
    if (sigismember(&a.sa_mask, number) != sigismember(&b.sa_mask, number)) return false;
  }
  return true;
}

bool is_handled(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) || (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

}  // namespace

WaitingTimes& waiting_times() { return waits.times; }

void begin_watch() {
  {
    std::lock_guard<std::mutex> lock(waits.mutex);
    waits.watches += 1;
  }
  renew_watch();
}

void renew_watch() {
  std::lock_guard<std::mutex> lock(waits.mutex);
  if (waits.watches == 0) return;
  for (size_t i = 0; i < kNumSignals; ++i) {
    struct sigaction found;
    if (sigaction(kSignals[i], nullptr, &found) != 0 || place_of(found) < kMostActions || !is_handled(found)) continue;
    Actions& known = waits.actions[i];
    size_t place = 0;
    while (place < known.count && !is_same(known.all[place], found)) ++place;
    if (place == kMostActions) continue;
    if (place == known.count) known.all[known.count++] = found;
    struct sigaction ours = found;
    ours.sa_flags |= SA_SIGINFO;
    ours.sa_sigaction = kHandlers[place];
    sigaction(kSignals[i], &ours, nullptr);
  }
}

void end_watch() {
  std::lock_guard<std::mutex> lock(waits.mutex);
  if (--waits.watches > 0) return;
  for (size_t i = 0; i < kNumSignals; ++i) {
    struct sigaction found;
    if (sigaction(kSignals[i], nullptr, &found) != 0) continue;
    const size_t place = place_of(found);
    if (place < kMostActions) sigaction(kSignals[i], &waits.actions[i].all[place], nullptr);
  }
}

Clock::time_point signalled_at() {
  return Clock::time_point(Clock::duration(waits.signalled.load(std::memory_order_relaxed)));
}

std::string Waited::text(const std::string& whom) const {
  const std::string duration =
      because.empty() ? text_of(seconds, std::defaultfloat, 6) : text_of(seconds, std::fixed, 1);
  return (because.empty() ? "waited " : "waited only ") + duration + " s for " + whom +
         (because.empty() ? "" : ", because " + because);
}

std::string Waited::advice(const std::string& usual) const {
  return because.empty() ? usual : usual.substr(usual.rfind('\n') + 1);
}

std::string Waited::error(const std::string& what, const std::string& kind, const std::vector<std::string>& arrived,
                          const std::vector<std::string>& missing, const std::string& usual) const {
  const std::string whom =
      std::to_string(missing.size()) + " of " + std::to_string(arrived.size() + missing.size()) + " " + kind;
  const auto list = [](const std::vector<std::string>& names) {
    return names.empty() ? "none, any more" : joined(names);
  };
  return what + " " + text(whom) + ". Arrived: " + list(arrived) + ". Missing: " + list(missing) + ". " + advice(usual);
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i == 0 || names[i] != names[i - 1]) text += (i > 0 ? ", " : "") + names[i];
  }
  return text;
}

Clock::duration ticks(double seconds) {
  constexpr double kMost = 1e9;  // more would not fit into a time
  return std::chrono::duration_cast<Clock::duration>(Seconds(std::min(seconds, kMost)));
}

std::optional<Waited> ended_wait(Clock::time_point began, double timeout_seconds, bool is_for_processes) {
  const auto now = Clock::now();
  const double seconds = Seconds(now - began).count();
  if (seconds >= timeout_seconds) return Waited{timeout_seconds, ""};
  const auto signal = signalled_at();
  if (signal >= began && now >= signal + waiting_times().grace) return Waited{seconds, "Ctrl-C or SIGTERM came"};
  const auto failed = step().failed_at();
  if (failed && now >= std::max(began, *failed) + waiting_times().grace) {
    return Waited{seconds, "the step has failed (" + step().failure() + ")"};
  }
  std::lock_guard<std::mutex> lock(waits.mutex);
  const Seconds grace = is_for_processes ? waits.process_grace : waits.grace;
  if (!waits.because.empty() && now >= std::max(began, waits.cut_short_at) + grace) {
    return Waited{seconds, waits.because};
  }
  return std::nullopt;
}

}  // namespace gluon_syncbn

using namespace gluon_syncbn;

EXPORTED void gluon_syncbn_set_waiting_times(double grace, double poll) {
  waiting_times() = {Seconds(grace), Seconds(poll)};
}

// Ends waits, from now on, after the grace period (for other processes after theirs), for this reason; an empty text
// takes it back.
EXPORTED void gluon_syncbn_cut_waits_short(const char* because, double grace, double process_grace) {
  std::lock_guard<std::mutex> lock(waits.mutex);
  waits.cut_short_at = Clock::now();
  waits.grace = Seconds(grace);
  waits.process_grace = Seconds(process_grace);
  waits.because = because;
}

EXPORTED void gluon_syncbn_begin_watch() { begin_watch(); }
EXPORTED void gluon_syncbn_renew_watch() { renew_watch(); }
EXPORTED void gluon_syncbn_end_watch() { end_watch(); }

EXPORTED double gluon_syncbn_signalled_at() { return seconds_of(signalled_at()); }
