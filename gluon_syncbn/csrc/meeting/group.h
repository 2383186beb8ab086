// The devices of each layer, and where they meet. Groups are made by Python, which gives each a number.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "meeting/rendezvous.h"

namespace gluon_syncbn {

// Who takes part, as chosen by gluon_syncbn.devices: number 0 is everyone, any other a list that Python has defined.
// Only Python changes it, while no operator runs.
struct Participants {
  std::mutex mutex;
  std::map<int64_t, std::set<std::string>> lists;
  std::atomic<int64_t> current{0};

  // Whether `number` is everyone, or a list that has been defined.
  bool knows(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex);
    return number == 0 || lists.count(number) > 0;
  }
};
Participants& participants();

// Devices of one layer that synchronize among themselves.
struct Circle {
  Circle(const std::string& name, const std::vector<std::string>& members, double timeout, const std::string& advice)
      : forward("SyncBatchNorm '" + name + "': forward pass", members, timeout, advice),
        backward("SyncBatchNorm '" + name + "': backward pass", members, timeout, advice) {}

  Rendezvous forward;
  Rendezvous backward;
};

struct Place {
  size_t rank;
  std::shared_ptr<Circle> circle;
};

class Group {
 public:
  // Of `devices`; or, if there are none, open to the first `size` that come.
  Group(std::string layer, std::vector<std::string> devices, size_t size, size_t circle_size, double timeout,
        std::string advice)
      : name(std::move(layer)),
        devices_(std::move(devices)),
        size_(size),
        circle_size_(circle_size),
        timeout_(timeout),
        advice_(std::move(advice)) {}

  const std::string name;
  double momentum = 0;
  double epsilon = 0;
  bool scale = true;
  DType dtype = DType::kFloat32;  // of parameters and statistics

  // Where `device` meets the others that take part. Circles are made when the first of them comes.
  Place place_of(const std::string& device, int64_t taking_part);

  // Forward rounds so far in which exactly these took part.
  int64_t rounds(int64_t taking_part);

 private:
  // The first round of an open group: comes back when as many devices as it has are there.
  void wait_for_devices(const std::string& device, std::unique_lock<std::mutex>& lock);

  void make_circles(std::map<std::string, Place>& places, int64_t taking_part) const;

  std::vector<std::string> devices_;
  const size_t size_;
  const size_t circle_size_;
  const double timeout_;
  const std::string advice_;
  std::mutex mutex_;
  std::condition_variable complete_;
  std::map<int64_t, std::map<std::string, Place>> places_;  // by participants, then by device
};

void add_group(int64_t number, std::shared_ptr<Group> group);

// Throws std::invalid_argument if there is none of this number.
std::shared_ptr<Group> find_group(int64_t number);

// Calls that are under way keep the group until they are done.
void drop_group(int64_t number);

int64_t count_groups();

}  // namespace gluon_syncbn
