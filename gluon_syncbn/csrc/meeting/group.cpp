#include "meeting/group.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "meeting/step.h"

namespace gluon_syncbn {
namespace {

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Orders by type and number, so that cpu(2) comes before cpu(10).
bool comes_before(const std::string& a, const std::string& b) {
  return std::make_tuple(a.substr(0, a.find('(')), a.size(), a) <
         std::make_tuple(b.substr(0, b.find('(')), b.size(), b);
}

// Never destroyed, because operators may still run while the process exits.
std::mutex& groups_mutex() {
  static std::mutex* mutex = new std::mutex;
  return *mutex;
}
std::map<int64_t, std::shared_ptr<Group>>& groups() {
  static auto* all = new std::map<int64_t, std::shared_ptr<Group>>;
  return *all;
}

}  // namespace

// Never destroyed, like the groups.
ActiveSets& active_sets() {
  static auto* all = new ActiveSets;
  return *all;
}

bool ActiveSets::knows(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex);
  return id == 0 || members.count(id) > 0;
}

bool ActiveSets::includes(const std::string& device, int64_t id) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = members.find(id);
  return id == 0 || (found != members.end() && found->second.count(device) > 0);
}

Group::Group(const GroupSpec& spec, std::vector<std::string> devices, std::string advice, std::function<Link()> connect,
             std::function<void()> drop)
    : name(spec.name),
      momentum(spec.momentum),
      epsilon(spec.epsilon),
      scale(spec.scale != 0),
      dtype(dtype_of(spec.dtype)),
      timeout_seconds(spec.timeout_seconds),
      renorm_(spec.renorm_points, spec.renorm_points + spec.num_renorm_points),
      devices_(std::move(devices)),
      num_devices_(static_cast<size_t>(spec.num_devices)),
      group_size_(static_cast<size_t>(spec.group_size)),
      advice_(std::move(advice)),
      connect_(std::move(connect)),
      drop_(std::move(drop)) {
  if (devices_.size() == num_devices_) return;
  const std::string unknown =
      "devices that have never run it; it was made for num_devices=" + std::to_string(num_devices_);
  opening_ = make_place(true, std::vector<std::string>(num_devices_, unknown), {});
}

std::vector<std::string> Group::devices() {
  std::lock_guard<std::mutex> lock(mutex_);
  return devices_;
}

void Group::connect() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_devices_ == 0) {
    throw std::invalid_argument("SyncBatchNorm '" + name +
                                "': its graph does not say on how many devices it trains. "
                                "Give num_devices where the layer is made, or call hybridize() again after "
                                "initialize().");
  }
  if (!link_) link_ = connect_();
}

void Group::enter(const std::string& device, Rendezvous::Then then) {
  std::shared_ptr<Rendezvous> opening;
  size_t place = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (opening_) place = static_cast<size_t>(std::find(devices_.begin(), devices_.end(), device) - devices_.begin());
    if (opening_ && place < num_devices_) {
      opening = opening_;
      if (place == devices_.size()) devices_.push_back(device);
      opening->rename(place, device);
    }
  }
  if (!opening) return then({});
  opening->arrive(place, {}, 0, [self = shared_from_this(), then = std::move(then)](const Outcome& outcome) {
    if (outcome.error.empty()) {  // all devices are known now
      std::lock_guard<std::mutex> lock(self->mutex_);
      if (self->opening_) std::sort(self->devices_.begin(), self->devices_.end(), comes_before);
      self->opening_ = nullptr;
    }
    then(outcome);
  });
}

Membership Group::membership_of(const std::string& device, int64_t active_set) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::string, Membership>& members = members_[active_set];
  if (members.empty()) make_subgroups(members, active_set);
  const auto found = members.find(device);
  if (found != members.end()) return found->second;
  if (std::find(devices_.begin(), devices_.end(), device) != devices_.end()) {
    throw std::invalid_argument("SyncBatchNorm '" + name + "': ran on " + device +
                                " in training mode, which is not in the list of gluon_syncbn.devices(...).");
  }
  throw std::invalid_argument("SyncBatchNorm '" + name + "': its graph was built for " + join(devices_) +
                              ", and now runs on " + device +
                              ". Call hybridize() again after the parameters have moved to other devices; load a "
                              "symbol again before it is bound to other devices.");
}

int64_t Group::rounds(int64_t active_set) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t sum = 0;
  const auto found = members_.find(active_set);
  if (found == members_.end()) return sum;
  for (const auto& entry : found->second) {
    if (entry.second.rank == 0) sum += static_cast<int64_t>(entry.second.forward->rounds());
  }
  return sum;
}

int64_t Group::next_step(const std::string& device) {
  const uint64_t occasion = active_sets().changes + gluon_syncbn::step().generation();  // both only grow
  if (occasion != occasion_) {
    occasion_ = occasion;
    for (const auto& entry : steps_) common_step_ = std::max(common_step_, entry.second);
    steps_.clear();
  }
  const auto found = steps_.find(device);
  return found == steps_.end() ? common_step_ : std::max(common_step_, found->second);
}

int64_t Group::step_of(const std::string& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return next_step(device);
}

int64_t Group::go_to_step(int64_t least) {
  std::lock_guard<std::mutex> lock(mutex_);
  common_step_ = std::max(common_step_, least);
  int64_t latest = common_step_;
  for (const auto& entry : steps_) latest = std::max(latest, entry.second);
  return latest;
}

RenormLimits Group::renorm(const std::string& device, int64_t step) {
  if (renorm_.empty()) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  steps_[device] = std::max(step, next_step(device)) + 1;
  return renorm_at(renorm_, step);
}

void Group::make_subgroups(std::map<std::string, Membership>& members, int64_t active_set) const {
  std::map<size_t, std::vector<std::string>> neighbours;
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (active_sets().includes(devices_[i], active_set)) {
      neighbours[(link_->first_device + i) / group_size_].push_back(devices_[i]);
    }
  }
  for (const auto& [number, names] : neighbours) {
    const auto forward = make_place(true, names, exchange_of(true, number, active_set));
    const auto backward = make_place(false, names, exchange_of(false, number, active_set));
    for (size_t rank = 0; rank < names.size(); ++rank) members[names[rank]] = {rank, forward, backward};
  }
}

std::shared_ptr<Rendezvous> Group::make_place(bool is_forward, std::vector<std::string> names,
                                              Exchange exchange) const {
  return std::make_shared<Rendezvous>("SyncBatchNorm '" + name + (is_forward ? "': forward pass" : "': backward pass"),
                                      std::move(names), timeout_seconds, advice_, std::move(exchange));
}

Exchange Group::exchange_of(bool is_forward, size_t subgroup, int64_t active_set) const {
  if (!link_->exchange) return {};
  // The round keeps the group only as long as it waits, and it may have been given up when the exchange returns.
  const auto exchange = [group = weak_from_this(), is_forward, subgroup, active_set](const Vectors& contributions,
                                                                                     uint64_t key, uint64_t& round_id) {
    const std::shared_ptr<const Group> alive = group.lock();
    if (!alive) throw RendezvousError("its layer was dropped.");
    uint64_t number = is_forward ? 0 : key;
    Vectors rows = alive->link_->exchange(is_forward, static_cast<int64_t>(subgroup), active_set, number,
                                          is_forward ? merge(contributions).pack() : add_ranks(contributions));
    if (is_forward) round_id = number;
    return rows;
  };
  return {exchange, link_->fail, link_->exchange_seconds};
}

void add_group(int64_t id, std::shared_ptr<Group> group) {
  std::lock_guard<std::mutex> lock(groups_mutex());
  groups()[id] = std::move(group);
}

std::shared_ptr<Group> find_group(int64_t id) {
  std::lock_guard<std::mutex> lock(groups_mutex());
  const auto found = groups().find(id);
  if (found == groups().end()) {
    throw std::invalid_argument("no SyncBatchNorm layer number " + std::to_string(id) +
                                " in this process. Its layer was dropped, or this is a graph that another process has "
                                "run: save the net, or the "
                                "symbol that it is of.");
  }
  return found->second;
}

void drop_group(int64_t id) {
  std::shared_ptr<Group> last;  // perhaps; it goes when the lock is free
  std::lock_guard<std::mutex> lock(groups_mutex());
  const auto found = groups().find(id);
  if (found == groups().end()) return;
  last = std::move(found->second);
  groups().erase(found);
}

}  // namespace gluon_syncbn
