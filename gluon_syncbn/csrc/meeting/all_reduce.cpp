#include "meeting/all_reduce.h"

#include <stdexcept>
#include <utility>

namespace gluon_syncbn {
namespace {

std::vector<double> pack(const Moments& local) {
  std::vector<double> message;
  message.reserve(1 + 2 * local.mean.size());
  message.push_back(local.count);
  message.insert(message.end(), local.mean.begin(), local.mean.end());
  message.insert(message.end(), local.m2.begin(), local.m2.end());
  return message;
}

Moments unpack_and_merge(const std::vector<std::vector<double>>& contributions) {
  std::vector<Moments> parts;
  for (const std::vector<double>& message : contributions) {
    const auto middle = message.begin() + 1 + static_cast<std::ptrdiff_t>((message.size() - 1) / 2);
    parts.push_back({message[0], {message.begin() + 1, middle}, {middle, message.end()}});
  }
  return merge(parts);
}

}  // namespace

Statistics all_reduce_moments(Group& group, const std::string& device, const Moments& local) {
  const int64_t taking_part = participants().current;
  const Place place = group.place_of(device, taking_part);
  const Rendezvous::Meeting meeting = place.circle->forward.meet(place.rank, pack(local));
  Moments all = unpack_and_merge(*meeting.contributions);
  for (double& value : all.m2) value /= all.count;
  return {all.count, std::move(all.mean), std::move(all.m2), meeting.number, taking_part};
}

bool was_training(const Group& group, const std::string& device, const double* left) {
  const double count = left[0], number = left[1], taking_part = left[2];
  if (count == 0 && number == 0 && taking_part == kPrediction) return false;
  constexpr double kMost = 9007199254740992;  // 2^53; false for NaN, too
  const bool possible = count >= 1 && count < kMost && number >= 1 && number < kMost && taking_part >= 0 &&
                        taking_part < kMost && participants().knows(static_cast<int64_t>(taking_part));
  if (possible) return true;
  throw std::runtime_error("SyncBatchNorm '" + group.name + "': the backward pass on " + device +
                           " has nothing to go by, because its forward pass was not run: something before it had "
                           "failed. The first error tells what.");
}

std::vector<double> all_reduce_sums(Group& group, const std::string& device, std::vector<double> local, uint64_t number,
                                    int64_t taking_part) {
  const Place place = group.place_of(device, taking_part);
  std::vector<double> total(local.size(), 0.0);
  const Rendezvous::Meeting meeting = place.circle->backward.meet(place.rank, std::move(local), number);
  for (const std::vector<double>& contribution : *meeting.contributions) {
    for (size_t i = 0; i < total.size(); ++i) total[i] += contribution[i];
  }
  return total;
}

}  // namespace gluon_syncbn
