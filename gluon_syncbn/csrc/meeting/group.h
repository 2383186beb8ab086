// The devices of each layer, and where they meet. Python makes groups, and gives each an id.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "meeting/rendezvous.h"
#include "processes/processes.h"
#include "tensor.h"

namespace gluon_syncbn {

// The attributes of a group, from Python: a LayerSpec (layer/spec.py).
struct GroupSpec {
  const std::string name;  // the layer's
  const size_t num_devices;
  const size_t devices_per_group;  // of neighbours that synchronize among themselves, in all processes
  const double timeout_seconds;
  const double momentum;
  const double epsilon;
  const bool scale;     // whether there is a gamma
  const DType dtype;    // of parameters and statistics
  RenormLimits limits;  // Python changes them, while no operator runs
};

// The devices that synchronize now, as gluon_syncbn.devices has chosen them: set 0 is all devices, and Python defines
// the others. Only Python changes them, while no operator runs.
struct ActiveSets {
  std::mutex mutex;
  std::map<int64_t, std::set<std::string>> members;
  std::atomic<int64_t> current{0};

  // Whether `id` is 0, or a set that has been defined.
  bool knows(int64_t id);
  bool includes(const std::string& device, int64_t id);
};
ActiveSets& active_sets();

// The place of a device in its subgroup: the devices that it synchronizes with.
struct Membership {
  size_t rank;
  std::shared_ptr<Rendezvous> forward, backward;
};

// How a group reaches the other processes of a job.
struct Link {
  std::shared_ptr<Processes> processes;  // none if this one is alone
  // Asks Python for the key of a subgroup, and the ranks of its members. May wait: processes may have to compare their
  // nets first, or go on together after a step that was abandoned. Throws RendezvousError.
  std::function<std::pair<int64_t, std::vector<int>>(int64_t subgroup, int64_t active_set)> prepare;
  size_t first_device = 0;     // the number of this process's first device among the devices of all processes
  double timeout_seconds = 0;  // of processes
};

class Group : public GroupSpec, public std::enable_shared_from_this<Group> {
 public:
  // Makes the group of `devices`; or, if there are none, one open to the first `spec.num_devices` that come. `advice`
  // ends errors about missing devices. `connect` is called once, before the first device trains, and makes the link to
  // other processes, which is empty if there are none; it may throw. `drop` is called when the group is gone.
  Group(const GroupSpec& spec, std::vector<std::string> devices, std::string advice, std::function<Link()> connect,
        std::function<void()> drop);
  ~Group() { drop_(); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  std::string where() const;  // how errors begin

  // The devices that are known: in an open group, those that have come.
  std::vector<std::string> devices();

  // Must be called before a pass in training, by a thread that may wait; may throw.
  void connect();

  // Calls back when all devices of the group are known: at once, or, in the first round of an open group, when all have
  // come.
  void enter(const std::string& device, Then then);

  // The place of `device` in the active set. Subgroups are made when the first device comes.
  Membership membership_of(const std::string& device, int64_t active_set);

  // True once: the caller is to warn the user.
  bool is_first_warning() { return !has_warned_.exchange(true); }

 private:
  void make_subgroups(std::map<std::string, Membership>& members, int64_t active_set) const;

  std::shared_ptr<Rendezvous> make_place(bool is_forward, std::vector<std::string> names, Exchange exchange) const;

  std::atomic<bool> has_warned_{false};
  std::vector<std::string> devices_;     // of an open group in the order in which they came
  std::shared_ptr<Rendezvous> opening_;  // where they meet, as long as it is open
  const std::string advice_;
  const std::function<Link()> connect_;
  const std::function<void()> drop_;
  std::optional<Link> link_;
  std::mutex mutex_;
  std::map<int64_t, std::map<std::string, Membership>> members_;  // by active set, then by device
};

void add_group(int64_t id, std::shared_ptr<Group> group);

// Throws std::invalid_argument if there is none with this id.
std::shared_ptr<Group> find_group(int64_t id);

// Calls that are under way keep the group until they are done.
void drop_group(int64_t id);

}  // namespace gluon_syncbn
