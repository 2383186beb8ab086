#include "meeting/group.h"

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <tuple>

namespace gluon_syncbn {
namespace {

// Orders by type and number, so that cpu(2) comes before cpu(10).
bool comes_before(const std::string& a, const std::string& b) {
  return std::make_tuple(a.substr(0, a.find('(')), a.size(), a) <
         std::make_tuple(b.substr(0, b.find('(')), b.size(), b);
}

// From a subgroup to the other processes.
class WayOut : public std::enable_shared_from_this<WayOut> {
 public:
  WayOut(Link link, std::string where, int64_t subgroup, int64_t active_set)
      : link_(std::move(link)), where_(std::move(where)), subgroup_(subgroup), active_set_(active_set) {}

  // As `Exchange::start`, with the vectors of this process merged to one. A forward pass prepares the channels where
  // that has not been done in this epoch. Forward passes come one after the other. A backward pass comes after its
  // forward pass; after another epoch's it is refused.
  void forward(const Vectors& brought, Then done) {
    std::vector<double> vector = merge(brought).pack();
    if (epoch_ == link_.processes->epoch()) return exchange(true, Processes::kNext, std::move(vector), std::move(done));
    std::thread([self = shared_from_this(), vector = std::move(vector), done = std::move(done)]() mutable {
      try {
        self->prepare();
        self->exchange(true, Processes::kNext, std::move(vector), done);
      } catch (const std::exception& problem) {
        self->link_.processes->fail(self->where_ + "forward pass: " + problem.what());
        done({nullptr, 0, problem.what()});
      }
    }).detach();
  }

  void backward(const Vectors& brought, int64_t round, Then done) {
    exchange(false, round, add_ranks(brought), std::move(done));
  }

 private:
  void prepare() {
    const uint64_t epoch = link_.processes->epoch();
    auto [key, members] = link_.prepare(subgroup_, active_set_);
    const std::lock_guard<std::mutex> lock(mutex_);
    forward_ = {where_ + "forward pass", key, members, link_.timeout_seconds};
    backward_ = {where_ + "backward pass", key ^ 1, members, link_.timeout_seconds};
    epoch_ = epoch;
  }

  void exchange(bool is_forward, int64_t round, std::vector<double> vector, Then done) {
    std::unique_lock<std::mutex> lock(mutex_);
    const Channel channel = is_forward ? forward_ : backward_;
    lock.unlock();
    link_.processes->exchange(channel, round, std::move(vector), std::move(done));
  }

  static constexpr uint64_t kNone = UINT64_MAX;

  const Link link_;
  const std::string where_;  // how errors begin
  const int64_t subgroup_, active_set_;
  std::mutex mutex_;
  Channel forward_, backward_;
  std::atomic<uint64_t> epoch_{kNone};  // in which they were prepared
};

// Never destroyed, because operators may still run while the process exits.
struct GroupTable {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Group>> by_id;
  ActiveSets active_sets;
};
GroupTable& groups = *new GroupTable;

}  // namespace

ActiveSets& active_sets() { return groups.active_sets; }

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
    : GroupSpec(spec),
      devices_(std::move(devices)),
      advice_(std::move(advice)),
      connect_(std::move(connect)),
      drop_(std::move(drop)) {
  if (devices_.size() == num_devices) return;
  const std::string unknown =
      "devices that have never run it; it was made for num_devices=" + std::to_string(num_devices) +
      " (bind one Symbol object on all of them)";
  opening_ = make_place(true, std::vector<std::string>(num_devices, unknown), {});
}

std::vector<std::string> Group::devices() {
  std::lock_guard<std::mutex> lock(mutex_);
  return devices_;
}

void Group::connect() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_devices == 0) {
    throw std::invalid_argument(where() +
                                "its graph does not say on how many devices it trains. "
                                "Give num_devices where the layer is made, or call hybridize() again after "
                                "initialize().");
  }
  if (!link_) link_ = connect_();
}

void Group::enter(const std::string& device, Then then) {
  std::shared_ptr<Rendezvous> opening;
  size_t place = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (opening_) place = static_cast<size_t>(std::find(devices_.begin(), devices_.end(), device) - devices_.begin());
    if (opening_ && place < num_devices) {
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
    throw std::invalid_argument(where() + "ran on " + device +
                                " in training mode, which is not in the list of gluon_syncbn.devices(...).");
  }
  throw std::invalid_argument(where() + "its graph was built for " + joined(devices_) + ", and now runs on " + device +
                              ". Call hybridize() again after the parameters have moved to other devices; load a "
                              "symbol again before it is bound to other devices.");
}

void Group::make_subgroups(std::map<std::string, Membership>& members, int64_t active_set) const {
  std::map<size_t, std::vector<std::string>> neighbours;
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (active_sets().includes(devices_[i], active_set)) {
      neighbours[(link_->first_device + i) / devices_per_group].push_back(devices_[i]);
    }
  }
  for (const auto& [number, names] : neighbours) {
    Exchange forward_exchange, backward_exchange;
    if (link_->processes) {
      const auto way = std::make_shared<WayOut>(*link_, where(), static_cast<int64_t>(number), active_set);
      const auto fail = [processes = link_->processes](const std::string& error) { processes->fail(error); };
      forward_exchange = {[way](const Vectors& brought, int64_t, Then done) { way->forward(brought, done); }, fail};
      backward_exchange = {[way](const Vectors& brought, int64_t key, Then done) { way->backward(brought, key, done); },
                           fail};
    }
    const auto forward = make_place(true, names, forward_exchange);
    const auto backward = make_place(false, names, backward_exchange);
    for (size_t rank = 0; rank < names.size(); ++rank) members[names[rank]] = {rank, forward, backward};
  }
}

std::shared_ptr<Rendezvous> Group::make_place(bool is_forward, std::vector<std::string> names,
                                              Exchange exchange) const {
  return std::make_shared<Rendezvous>(where() + (is_forward ? "forward pass" : "backward pass"), std::move(names),
                                      timeout_seconds, advice_, std::move(exchange));
}

std::string Group::where() const { return "SyncBatchNorm '" + name + "': "; }

void add_group(int64_t id, std::shared_ptr<Group> group) {
  std::lock_guard<std::mutex> lock(groups.mutex);
  groups.by_id[id] = std::move(group);
}

std::shared_ptr<Group> find_group(int64_t id) {
  std::lock_guard<std::mutex> lock(groups.mutex);
  const auto found = groups.by_id.find(id);
  if (found != groups.by_id.end()) return found->second;
  throw std::invalid_argument("no SyncBatchNorm layer number " + std::to_string(id) +
                              " in this process. Its layer was dropped, or this is a graph that another process has "
                              "run: save the net, or the symbol that it is of.");
}

void drop_group(int64_t id) {
  decltype(groups.by_id)::node_type last;  // goes when the lock is free: it may be the last to hold the group
  std::lock_guard<std::mutex> lock(groups.mutex);
  last = groups.by_id.extract(id);
}

}  // namespace gluon_syncbn
