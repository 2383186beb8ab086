#include "meeting/step.h"

#include "exported.h"

namespace gluon_syncbn {

// Never destroyed, because operators may still run while the process exits.
Step& step() {
  static auto* one = new Step;
  return *one;
}

void Step::fail(const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  is_by_reading_ = false;
  if (!has_failed()) begin_failure(error);
}

void Step::fail_by_reading(const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!has_failed()) {
    is_by_reading_ = true;
    begin_failure(error);
  } else if (is_by_reading_) {
    failure_ = error;  // the error of a read that has ended says more than the one of a read that begins
  }
}

void Step::begin_failure(const std::string& error) {
  failure_ = error;
  failed_at_ = Clock::now();
  has_failed_.store(true, std::memory_order_release);
}

void Step::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  has_failed_.store(false, std::memory_order_release);
  failure_.clear();
  is_by_reading_ = false;
  generation_ += 1;
}

std::string Step::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

std::optional<Clock::time_point> Step::failed_at() const {
  if (!has_failed()) return std::nullopt;
  std::lock_guard<std::mutex> lock(mutex_);
  return failed_at_;
}

bool Step::is_by_reading() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_by_reading_;
}

}  // namespace gluon_syncbn

using namespace gluon_syncbn;

EXPORTED void gluon_syncbn_fail_step(const char* error) { step().fail(error); }

EXPORTED void gluon_syncbn_fail_step_by_reading(const char* error) { step().fail_by_reading(error); }

EXPORTED int gluon_syncbn_step_is_by_reading() { return step().is_by_reading(); }

EXPORTED void gluon_syncbn_reset_step() { step().reset(); }

// The first error of the step, empty if it has not failed.
EXPORTED const char* gluon_syncbn_step_failure() { return kept(step().failure()); }

// When the step failed; 0 if it has not.
EXPORTED double gluon_syncbn_step_failed_at() {
  const auto at = step().failed_at();
  return at ? seconds_of(*at) : 0;
}

EXPORTED uint64_t gluon_syncbn_step_generation() { return step().generation(); }
