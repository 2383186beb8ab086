// The step that this process is in: open, or failed.
//
//   open    Layers compute, and updates of weights pass.
//   failed  Something in the step has failed: a pass of a layer has thrown, or MXNet has skipped operators because of
//           an error before them (mxnet/engine.h notices that). From then on no pass of a layer that starts computes or
//           writes running statistics: it throws. Devices that wait in a layer wait for a grace period more. No update
//           of a weight passes its gate.
//
// `fail` leads from open to failed; the first error stays. So does `fail_by_reading`, after the user has read an array
// that could not be computed. That array may have to do with no layer; if it has, `fail` is called, too, sooner or
// later: by a pass, a gate or a watch that the failed step stops. `reset` leads back to open, when Python abandons the
// step (step/abandon.py) and nothing runs any more. It also begins a new generation, by which a backward pass knows
// that its forward pass ran in a step that was abandoned, or never.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace gluon_syncbn {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// A time as Python reads it, in seconds.
inline double seconds_of(Clock::time_point at) { return Seconds(at.time_since_epoch()).count(); }

class Step {
 public:
  void fail(const std::string& error);
  void fail_by_reading(const std::string& error);
  void reset();

  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }

  // The first error, or an empty text.
  std::string failure() const;
  std::optional<Clock::time_point> failed_at() const;
  // Whether only `fail_by_reading` was called.
  bool is_by_reading() const;

  // Counts from 1.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }

 private:
  void begin_failure(const std::string& error);

  mutable std::mutex mutex_;
  std::atomic<bool> has_failed_{false};
  std::atomic<uint64_t> generation_{1};
  std::string failure_;
  bool is_by_reading_ = false;
  Clock::time_point failed_at_;
};

// The step of this process.
Step& step();

}  // namespace gluon_syncbn
