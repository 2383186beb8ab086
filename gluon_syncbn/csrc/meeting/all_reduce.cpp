#include "meeting/all_reduce.h"

#include <stdexcept>
#include <utility>

namespace gluon_syncbn {

void Meeting::bring_moments(Moments local, Done done) {
  active_set_ = active_sets().current;
  bring(local.pack(), 0, std::move(done));
}

void Meeting::bring_sums(std::vector<double> local, const ForwardCall& call, Done done) {
  active_set_ = call.active_set;
  bring(std::move(local), call.round_id, std::move(done));
}

void Meeting::bring(std::vector<double> local, int64_t key, Done done) {
  profile_->arrive();
  group_.enter(device_, [this, local = std::move(local), key, done = std::move(done)](const Outcome& entered) mutable {
    try {
      if (!entered.error.empty()) throw RendezvousError(entered.error);
      const Membership member = group_.membership_of(device_, active_set_);
      const auto& place = is_forward_ ? member.forward : member.backward;
      place->arrive(member.rank, std::move(local), key, [this, at = place.get(), key, done](const Outcome& outcome) {
        if (outcome.error.empty()) profile_->leave(at, key ? key : outcome.round_id);
        outcome_ = outcome;
        done();
      });
      return;
    } catch (const std::exception& problem) {
      outcome_.error = problem.what();
    }
    done();
  });
}

const Vectors& Meeting::brought() const {
  if (!outcome_.error.empty()) throw RendezvousError(outcome_.error);
  return *outcome_.contributions;
}

Statistics Meeting::statistics() const {
  Moments all = merge(brought());
  for (double& value : all.m2) value /= all.count;
  return {{all.count, outcome_.round_id, active_set_}, std::move(all.mean), std::move(all.m2)};
}

std::vector<double> Meeting::sums() const { return add_ranks(brought()); }

void ForwardCall::save(double* numbers) const {
  numbers[0] = count;
  numbers[1] = static_cast<double>(round_id);
  numbers[2] = static_cast<double>(active_set);
}

ForwardCall ForwardCall::load(const Group& group, const std::string& device, const double* numbers) {
  const double count = numbers[0], round_id = numbers[1], active_set = numbers[2];
  if (count == 0 && round_id == 0 && active_set == kPrediction) return {};
  constexpr double kMost = 9007199254740992;  // 2^53; comparisons are false for NaN, too
  const bool is_possible = count >= 1 && count < kMost && round_id >= 1 && round_id < kMost && active_set >= 0 &&
                           active_set < kMost && active_sets().knows(static_cast<int64_t>(active_set));
  if (is_possible) return {count, static_cast<int64_t>(round_id), static_cast<int64_t>(active_set)};
  throw_never_ran(group, device);
}

void throw_never_ran(const Group& group, const std::string& device) {
  throw std::runtime_error(group.where() + "the backward pass on " + device +
                           " cannot be run: its forward pass never ran, because an operator before it had failed, or "
                           "its step was abandoned.");
}

}  // namespace gluon_syncbn
