#include "processes/hosts.h"

#include <algorithm>
#include <iterator>

namespace gluon_syncbn {

Hosts::Hosts(const std::vector<std::string>& names, int rank) {
  for (const std::string& name : names) {
    hosts_.push_back(static_cast<int>(std::find(names.begin(), names.end(), name) - names.begin()));
  }
  mine_ = host_of(rank);
  are_several_ = std::any_of(hosts_.begin(), hosts_.end(), [this](int host) { return host != mine_; });
}

std::vector<int> Hosts::filtered(const std::vector<int>& ranks, bool are_near) const {
  std::vector<int> found;
  std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(found),
               [&](int rank) { return is_near(rank) == are_near; });
  return found;
}

int Hosts::leader(const std::vector<int>& members, int other) const {
  return *std::find_if(members.begin(), members.end(), [&](int rank) { return host_of(rank) == host_of(other); });
}

std::vector<int> Hosts::far_leaders(const std::vector<int>& members) const {
  std::vector<int> found;
  for (int rank : far(members)) {
    if (leader(members, rank) == rank) found.push_back(rank);
  }
  return found;
}

// The number of members, and their ranks; then for each row its rank, its length and its numbers.
std::vector<double> Bundle::packed() const {
  std::vector<double> numbers{static_cast<double>(members.size())};
  numbers.insert(numbers.end(), members.begin(), members.end());
  for (const auto& [rank, row] : rows) {
    numbers.push_back(rank);
    numbers.push_back(static_cast<double>(row.size()));
    numbers.insert(numbers.end(), row.begin(), row.end());
  }
  return numbers;
}

Bundle Bundle::unpacked(const std::vector<double>& numbers) {
  Bundle bundle;
  auto next = numbers.begin() + 1 + static_cast<std::ptrdiff_t>(numbers.front());
  bundle.members.assign(numbers.begin() + 1, next);
  while (next != numbers.end()) {
    const auto begin = next + 2, end = begin + static_cast<std::ptrdiff_t>(next[1]);
    bundle.rows.emplace_back(static_cast<int>(*next), std::vector<double>(begin, end));
    next = end;
  }
  return bundle;
}

}  // namespace gluon_syncbn
