// The groups that graphs name, as Python makes them and connects them with other processes (backends/native.py).
//
// A graph names its group in one of two ways. A net's own graph gives the id of one that Python has made for the
// layer, with its devices. A graph that outlives its process, or that no layer owns (symbol.py), carries a description:
// the operator has Python make a group of it, which belongs to this node of the graph. That group is open: it knows how
// many devices there are, and takes in those that come.

#include <mutex>
#include <set>
#include <stdexcept>
#include <vector>

#include "exported.h"
#include "mxnet/c_api.h"
#include "mxnet/off_main_thread.h"
#include "mxnet/operator.h"

namespace gluon_syncbn {
namespace {

// Python's functions that make a group of a description, and connect groups with other processes. Those that return a
// number leave the text of an error if it is -1; the first returns the group's id.
using MakeGroup = int64_t (*)(const char* description);
using ExchangeRows = int (*)(int64_t group, int is_forward, int64_t subgroup, int64_t active_set, int64_t* round_id,
                             const double* vector, int64_t size, double* rows);
using Fail = void (*)(int64_t group, const char* error);
// Facts: the number of processes, that of this one's first device, and how many seconds processes wait for each other.
using Connect = int (*)(int64_t group, double* facts);
using Drop = void (*)(int64_t group);
MakeGroup make_described_group = nullptr;
Connect connect_group = nullptr;
ExchangeRows exchange_rows = nullptr;
Fail fail = nullptr;
Drop drop_link = nullptr;

Link connect(int64_t id) {
  double facts[3];
  if (connect_group(id, facts) < 0) throw RendezvousError(take_error());
  const auto num_processes = static_cast<size_t>(facts[0]);
  if (num_processes == 1) return {};
  const auto exchange = [id, num_processes](bool is_forward, int64_t subgroup, int64_t active_set, uint64_t& round_id,
                                            const std::vector<double>& vector) {
    std::vector<double> flat(num_processes * vector.size());
    auto number = static_cast<int64_t>(round_id);
    const int count = exchange_rows(id, is_forward, subgroup, active_set, &number, vector.data(),
                                    static_cast<int64_t>(vector.size()), flat.data());
    if (count < 0) throw RendezvousError(take_error());
    round_id = static_cast<uint64_t>(number);
    Vectors rows;
    for (int i = 0; i < count; ++i) {
      const auto begin = flat.begin() + static_cast<std::ptrdiff_t>(vector.size()) * i;
      rows.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(vector.size()));
    }
    return rows;
  };
  const auto report = [id](const std::string& error) { while_python_lives([&] { fail(id, error.c_str()); }); };
  return {exchange, report, static_cast<size_t>(facts[1]), facts[2]};
}

}  // namespace

std::shared_ptr<Group> group_of(const std::string& reference) {
  if (reference.find('{') == std::string::npos) return find_group(std::stoll(reference));
  int64_t id = -1;
  call_off_main_thread([&] {
    id = make_described_group(reference.c_str());
    if (id < 0) throw std::invalid_argument(take_error());
    return 1;
  });
  std::shared_ptr<Group> group = find_group(id);
  drop_group(id);  // it lives as long as the node
  return group;
}

}  // namespace gluon_syncbn

// What Python calls (base/library.py)

// Hands over what is called there.
EXPORTED void gluon_syncbn_use_groups(gluon_syncbn::MakeGroup make, gluon_syncbn::Connect connect,
                                      gluon_syncbn::ExchangeRows exchange, gluon_syncbn::Fail fail,
                                      gluon_syncbn::Drop drop) {
  gluon_syncbn::make_described_group = make;
  gluon_syncbn::connect_group = connect;
  gluon_syncbn::exchange_rows = exchange;
  gluon_syncbn::fail = fail;
  gluon_syncbn::drop_link = drop;
}

// Makes the group that graphs name by `id`; it is open to any devices if `devices` is null.
EXPORTED void gluon_syncbn_make_group(int64_t id, const gluon_syncbn::GroupSpec* spec, const char* const* devices,
                                      const char* advice) {
  const std::vector<std::string> names(devices, devices + (devices ? spec->num_devices : 0));
  const auto connect = [id] { return gluon_syncbn::connect(id); };
  const auto drop = [id] { gluon_syncbn::while_python_lives([id] { gluon_syncbn::drop_link(id); }); };
  gluon_syncbn::add_group(id, std::make_shared<gluon_syncbn::Group>(*spec, names, advice, connect, drop));
}

// Forgets a group; calls that are under way keep it until they are done.
EXPORTED void gluon_syncbn_drop_group(int64_t id) { gluon_syncbn::drop_group(id); }

// Forward rounds of a group with exactly this active set.
EXPORTED int64_t gluon_syncbn_rounds(int64_t id, int64_t active_set) {
  return gluon_syncbn::find_group(id)->rounds(active_set);
}

// Has a group with Batch Renormalization go on from the step `least`, if it is not further; its next step, or -1 if
// there is no such group.
EXPORTED int64_t gluon_syncbn_group_step(int64_t id, int64_t least) {
  try {
    return gluon_syncbn::find_group(id)->go_to_step(least);
  } catch (const std::invalid_argument&) {
    return -1;
  }
}

// Makes these devices meet from now on, and no others; set 0 is everyone. No operator may be running.
EXPORTED void gluon_syncbn_use_active_set(int64_t id, const char* const* devices, int num_devices) {
  gluon_syncbn::ActiveSets& all = gluon_syncbn::active_sets();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.members[id] = std::set<std::string>(devices, devices + num_devices);
  all.current = id;
  ++all.changes;
}
