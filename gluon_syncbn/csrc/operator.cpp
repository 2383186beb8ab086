// The compiled operator as MXNet sees it: a custom operator whose callbacks are C functions, so that no Python runs in
// a training step. This file knows MXNet's C interface, the groups that Python has made, and the order of things:
//
//   forward    moments of x → meet → statistics of the whole mini-batch → running statistics → y
//   backward   sums of dy and dy·x̂ → meet → dx, dγ, dβ
//
// Inputs: data, gamma, beta, and in some graphs the `saved` of the call that must come before this one (block.py tells
// why); auxiliary states: running_mean, running_var; outputs: out, and for the backward pass `saved` (mean, invstd,
// count of all devices, number of the forward round, number of the participants; count 0 after prediction mode). The
// arrays are dense: native.py keeps oneDNN's layouts away from the operator.
//
// A graph names its group in one of two ways. A net's own graph gives the number of one that Python has made for the
// layer, with its devices. A graph that outlives its process, or that no layer owns (symbol.py), carries a description:
// the operator has Python make a group of it, which belongs to this node of the graph. That group is open: it knows how
// many devices there are, and takes in those that come.
//
// Threads: MXNet runs forward and backward on threads that it adds on demand, one per call that is under way. They may
// therefore wait for each other in a rendezvous. Groups are shared by layer, graph and calls, and freed with the last.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels.h"
#include "mxnet_c_api.h"
#include "rendezvous.h"

namespace gluon_syncbn {
namespace {

constexpr const char* kOperator = "gluon_syncbn_native";
constexpr double kLost = std::numeric_limits<double>::quiet_NaN();

MXNetFunctions mxnet;

// ---------------------------------------------------------------------------------------------------------------------
// Groups

// Who takes part, as chosen by gluon_syncbn.devices: number 0 is everyone, any other a list that Python has defined.
// Only Python changes it, while no operator runs.
struct Participants {
  std::mutex mutex;
  std::map<int64_t, std::set<std::string>> lists;
  std::atomic<int64_t> current{0};
};
// Never destroyed, like the groups below.
Participants& participants() {
  static auto* all = new Participants;
  return *all;
}

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

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// By type and number, so that cpu(2) comes before cpu(10).
bool comes_before(const std::string& a, const std::string& b) {
  return std::make_tuple(a.substr(0, a.find('(')), a.size(), a) < std::make_tuple(b.substr(0, b.find('(')), b.size(), b);
}

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
  Place place_of(const std::string& device, int64_t taking_part) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (size_ == 0) {
      throw std::invalid_argument("SyncBatchNorm '" + name + "': its graph does not say on how many devices it trains. "
                                  "Give num_devices where the layer is made, or call hybridize() again after "
                                  "initialize().");
    }
    if (devices_.size() < size_) wait_for_devices(device, lock);
    std::map<std::string, Place>& places = places_[taking_part];
    if (places.empty()) make_circles(places, taking_part);
    const auto found = places.find(device);
    if (found != places.end()) return found->second;
    if (std::find(devices_.begin(), devices_.end(), device) != devices_.end()) {
      throw std::invalid_argument("SyncBatchNorm '" + name + "': ran on " + device +
                                  " in training mode, which is not in the list of gluon_syncbn.devices(...).");
    }
    throw std::invalid_argument("SyncBatchNorm '" + name + "': its graph was built for " + join(devices_) +
                                ", and now runs on " + device +
                                ". Call hybridize() again after the parameters have moved to other devices; load a "
                                "symbol again before it is bound to other devices.");
  }

  // Forward rounds so far in which exactly these took part.
  int64_t rounds(int64_t taking_part) {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t sum = 0;
    for (const auto& entry : places_[taking_part]) {
      if (entry.second.rank == 0) sum += static_cast<int64_t>(entry.second.circle->forward.rounds());
    }
    return sum;
  }

 private:
  // The first round of an open group: comes back when as many devices as it has are there.
  void wait_for_devices(const std::string& device, std::unique_lock<std::mutex>& lock) {
    if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) devices_.push_back(device);
    if (devices_.size() == size_) {
      std::sort(devices_.begin(), devices_.end(), comes_before);
      complete_.notify_all();
    }
    const auto all_are_here = [&] { return devices_.size() == size_; };
    if (!complete_.wait_for(lock, std::chrono::duration<double>(timeout_), all_are_here)) {
      std::ostringstream text;
      text << "SyncBatchNorm '" << name << "': forward pass waited " << timeout_ << " s for "
           << size_ - devices_.size() << " of " << size_ << " devices. Arrived: " << join(devices_)
           << ". Missing: devices that have never run it; it was made for num_devices=" << size_ << ". " << advice_;
      const auto place = std::find(devices_.begin(), devices_.end(), device) - devices_.begin();
      lock.unlock();
      std::this_thread::sleep_for(place * kBetweenFailures);
      throw RendezvousError(text.str());
    }
  }

  void make_circles(std::map<std::string, Place>& places, int64_t taking_part) const {
    for (size_t start = 0; start < devices_.size(); start += circle_size_) {
      std::vector<std::string> members;
      for (size_t i = start; i < start + circle_size_; ++i) {
        if (takes_part(devices_[i], taking_part)) members.push_back(devices_[i]);
      }
      const auto circle = std::make_shared<Circle>(name, members, timeout_, advice_);
      for (size_t rank = 0; rank < members.size(); ++rank) places[members[rank]] = {rank, circle};
    }
  }

  static bool takes_part(const std::string& device, int64_t taking_part) {
    if (taking_part == 0) return true;
    Participants& all = participants();
    std::lock_guard<std::mutex> lock(all.mutex);
    return all.lists[taking_part].count(device) > 0;
  }

  std::vector<std::string> devices_;
  const size_t size_;
  const size_t circle_size_;
  const double timeout_;
  const std::string advice_;
  std::mutex mutex_;
  std::condition_variable complete_;
  std::map<int64_t, std::map<std::string, Place>> places_;  // by participants, then by device
};

// Never destroyed, because operators may still run while the process exits.
std::mutex& groups_mutex() {
  static std::mutex* mutex = new std::mutex;
  return *mutex;
}
std::map<int64_t, std::shared_ptr<Group>>& groups() {
  static auto* all = new std::map<int64_t, std::shared_ptr<Group>>;
  return *all;
}

std::shared_ptr<Group> find_group(int64_t number) {
  std::lock_guard<std::mutex> lock(groups_mutex());
  const auto found = groups().find(number);
  if (found == groups().end()) {
    throw std::invalid_argument(
        "no SyncBatchNorm layer number " + std::to_string(number) +
        " in this process. Its layer was dropped, or this graph was exported from a synchronized net: call "
        "convert_batchnorm(net) before you export.");
  }
  return found->second;
}

// Python's function that makes a group of a description; its number, or -1 after leaving the text of an error.
using MakeGroup = int64_t (*)(const char* description);
MakeGroup make_described_group = nullptr;

// The group that the attribute of a graph's node names.
std::shared_ptr<Group> group_of(const std::string& reference) {
  if (reference.find('{') == std::string::npos) return find_group(std::stoll(reference));
  const int64_t number = make_described_group(reference.c_str());
  if (number < 0) throw std::invalid_argument(take_error());
  std::shared_ptr<Group> group = find_group(number);
  std::lock_guard<std::mutex> lock(groups_mutex());
  groups().erase(number);  // it lives as long as the node
  return group;
}

// ---------------------------------------------------------------------------------------------------------------------
// Arrays and small vectors

// One of the handles that MXNet passes to a callback, which must free all of them, used or not; or none, if null.
class Array {
 public:
  explicit Array(void* handle) : handle_(handle) {}
  ~Array() {
    if (handle_) mxnet.array_free(handle_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  void* data() const {
    void* address = nullptr;
    if (mxnet.array_data(handle_, &address) != 0 || address == nullptr) {
      throw std::runtime_error("gluon_syncbn: MXNet did not give access to an array");
    }
    return address;
  }

 private:
  void* handle_;
};

std::vector<double> read_vector(DType dtype, const void* from, size_t size) {
  std::vector<double> values(size);
  for (size_t i = 0; i < size; ++i) {
    values[i] = dtype == DType::kFloat64 ? static_cast<const double*>(from)[i]
                                         : static_cast<double>(static_cast<const float*>(from)[i]);
  }
  return values;
}

void write_vector(DType dtype, const Array& array, const std::vector<double>& values,
                  Request request = Request::kWrite) {
  if (request == Request::kNull) return;  // there may be no memory then
  void* to = array.data();
  const bool add = request == Request::kAdd;
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kFloat64) {
      double& place = static_cast<double*>(to)[i];
      place = add ? place + values[i] : values[i];
    } else {
      float& place = static_cast<float*>(to)[i];
      place = static_cast<float>(add ? static_cast<double>(place) + values[i] : values[i]);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The operator: one layer's call on one device, with shapes known

class Operator {
 public:
  Operator(std::shared_ptr<Group> group, const char* device, Layout layout, DType dtype, bool relu, bool follows)
      : group_(std::move(group)),
        device_(device),
        layout_(layout),
        dtype_(dtype),
        relu_(relu),
        follows_(follows),
        threads_(omp_get_max_threads()) {}

  void forward(void** arrays, const int* requests, bool is_train) {
    const Array data(arrays[0]), gamma(arrays[1]), beta(arrays[2]);
    const Array after(follows_ ? arrays[3] : nullptr);
    arrays += 3 + (follows_ ? 1 : 0);
    const Array out(arrays[0]), saved(arrays[1]);
    const Array running_mean(arrays[2]), running_var(arrays[3]);
    const void* x = data.data();
    void* y = data_if_wanted(out, requests[0]);
    auto* remembered = static_cast<double*>(data_if_wanted(saved, requests[1]));
    if (!is_train) {
      remember(remembered, read(running_mean), inverse_deviation(read(running_var)), 0, 0, 0);
      if (y) normalize(dtype_, x, layout_, prediction_affine(gamma, beta, running_mean, running_var), y, threads_);
      return;
    }
    try {
      const int64_t taking_part = participants().current;
      const Place place = group_->place_of(device_, taking_part);
      const Moments local = moments(dtype_, x, layout_, threads_);
      const Rendezvous::Meeting meeting = place.circle->forward.meet(place.rank, pack(local));
      const Moments all = unpack_and_merge(*meeting.contributions);
      std::vector<double> variance(all.m2);
      for (double& value : variance) value /= all.count;
      const std::vector<double> invstd = inverse_deviation(variance);
      remember(remembered, all.mean, invstd, all.count, meeting.number, taking_part);
      if (y) {
        normalize(dtype_, x, layout_, affine_of(all.mean, scale_of(gamma, invstd), beta), y, threads_);
      }
      average(running_mean, all.mean);
      average(running_var, variance);
    } catch (...) {
      if (y) fill(dtype_, y, layout_.size(), kLost);
      throw;
    }
  }

  void backward(void** arrays, const int* requests) {
    const Array d_out(arrays[0]), d_saved(arrays[1]);
    const Array data(arrays[2]), gamma(arrays[3]), beta(arrays[4]);
    const Array after(follows_ ? arrays[5] : nullptr);
    arrays += 5 + (follows_ ? 1 : 0);
    const Array out(arrays[0]), saved(arrays[1]);
    const Array d_data(arrays[2]), d_gamma(arrays[3]), d_beta(arrays[4]);
    const Array d_after(follows_ ? arrays[5] : nullptr);  // never wanted
    arrays += 5 + (follows_ ? 1 : 0);
    const Array running_mean(arrays[0]), running_var(arrays[1]);
    const auto data_request = static_cast<Request>(requests[0]);
    const auto gamma_request = static_cast<Request>(requests[1]);
    const auto beta_request = static_cast<Request>(requests[2]);
    const size_t channels = static_cast<size_t>(layout_.channels);
    const auto* remembered = static_cast<const double*>(saved.data());
    const std::vector<double> mean(remembered, remembered + channels);
    const std::vector<double> invstd(remembered + channels, remembered + 2 * channels);
    const double total_count = remembered[2 * channels];
    const auto number = static_cast<uint64_t>(remembered[2 * channels + 1]);
    const auto taking_part = static_cast<int64_t>(remembered[2 * channels + 2]);
    try {
      const std::vector<double> scale = scale_of(gamma, invstd);
      const Affine affine = affine_of(mean, scale, beta);
      const void* x = data.data();
      const void* dy = d_out.data();
      const GradientSums sums = gradient_sums(dtype_, x, dy, layout_, affine, threads_);
      // This device's S1 = Σ dy, which is dβ, and S2 = Σ dy·x̂, which is dγ.
      const std::vector<double>& s1 = sums.dy;
      std::vector<double> s2(channels);
      for (size_t c = 0; c < channels; ++c) {
        s2[c] = invstd[c] * (sums.dy_centred[c] - (mean[c] - affine.shift[c]) * s1[c]);
      }
      InputGradient gradient{scale, std::vector<double>(channels, 0.0), std::vector<double>(channels, 0.0)};
      if (total_count > 0) {  // else the statistics did not depend on x
        const Place place = group_->place_of(device_, taking_part);
        std::vector<double> message(s1);
        message.insert(message.end(), s2.begin(), s2.end());
        const Rendezvous::Meeting meeting = place.circle->backward.meet(place.rank, std::move(message), number);
        std::vector<double> total(2 * channels, 0.0);
        for (const std::vector<double>& contribution : *meeting.contributions) {
          for (size_t i = 0; i < total.size(); ++i) total[i] += contribution[i];
        }
        for (size_t c = 0; c < channels; ++c) {
          const double mean_s1 = total[c] / total_count, mean_s2 = total[channels + c] / total_count;
          gradient.slope[c] = -gradient.factor[c] * invstd[c] * mean_s2;
          gradient.constant[c] =
              -gradient.factor[c] * mean_s1 - gradient.slope[c] * (mean[c] - affine.shift[c]);
        }
      }
      if (data_request != Request::kNull) {
        input_gradient(dtype_, x, dy, layout_, affine, gradient, d_data.data(), data_request == Request::kAdd,
                       threads_);
      }
      write_vector(group_->dtype, d_beta, s1, beta_request);
      if (!group_->scale) s2.assign(channels, 0.0);
      write_vector(group_->dtype, d_gamma, s2, gamma_request);
    } catch (...) {
      if (data_request != Request::kNull) fill(dtype_, d_data.data(), layout_.size(), kLost);
      const std::vector<double> lost(channels, kLost);
      write_vector(group_->dtype, d_gamma, lost, gamma_request);
      write_vector(group_->dtype, d_beta, lost, beta_request);
      throw;
    }
  }

 private:
  std::vector<double> read(const Array& vector) const {
    return read_vector(group_->dtype, vector.data(), static_cast<size_t>(layout_.channels));
  }

  std::vector<double> read_gamma(const Array& gamma) const {
    return group_->scale ? read(gamma) : std::vector<double>(static_cast<size_t>(layout_.channels), 1.0);
  }

  std::vector<double> inverse_deviation(std::vector<double> variance) const {
    for (double& value : variance) value = 1 / std::sqrt(value + group_->epsilon);
    return variance;
  }

  // γ·invstd, by which both y and dx are scaled.
  std::vector<double> scale_of(const Array& gamma, const std::vector<double>& invstd) const {
    std::vector<double> scale = read_gamma(gamma);
    for (size_t c = 0; c < scale.size(); ++c) scale[c] *= invstd[c];
    return scale;
  }

  Affine affine_of(const std::vector<double>& mean, const std::vector<double>& scale, const Array& beta) const {
    return Affine::rounded(dtype_, mean, scale, read(beta), relu_);
  }

  // In prediction mode every step is rounded as in MXNet's own BatchNorm, which computes in float32 here.
  Affine prediction_affine(const Array& gamma, const Array& beta, const Array& running_mean,
                           const Array& running_var) const {
    Affine affine{read(running_mean), read_gamma(gamma), read(beta), relu_};
    const std::vector<double> variance = read(running_var);
    for (size_t c = 0; c < variance.size(); ++c) {
      if (group_->dtype == DType::kFloat64) {
        affine.scale[c] /= std::sqrt(variance[c] + group_->epsilon);
      } else {
        affine.scale[c] = static_cast<float>(affine.scale[c]) /
                          std::sqrt(static_cast<float>(variance[c]) + static_cast<float>(group_->epsilon));
      }
    }
    return affine;
  }

  void average(const Array& running, const std::vector<double>& now) const {
    std::vector<double> values = read(running);
    for (size_t c = 0; c < values.size(); ++c) {
      values[c] = values[c] * group_->momentum + now[c] * (1 - group_->momentum);
    }
    write_vector(group_->dtype, running, values);
  }

  static std::vector<double> pack(const Moments& local) {
    std::vector<double> message;
    message.reserve(1 + 2 * local.mean.size());
    message.push_back(local.count);
    message.insert(message.end(), local.mean.begin(), local.mean.end());
    message.insert(message.end(), local.m2.begin(), local.m2.end());
    return message;
  }

  static void* data_if_wanted(const Array& array, int request) {
    return static_cast<Request>(request) == Request::kNull ? nullptr : array.data();
  }

  static Moments unpack_and_merge(const std::vector<std::vector<double>>& contributions) {
    std::vector<Moments> parts;
    for (const std::vector<double>& message : contributions) {
      const auto middle = message.begin() + 1 + static_cast<std::ptrdiff_t>((message.size() - 1) / 2);
      parts.push_back({message[0], {message.begin() + 1, middle}, {middle, message.end()}});
    }
    return merge(parts);
  }

  static void remember(double* saved, const std::vector<double>& mean, const std::vector<double>& invstd, double count,
                       uint64_t number, int64_t taking_part) {
    if (!saved) return;
    const size_t channels = mean.size();
    std::memcpy(saved, mean.data(), channels * sizeof(double));
    std::memcpy(saved + channels, invstd.data(), channels * sizeof(double));
    saved[2 * channels] = count;
    saved[2 * channels + 1] = static_cast<double>(number);
    saved[2 * channels + 2] = static_cast<double>(taking_part);
  }

  const std::shared_ptr<Group> group_;
  const std::string device_;
  const Layout layout_;
  const DType dtype_;
  const bool relu_;
  const bool follows_;  // whether there is an input `after`
  const int threads_;

 public:
  void* contexts[3] = {this, this, this};  // of the three callbacks
};

// ---------------------------------------------------------------------------------------------------------------------
// Its properties: what a graph knows before shapes are known

constexpr int kPropertyCallbacks = 8;

struct Property {
  std::shared_ptr<Group> group;
  int axis;
  bool relu;
  bool follows;
  void* contexts[kPropertyCallbacks];

  int inputs() const { return follows ? 4 : 3; }
};

constexpr int kOutputs = 2;

// Runs a callback's body; whatever it throws reaches the user as the text of an MXNetError.
template <typename Body>
int or_error(const Body& body) {
  try {
    body();
    return 1;
  } catch (const std::exception& problem) {
    throw dmlc::Error(problem.what());
  }
}

int list_names(char*** names, const char** list) {
  *names = const_cast<char**>(list);
  return 1;
}
int list_arguments(char*** names, void* state) {
  static const char* list[] = {"data", "gamma", "beta", nullptr};
  static const char* list_and_after[] = {"data", "gamma", "beta", "after", nullptr};
  return list_names(names, static_cast<const Property*>(state)->follows ? list_and_after : list);
}
int list_outputs(char*** names, void*) {
  static const char* list[] = {"out", "saved", nullptr};
  return list_names(names, list);
}
int list_states(char*** names, void*) {
  static const char* list[] = {"running_mean", "running_var", nullptr};
  return list_names(names, list);
}

Layout layout_of(const std::vector<int64_t>& shape, int axis, const std::string& name) {
  const int ndim = static_cast<int>(shape.size());
  const int real_axis = axis < 0 ? axis + ndim : axis;
  if (ndim < 2 || real_axis < 0 || real_axis >= ndim) {
    throw std::invalid_argument("SyncBatchNorm '" + name + "': axis=" + std::to_string(axis) +
                                " does not fit an input of " + std::to_string(ndim) +
                                " axes; it takes 2 or more axes.");
  }
  Layout layout{1, shape[static_cast<size_t>(real_axis)], 1};
  for (int i = 0; i < ndim; ++i) {
    if (i < real_axis) layout.outer *= shape[static_cast<size_t>(i)];
    if (i > real_axis) layout.inner *= shape[static_cast<size_t>(i)];
  }
  return layout;
}

int infer_shape(int num, int* ndims, int** shapes, void* state) {
  return or_error([&] {
    const auto* property = static_cast<Property*>(state);
    const int inputs = property->inputs();
    // MXNet copies the shapes before this thread calls again.
    thread_local int channels[1], saved[1];
    if (ndims[0] <= 0) {  // it also asks before it knows the input
      for (int i = inputs; i < inputs + kOutputs; ++i) ndims[i] = 0;
      return;
    }
    const std::vector<int64_t> shape(shapes[0], shapes[0] + ndims[0]);
    const Layout layout = layout_of(shape, property->axis, property->group->name);
    channels[0] = static_cast<int>(layout.channels);
    saved[0] = 2 * channels[0] + 3;  // and of `after`
    const char* names[] = {"gamma", "beta"};
    for (int i = 1; i < 3; ++i) {
      if (ndims[i] == 1 && shapes[i][0] > 0 && shapes[i][0] != channels[0]) {
        throw std::invalid_argument("SyncBatchNorm '" + property->group->name + "': the input has " +
                                    std::to_string(channels[0]) + " channels, " + names[i - 1] + " has " +
                                    std::to_string(shapes[i][0]) + ".");
      }
    }
    for (int i = 1; i < num; ++i) {
      ndims[i] = 1;
      shapes[i] = channels;
    }
    ndims[inputs] = ndims[0];
    shapes[inputs] = shapes[0];
    shapes[inputs + 1] = saved;
    if (property->follows) shapes[inputs - 1] = saved;
  });
}

const char* dtype_name(int flag) {
  switch (flag) {
    case 0:
      return "float32";
    case 1:
      return "float64";
    case 2:
      return "float16";
    case 12:
      return "bfloat16";
    default:
      return "of a type that is not supported";
  }
}

int infer_type(int num, int* dtypes, void* state) {
  return or_error([&] {
    const auto* property = static_cast<Property*>(state);
    const Group& group = *property->group;
    const int inputs = property->inputs();
    const int parameters = static_cast<int>(group.dtype);
    if (dtypes[0] < 0) dtypes[0] = dtypes[inputs];
    const bool half = dtypes[0] == static_cast<int>(DType::kFloat16) || dtypes[0] == static_cast<int>(DType::kBFloat16);
    if (dtypes[0] >= 0 && dtypes[0] != parameters && !(half && group.dtype == DType::kFloat32)) {
      throw std::invalid_argument("SyncBatchNorm '" + group.name + "': the input is " + dtype_name(dtypes[0]) +
                                  ", parameters and statistics are " + dtype_name(parameters) +
                                  "; call cast() on the net.");
    }
    dtypes[inputs] = dtypes[0];
    dtypes[inputs + 1] = static_cast<int>(DType::kFloat64);
    if (property->follows) dtypes[inputs - 1] = static_cast<int>(DType::kFloat64);
    dtypes[1] = dtypes[2] = parameters;
    for (int i = inputs + kOutputs; i < num; ++i) dtypes[i] = parameters;
  });
}

int declare_backward_dependency(const int* out_grad, const int* in_data, const int* out_data, int* num_deps,
                                int** deps, void*) {
  thread_local int list[5];
  list[0] = out_grad[0];
  list[1] = in_data[0];
  list[2] = in_data[1];
  list[3] = in_data[2];
  list[4] = out_data[1];
  *num_deps = 5;
  *deps = list;
  return 1;
}

int delete_operator(void* state) {
  delete static_cast<Operator*>(state);
  return 1;
}

int run_forward(int, void** arrays, int*, const int* requests, int is_train, void* state) {
  return or_error([&] { static_cast<Operator*>(state)->forward(arrays, requests, is_train != 0); });
}

int run_backward(int, void** arrays, int*, const int* requests, int, void* state) {
  return or_error([&] { static_cast<Operator*>(state)->backward(arrays, requests); });
}

int create_operator(const char* device, int, unsigned** shapes, const int* ndims, const int* dtypes,
                    MXCallbackList* ret, void* state) {
  return or_error([&] {
    const auto* property = static_cast<Property*>(state);
    const std::vector<int64_t> shape(shapes[0], shapes[0] + ndims[0]);
    const Layout layout = layout_of(shape, property->axis, property->group->name);
    if (layout.size() == 0) {
      throw std::invalid_argument("SyncBatchNorm '" + property->group->name + "': the input on " + device +
                                  " is empty. A device without images cannot take part; leave it out with "
                                  "gluon_syncbn.devices(...).");
    }
    if (std::string(device).compare(0, 3, "cpu") != 0) {
      throw std::invalid_argument("SyncBatchNorm '" + property->group->name + "': this graph was made for the compiled " +
                                  "kernels, which run on CPU contexts, and is bound to " + device +
                                  ". Load it with gluon_syncbn.symbol.load(file, backend='portable').");
    }
    auto* created = new Operator(property->group, device, layout, dtype_of(dtypes[0]), property->relu, property->follows);
    static AnyCallback callbacks[] = {any(delete_operator), any(run_forward), any(run_backward)};
    ret->num_callbacks = 3;
    ret->callbacks = callbacks;
    ret->contexts = created->contexts;
  });
}

int delete_property(void* state) {
  delete static_cast<Property*>(state);
  return 1;
}

int create_property(const char*, int num_arguments, const char** keys, const char** values, MXCallbackList* ret) {
  static AnyCallback callbacks[kPropertyCallbacks] = {
      any(delete_property), any(list_arguments),
      any(list_outputs),    any(list_states),
      any(infer_shape),     any(declare_backward_dependency),
      any(create_operator), any(infer_type)};
  // MXNet calls the first of them, which deletes, even if no property could be made.
  static void* no_contexts[kPropertyCallbacks] = {};
  ret->num_callbacks = kPropertyCallbacks;
  ret->callbacks = callbacks;
  ret->contexts = no_contexts;
  return or_error([&] {
    std::map<std::string, std::string> arguments;
    for (int i = 0; i < num_arguments; ++i) arguments[keys[i]] = values[i];
    auto* property = new Property{group_of(arguments["group"]), std::stoi(arguments["axis"]),
                                  arguments["relu"] == "1", arguments["follows"] == "1", {}};
    for (void*& context : property->contexts) context = property;
    ret->contexts = property->contexts;
  });
}

}  // namespace
}  // namespace gluon_syncbn

// ---------------------------------------------------------------------------------------------------------------------
// What Python calls (native.py)

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Registers the operator with the MXNet that `functions` belong to; 0, or MXNet's error code.
EXPORTED int gluon_syncbn_register(const MXNetFunctions* functions, gluon_syncbn::MakeGroup make_described_group) {
  gluon_syncbn::mxnet = *functions;
  gluon_syncbn::make_described_group = make_described_group;
  return functions->custom_op_register(gluon_syncbn::kOperator, gluon_syncbn::create_property);
}

// Makes the group that graphs name by `number`, open to any `num_devices` if `devices` is null; neighbours synchronize in
// circles of `group_size`.
EXPORTED void gluon_syncbn_make_group(int64_t number, const char* name, const char* const* devices, int num_devices,
                                      int group_size, double timeout_seconds, double momentum, double epsilon,
                                      int scale, int dtype, const char* advice) {
  using namespace gluon_syncbn;
  const std::vector<std::string> names(devices, devices + (devices ? num_devices : 0));
  auto group = std::make_shared<Group>(name, names, static_cast<size_t>(num_devices), static_cast<size_t>(group_size),
                                       timeout_seconds, advice);
  group->momentum = momentum;
  group->epsilon = epsilon;
  group->scale = scale != 0;
  group->dtype = dtype_of(dtype);
  std::lock_guard<std::mutex> lock(groups_mutex());
  groups()[number] = group;
}

// Forgets a group; calls that are under way keep it until they are done.
EXPORTED void gluon_syncbn_drop_group(int64_t number) {
  std::lock_guard<std::mutex> lock(gluon_syncbn::groups_mutex());
  gluon_syncbn::groups().erase(number);
}

// What the engine runs for its order's sake alone (_writes.py).
EXPORTED void gluon_syncbn_empty_operator(void*, void*) {}

// Groups that are alive; for tests.
EXPORTED int64_t gluon_syncbn_count_groups() {
  std::lock_guard<std::mutex> lock(gluon_syncbn::groups_mutex());
  return static_cast<int64_t>(gluon_syncbn::groups().size());
}

// Forward rounds of a group in which exactly the devices of list `taking_part` took part.
EXPORTED int64_t gluon_syncbn_rounds(int64_t number, int64_t taking_part) {
  return gluon_syncbn::find_group(number)->rounds(taking_part);
}

// From now on the devices of list `taking_part` meet, and no others; 0 is everyone. No operator may be running.
EXPORTED void gluon_syncbn_take_part(int64_t taking_part, const char* const* devices, int num_devices) {
  gluon_syncbn::Participants& all = gluon_syncbn::participants();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.lists[taking_part] = std::set<std::string>(devices, devices + num_devices);
  all.current = taking_part;
}
