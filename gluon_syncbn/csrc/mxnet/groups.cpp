// The groups that graphs name, as Python makes them and connects them with other processes (backends/native.py).
//
// A graph names its group in one of two ways. A net's own graph gives the id of a group that Python has made for the
// layer, with its devices. A graph that outlives its process, or that no layer owns (symbol.py), carries a description:
// the operator has Python make a group of it, which belongs to this node of the graph. That group is open: it knows how
// many devices there are, and takes in the first that come.

#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "exported.h"
#include "mxnet/c_api.h"
#include "mxnet/python.h"
#include "mxnet/operator.h"
#include "processes/processes.h"

namespace gluon_syncbn {
namespace {

// Asks Python for a number; throws the error that it leaves. Nothing is asked any more when Python has ended.
int asked(const std::function<int()>& ask) {
  int found = -1;
  std::string error = "the process ends";
  while_python_lives([&] {
    found = ask();
    if (found < 0) error = take_error();
  });
  if (found < 0) throw RendezvousError(error);
  return found;
}

Link connect(int64_t id) {
  double facts[4] = {};
  asked([&] { return python().connect(id, facts); });
  if (facts[0] == 1) return {};
  const std::shared_ptr<Processes> processes = find_processes(static_cast<int64_t>(facts[3]));
  const auto prepare = [id, size = processes->size](int64_t subgroup, int64_t active_set) {
    int64_t key = 0;
    std::vector<int> members(static_cast<size_t>(size));
    const int count = asked([&] { return python().prepare(id, subgroup, active_set, &key, members.data()); });
    members.resize(static_cast<size_t>(count));
    return std::make_pair(key, std::move(members));
  };
  return {processes, prepare, static_cast<size_t>(facts[1]), facts[2]};
}

}  // namespace

std::shared_ptr<Group> group_of(const std::string& reference) {
  if (reference.find('{') == std::string::npos) return find_group(std::stoll(reference));
  int64_t id = -1;
  call_off_main_thread([&] {
    id = python().make_group(reference.c_str());
    if (id < 0) throw std::invalid_argument(take_error());
    return 1;
  });
  std::shared_ptr<Group> group = find_group(id);
  drop_group(id);  // it lives as long as the node
  return group;
}

}  // namespace gluon_syncbn

// Makes the group that graphs name by `id`; it is open to any devices if `devices` is null. The attributes are those of
// GroupSpec, in its order.
EXPORTED void gluon_syncbn_make_group(int64_t id, const char* const* devices, const char* advice, const char* name,
                                      int num_devices, int devices_per_group, double timeout_seconds, double momentum,
                                      double epsilon, int scale, int dtype, double r_max, double d_max) {
  const gluon_syncbn::GroupSpec spec{name,
                                     static_cast<size_t>(num_devices),
                                     static_cast<size_t>(devices_per_group),
                                     timeout_seconds,
                                     momentum,
                                     epsilon,
                                     scale != 0,
                                     gluon_syncbn::dtype_of(dtype),
                                     {r_max, d_max}};
  const std::vector<std::string> names(devices, devices + (devices ? num_devices : 0));
  const auto connect = [id] { return gluon_syncbn::connect(id); };
  const auto drop = [id] { gluon_syncbn::while_python_lives([id] { gluon_syncbn::python().drop(id); }); };
  gluon_syncbn::add_group(id, std::make_shared<gluon_syncbn::Group>(spec, names, advice, connect, drop));
}

// Forgets a group; calls that are under way keep it until they are done.
EXPORTED void gluon_syncbn_drop_group(int64_t id) { gluon_syncbn::drop_group(id); }

// Sets the limits of Batch Renormalization. No operator may be running.
EXPORTED void gluon_syncbn_set_limits(int64_t id, double r_max, double d_max) {
  gluon_syncbn::find_group(id)->limits = {r_max, d_max};
}

// Makes these devices meet from now on, and no others; set 0 is everyone. No operator may be running.
EXPORTED void gluon_syncbn_use_active_set(int64_t id, const char* const* devices, int num_devices) {
  gluon_syncbn::ActiveSets& all = gluon_syncbn::active_sets();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.members[id] = std::set<std::string>(devices, devices + num_devices);
  all.current = id;
}
