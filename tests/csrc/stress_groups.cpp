// Layers over 12 devices, each a thread, meet in groups of 12, 4, 3 and 1, forward and backward, with all devices or
// with the devices of a short step, and with other limits of Batch Renormalization in each step. Meanwhile another
// thread asks the groups all that Python asks, makes and drops other groups, and switches the profile. The test
// compares statistics, sums and limits with the devices' values. Then two processes of one device each abandon every
// step: their next exchanges need some time to be prepared. Two backward passes of one forward pass come. Run
// under ThreadSanitizer and AddressSanitizer. Usage: stress_groups [steps]

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "meeting/all_reduce.h"
#include "meeting/step.h"
#include "processes/host_memory.h"

extern "C" int gluon_syncbn_start_profile();
extern "C" const char* gluon_syncbn_stop_profile();

using namespace gluon_syncbn;

namespace {

constexpr size_t kDevices = 12;
constexpr size_t kChannels = 3;
std::atomic<long> failures{0}, met{0}, lines{0};

void check(bool right, const std::string& what) {
  if (right) return;
  std::printf("%s\n", what.c_str());
  failures += 1;
}

bool is_close(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(1.0, std::abs(b)); }

std::string name_of(size_t device) { return "cpu(" + std::to_string(device) + ")"; }

// The values of a device in a channel, one to three in each step.
std::vector<double> values_of(size_t device, int step, size_t channel) {
  std::mt19937_64 random(1000003 * device + 101 * static_cast<size_t>(step) + channel);
  std::vector<double> values(1 + (device + static_cast<size_t>(step)) % 3);
  for (double& value : values) value = std::normal_distribution<double>(2, 3)(random);
  return values;
}

double sum_of(size_t device, int step, size_t number) {
  return std::sin(static_cast<double>(7 * device + number) + step);
}

void pass_both_ways(Group& group, size_t device, int step, const std::vector<size_t>& together) {
  const std::string name = name_of(device);
  Moments local{0, std::vector<double>(kChannels), std::vector<double>(kChannels)};
  std::vector<double> mean(kChannels), variance(kChannels);
  double count = 0;
  for (size_t c = 0; c < kChannels; ++c) {
    std::vector<double> all;
    for (size_t other : together) {
      for (double value : values_of(other, step, c)) all.push_back(value);
    }
    const auto moments = [](const std::vector<double>& values, double& middle) {
      middle = 0;
      for (double value : values) middle += value / static_cast<double>(values.size());
      double squares = 0;
      for (double value : values) squares += (value - middle) * (value - middle);
      return squares;
    };
    count = static_cast<double>(all.size());
    variance[c] = moments(all, mean[c]) / count;
    const std::vector<double> own = values_of(device, step, c);
    local.count = static_cast<double>(own.size());
    local.m2[c] = moments(own, local.mean[c]);
  }

  Meeting there(group, name, true), back(group, name, false);
  there.begin_pass();
  wait_until_done([&](Meeting::Done done) { there.bring_moments(local, std::move(done)); });
  Statistics seen = there.statistics();
  there.end_pass();
  const std::string where = group.name + " on " + name + " in step " + std::to_string(step) + ": ";
  check(seen.call.count == count, where + "count");
  for (size_t c = 0; c < kChannels; ++c) {
    check(is_close(seen.mean[c], mean[c]) && is_close(seen.variance[c], variance[c]), where + "statistics");
  }
  check(group.limits.r_max == 1 + step && group.limits.d_max == step, where + "limits");

  double numbers[ForwardCall::kSize];
  seen.call.save(numbers);
  std::vector<double> sums(2 * kChannels);
  for (size_t i = 0; i < sums.size(); ++i) sums[i] = sum_of(device, step, i);
  back.begin_pass();
  const ForwardCall call = ForwardCall::load(group, name, numbers);
  wait_until_done([&](Meeting::Done done) { back.bring_sums(sums, call, std::move(done)); });
  sums = back.sums();
  back.end_pass();
  for (size_t i = 0; i < sums.size(); ++i) {
    double expected = 0;
    for (size_t other : together) expected += sum_of(other, step, i);
    check(is_close(sums[i], expected), where + "sums");
  }
  met += 1;
}

std::shared_ptr<Group> make(const std::string& name, size_t size, bool is_open, std::function<void()> drop) {
  const GroupSpec spec{name, kDevices, size, 600, 0.9, 1e-5, true, DType::kFloat32, {1, 0}};
  std::vector<std::string> devices;
  for (size_t device = kDevices; device-- > 0 && !is_open;) devices.push_back(name_of(kDevices - 1 - device));
  return std::make_shared<Group>(spec, devices, "", [] { return Link{}; }, std::move(drop));
}

// Asks the groups as Python may at any time.
void ask(const std::vector<std::shared_ptr<Group>>& groups, const std::atomic<bool>& ends) {
  int64_t dropped = 0;
  for (int64_t number = 100; !ends; ++number) {
    add_group(number, make("other", 1, true, [&dropped] { ++dropped; }));
    check(find_group(number)->name == "other", "a group that was added is not found");
    for (size_t i = 0; i < groups.size(); ++i) {
      const std::shared_ptr<Group> found = find_group(static_cast<int64_t>(i));
      check(found == groups[i], "another group is found");
      check(found->devices().size() <= kDevices, "devices");
    }
    drop_group(number);
    try {
      find_group(number);
      check(false, "a group that was dropped is found");
    } catch (const std::invalid_argument&) {
    }
    if (number % 2) gluon_syncbn_start_profile();
    if (number % 2 == 0) {
      for (const char* text = gluon_syncbn_stop_profile(); *text; ++text) lines += *text == '\n';
    }
    std::this_thread::yield();
  }
  check(dropped > 0, "no group was dropped");
}

struct Nobody : Transport {
  void send(const Message&, const std::vector<int>&) override {}
};

void meet_in_two_processes(int steps) {
  const HostMemory::Offer offer(2);
  std::vector<std::shared_ptr<Processes>> processes;
  std::vector<std::shared_ptr<Group>> groups;
  for (int rank = 0; rank < 2; ++rank) {
    processes.push_back(std::make_shared<Processes>(rank, 2, "", std::make_shared<Nobody>(), false));
    Processes& mine = *processes.back();
    mine.share(
        std::make_shared<HostMemory>(offer.where, rank, std::vector<int>{0, 1},
                                     [&mine](int from, Message message) { mine.receive(from, std::move(message)); }));
    mine.agree_on_memory();
    Link link;
    link.processes = processes.back();
    link.first_device = static_cast<size_t>(rank);
    link.timeout_seconds = 60;
    link.prepare = [random = std::make_shared<std::mt19937>(rank)](int64_t, int64_t) {
      std::this_thread::sleep_for(std::chrono::microseconds((*random)() % 300));
      return std::make_pair(int64_t{2}, std::vector<int>{0, 1});
    };
    const GroupSpec spec{"layer", 1, 2, 600, 0.9, 1e-5, true, DType::kFloat32, {1, 0}};
    groups.push_back(
        std::make_shared<Group>(spec, std::vector<std::string>{"cpu(0)"}, "", [link] { return link; }, [] {}));
    groups.back()->connect();
  }
  std::atomic<int> finished{0};
  const auto run = [&](int rank) {
    const std::string device = "cpu(0)";
    Processes& mine = *processes[static_cast<size_t>(rank)];
    Group& group = *groups[static_cast<size_t>(rank)];
    for (int step = 0; step < steps; ++step) {
      Meeting forward(group, device, true), first(group, device, false), second(group, device, false);
      for (Meeting* meeting : {&forward, &first, &second}) meeting->begin_pass();
      const Moments local{2, {double(rank)}, {0}};
      wait_until_done([&](Meeting::Done done) { forward.bring_moments(local, std::move(done)); });
      const ForwardCall call = forward.statistics().call;
      std::promise<void> one, other;
      first.bring_sums({1.0 + rank, 0.0}, call, [&one] { one.set_value(); });
      second.bring_sums({10.0 + rank, 0.0}, call, [&other] { other.set_value(); });
      one.get_future().wait();
      other.get_future().wait();
      check(first.sums()[0] == 3 && second.sums()[0] == 21, "backward passes of one forward pass have changed places");
      for (Meeting* meeting : {&forward, &first, &second}) meeting->end_pass();
      // A process that has abandoned the step takes no part in exchanges that the other has yet to begin.
      for (++finished; finished < 2 * (step + 1);) std::this_thread::yield();
      mine.abandon(true);
      wait_until_done([&](std::function<void()> done) { mine.resume("", 60, [done](const Outcome&) { done(); }); });
    }
  };
  std::thread there([&] { run(1); });
  run(0);
  there.join();
  for (const auto& mine : processes) mine->share(nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 100;
  const std::vector<size_t> sizes{12, 4, 3, 1};
  std::vector<std::shared_ptr<Group>> groups;
  for (size_t i = 0; i < sizes.size(); ++i) {
    // The first two are open to any devices, as groups of symbols are.
    groups.push_back(make("layer" + std::to_string(sizes[i]), sizes[i], i < 2, [] {}));
    groups.back()->connect();
    add_group(static_cast<int64_t>(i), groups.back());
  }
  std::atomic<bool> ends{false};
  std::thread asking([&] { ask(groups, ends); });
  std::mt19937_64 random(7);
  for (int step = 0; step < steps; ++step) {
    std::vector<size_t> used;
    for (size_t device = 0; device < kDevices; ++device) {
      if (step == 0 || step % 3 || random() % 2) used.push_back(device);
    }
    if (used.empty()) used.push_back(3);
    {
      std::lock_guard<std::mutex> lock(active_sets().mutex);
      const bool is_short = used.size() < kDevices;
      if (is_short) {
        std::set<std::string>& members = active_sets().members[step];
        for (size_t device : used) members.insert(name_of(device));
      }
      active_sets().current = is_short ? step : 0;
    }
    for (const auto& group : groups) group->limits = {1.0 + step, 1.0 * step};
    std::vector<std::thread> threads;
    for (size_t device : used) {
      threads.emplace_back([&, device] {
        for (size_t i = 0; i < groups.size(); ++i) {
          std::vector<size_t> together;
          for (size_t other : used) {
            if (other / sizes[i] == device / sizes[i]) together.push_back(other);
          }
          pass_both_ways(*groups[i], device, step, together);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  ends = true;
  asking.join();
  check(lines > 0, "nothing was profiled");
  {
    std::lock_guard<std::mutex> lock(active_sets().mutex);
    active_sets().current = 0;
  }
  meet_in_two_processes(3 * steps);
  std::printf("%d steps, %ld passes there and back, %ld failures\n", steps, met.load(), failures.load());
  return failures != 0;
}
