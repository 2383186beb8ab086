#include "meeting/profile.h"

#include <atomic>
#include <mutex>
#include <vector>

#include "exported.h"
#include "numbers.h"

namespace gluon_syncbn {
namespace {

struct Record {
  std::string layer, device;
  bool is_forward;
  const void* place;
  int64_t round_id;
  double started, arrived, left, ended;  // seconds of a steady clock
};

std::atomic<bool> is_on{false};

// Never destroyed, because operators may still run while the process exits.
struct Records {
  std::mutex mutex;
  std::vector<Record> all;
  std::string text;
};
Records& records() {
  static auto* made = new Records;
  return *made;
}

}  // namespace

ProfiledPass::ProfiledPass(const std::string& layer, const std::string& device, bool is_forward)
    : layer_(layer), device_(device), is_forward_(is_forward), is_on_(is_on.load(std::memory_order_relaxed)) {
  if (is_on_) started_ = Clock::now();
}

void ProfiledPass::arrive() {
  if (is_on_) arrived_ = Clock::now();
}

void ProfiledPass::leave(const void* at, int64_t round_id) {
  if (!is_on_) return;
  left_ = Clock::now();
  place_ = at;
  round_id_ = round_id;
}

ProfiledPass::~ProfiledPass() {
  if (!is_on_ || !place_) return;
  std::lock_guard<std::mutex> lock(records().mutex);
  records().all.push_back({layer_, device_, is_forward_, place_, round_id_, seconds_of(started_), seconds_of(arrived_),
                           seconds_of(left_), seconds_of(Clock::now())});
}

}  // namespace gluon_syncbn

using namespace gluon_syncbn;

// Forgets the records, and begins new ones; does nothing, and returns 0, while a profile is on.
EXPORTED int gluon_syncbn_start_profile() {
  std::lock_guard<std::mutex> lock(records().mutex);
  if (is_on) return 0;
  records().all.clear();
  is_on = true;
  return 1;
}

// Whether a profile is on.
EXPORTED int gluon_syncbn_is_profiling() { return is_on; }

// Stops. Returns a line per pass, its fields between tabs: layer, device, forward or backward, place, round, and when
// it started, arrived, left and ended, in seconds. The text stays until the next call.
EXPORTED const char* gluon_syncbn_stop_profile() {
  is_on = false;
  std::lock_guard<std::mutex> lock(records().mutex);
  std::string& text = records().text;
  text.clear();
  for (const Record& record : records().all) {
    text += record.layer + '\t' + record.device + '\t' + (record.is_forward ? "forward" : "backward") + '\t' +
            std::to_string(reinterpret_cast<uintptr_t>(record.place)) + '\t' + std::to_string(record.round_id);
    for (double time : {record.started, record.arrived, record.left, record.ended}) {
      text += '\t' + text_of(time, std::fixed, 9);
    }
    text += '\n';
  }
  records().all.clear();
  return text.c_str();
}
