// Which processes share memory, because they are on one host, and what hosts tell each other.
//
// Of the members of an exchange, the first on each host is its leader. It collects what those of its host bring,
// through memory, and sends all of it as one message to the leader of each other host, which hands it on. So a network
// carries one message for each pair of hosts, where each process by itself would send one to each other.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "processes/transport.h"

namespace gluon_syncbn {

class Hosts {
 public:
  Hosts() = default;  // all are on one

  // The name of each process's host, and which process this is.
  Hosts(const std::vector<std::string>& names, int rank);

  bool are_several() const { return are_several_; }
  bool is_near(int other) const { return host_of(other) == mine_; }

  // Those of these ranks that are on this host, or on others.
  std::vector<int> near(const std::vector<int>& ranks) const { return those(ranks, true); }
  std::vector<int> far(const std::vector<int>& ranks) const { return those(ranks, false); }

  // Of the members on the host of one of them.
  int leader(const std::vector<int>& members, int other) const;

  // Of all other hosts.
  std::vector<int> far_leaders(const std::vector<int>& members) const;

 private:
  std::vector<int> those(const std::vector<int>& ranks, bool are_near) const;
  int host_of(int other) const { return hosts_.empty() ? 0 : hosts_[static_cast<size_t>(other)]; }

  std::vector<int> hosts_;  // a number for each process's
  int mine_ = 0;
  bool are_several_ = false;
};

// What the members on one host bring, as numbers of a message.
struct Bundle {
  std::vector<int> members;  // of the exchange, on all hosts
  std::vector<std::pair<int, std::vector<double>>> rows;

  std::vector<double> packed() const;
  static Bundle unpacked(const std::vector<double>& numbers);
};

}  // namespace gluon_syncbn
