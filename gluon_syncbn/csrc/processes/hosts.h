// The hosts of the processes, and the messages between hosts.
//
// Of the members of an exchange, the first on each host is its leader. It collects the vectors of its host, through
// memory, and sends all of them as one message to the leader of each other host, which hands it on. So a network
// carries one message for each pair of hosts, and not one for each pair of processes.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "processes/transport.h"

namespace gluon_syncbn {

class Hosts {
 public:
  Hosts() = default;  // all processes are on one

  // `names` has the host of each process; `rank` is this process.
  Hosts(const std::vector<std::string>& names, int rank);

  bool are_several() const { return are_several_; }
  bool is_near(int other) const { return host_of(other) == mine_; }

  // The ranks that are on this host, and the ranks that are on others.
  std::vector<int> near(const std::vector<int>& ranks) const { return filtered(ranks, true); }
  std::vector<int> far(const std::vector<int>& ranks) const { return filtered(ranks, false); }

  // The first of the members on the host of `other`.
  int leader(const std::vector<int>& members, int other) const;

  // The leaders of all other hosts.
  std::vector<int> far_leaders(const std::vector<int>& members) const;

 private:
  std::vector<int> filtered(const std::vector<int>& ranks, bool are_near) const;
  int host_of(int other) const { return hosts_.empty() ? 0 : hosts_[static_cast<size_t>(other)]; }

  std::vector<int> hosts_;  // a number for the host of each process
  int mine_ = 0;
  bool are_several_ = false;
};

// The vectors of the members on one host, as numbers of a message.
struct Bundle {
  std::vector<int> members;  // of the exchange, on all hosts
  std::vector<std::pair<int, std::vector<double>>> rows;

  std::vector<double> packed() const;
  static Bundle unpacked(const std::vector<double>& numbers);
};

}  // namespace gluon_syncbn
