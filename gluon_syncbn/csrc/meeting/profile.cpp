#include "meeting/profile.h"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "exported.h"
#include "numbers.h"

namespace gluon_syncbn {
namespace {

// Never destroyed, because operators may still run while the process exits.
struct Records {
  std::atomic<bool> are_taken{false};
  std::mutex mutex;
  std::vector<ProfiledPass::Record> all;
};
Records& records = *new Records;

}  // namespace

ProfiledPass::ProfiledPass(const std::string& layer, const std::string& device, bool is_forward) {
  if (records.are_taken.load(std::memory_order_relaxed)) record_ = Record{layer, device, is_forward, Clock::now()};
}

void ProfiledPass::arrive() {
  if (record_) record_->arrived = Clock::now();
}

void ProfiledPass::leave(const void* at, int64_t round_id) {
  if (!record_) return;
  record_->left = Clock::now();
  record_->place = at;
  record_->round_id = round_id;
}

ProfiledPass::~ProfiledPass() {
  if (!record_ || !record_->place) return;
  record_->ended = Clock::now();
  std::lock_guard<std::mutex> lock(records.mutex);
  records.all.push_back(std::move(*record_));
}

}  // namespace gluon_syncbn

using namespace gluon_syncbn;

// Forgets the records, and begins new ones; does nothing, and returns 0, while a profile is on.
EXPORTED int gluon_syncbn_start_profile() {
  std::lock_guard<std::mutex> lock(records.mutex);
  if (records.are_taken) return 0;
  records.all.clear();
  records.are_taken = true;
  return 1;
}

// Whether a profile is on.
EXPORTED int gluon_syncbn_is_profiling() { return records.are_taken; }

// Stops. Returns a line per pass, its fields between tabs: layer, device, forward or backward, place, round, and when
// it started, arrived, left and ended, in seconds.
EXPORTED const char* gluon_syncbn_stop_profile() {
  records.are_taken = false;
  std::lock_guard<std::mutex> lock(records.mutex);
  std::string text;
  for (const ProfiledPass::Record& record : records.all) {
    text += record.layer + '\t' + record.device + '\t' + (record.is_forward ? "forward" : "backward") + '\t' +
            std::to_string(reinterpret_cast<uintptr_t>(record.place)) + '\t' + std::to_string(record.round_id);
    for (Clock::time_point time : {record.started, record.arrived, record.left, record.ended}) {
      text += '\t' + text_of(seconds_of(time), std::fixed, 9);
    }
    text += '\n';
  }
  records.all.clear();
  return kept(std::move(text));
}
