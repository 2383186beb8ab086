#include "meeting/all_reduce.h"

#include <stdexcept>
#include <utility>

namespace gluon_syncbn {

Statistics all_reduce_moments(Group& group, const std::string& device, Moments local, ProfiledPass& pass) {
  const int64_t active_set = active_sets().current;
  const Membership member = group.membership_of(device, active_set);
  if (group.has_renorm()) local.step = static_cast<double>(group.step_of(device));
  pass.arrive();
  const Rendezvous::Gathered gathered = member.subgroup->forward.all_gather(member.rank, local.pack());
  pass.leave(&member.subgroup->forward, gathered.round_id);
  Moments all = merge(*gathered.contributions);
  for (double& value : all.m2) value /= all.count;
  const RenormLimits renorm = group.renorm(device, static_cast<int64_t>(all.step));
  return {{all.count, gathered.round_id, active_set}, std::move(all.mean), std::move(all.m2), renorm};
}

std::vector<double> all_reduce_sums(Group& group, const std::string& device, std::vector<double> local,
                                    const ForwardCall& call, ProfiledPass& pass) {
  const Membership member = group.membership_of(device, call.active_set);
  pass.arrive();
  const Rendezvous::Gathered gathered =
      member.subgroup->backward.all_gather(member.rank, std::move(local), call.round_id);
  pass.leave(&member.subgroup->backward, call.round_id);
  return add_ranks(*gathered.contributions);
}

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
  if (is_possible) return {count, static_cast<uint64_t>(round_id), static_cast<int64_t>(active_set)};
  throw std::runtime_error("SyncBatchNorm '" + group.name + "': the backward pass on " + device +
                           " cannot be run: its forward pass never ran, because an operator before it had failed, or "
                           "its step was given up.");
}

}  // namespace gluon_syncbn
