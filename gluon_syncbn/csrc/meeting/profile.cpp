#include "meeting/profile.h"

#include <atomic>
#include <chrono>
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
  uint64_t round_id;
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

double seconds(Clock::time_point at) { return std::chrono::duration<double>(at.time_since_epoch()).count(); }

}  // namespace

ProfiledPass::ProfiledPass(const std::string& layer, const std::string& device, bool is_forward)
    : layer_(layer), device_(device), is_forward_(is_forward), is_on_(is_on.load(std::memory_order_relaxed)) {
  if (is_on_) started_ = Clock::now();
}

void ProfiledPass::arrive() {
  if (is_on_) arrived_ = Clock::now();
}

void ProfiledPass::leave(const void* at, uint64_t round_id) {
  if (!is_on_) return;
  left_ = Clock::now();
  place_ = at;
  round_id_ = round_id;
}

ProfiledPass::~ProfiledPass() {
  if (!is_on_ || !place_) return;
  std::lock_guard<std::mutex> lock(records().mutex);
  records().all.push_back({layer_, device_, is_forward_, place_, round_id_, seconds(started_), seconds(arrived_),
                           seconds(left_), seconds(Clock::now())});
}

}  // namespace gluon_syncbn

// Forgets what was seen, and goes on looking or stops.
EXPORTED void gluon_syncbn_start_profile() {
  std::lock_guard<std::mutex> lock(gluon_syncbn::records().mutex);
  gluon_syncbn::records().all.clear();
  gluon_syncbn::is_on = true;
}

// Stops looking. A line per pass, its fields between tabs: layer, device, forward or backward, place, round, and when
// it started, arrived, left and ended, in seconds. The text stays until the next call.
EXPORTED const char* gluon_syncbn_stop_profile() {
  gluon_syncbn::is_on = false;
  gluon_syncbn::Records& records = gluon_syncbn::records();
  std::lock_guard<std::mutex> lock(records.mutex);
  records.text.clear();
  for (const gluon_syncbn::Record& record : records.all) {
    records.text += record.layer + '\t' + record.device + '\t' + (record.is_forward ? "forward" : "backward") + '\t' +
                    std::to_string(reinterpret_cast<uintptr_t>(record.place)) + '\t' + std::to_string(record.round_id);
    for (double time : {record.started, record.arrived, record.left, record.ended}) {
      records.text += '\t' + gluon_syncbn::text_of(time, std::fixed, 9);
    }
    records.text += '\n';
  }
  records.all.clear();
  return records.text.c_str();
}
