// The operator of one layer's call on one device, with shapes known. MXNet's callbacks run or begin its passes. A CPU
// and a GPU have different ones.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "meeting/all_reduce.h"
#include "meeting/group.h"
#include "mxnet/array.h"
#include "tensor.h"

namespace gluon_syncbn {

// The facts that a graph's node knows of its call.
struct Call {
  std::shared_ptr<Group> group;
  std::string device;  // as MXNet prints it: "gpu(0)"
  Layout layout;
  DType dtype;
  Activation activation;
  bool in_place;  // whether the backward pass recovers x̂ from y, and x may be gone
  OptionalInputs has;
};

// How many numbers `saved` has: mean, invstd, and r and d of Batch Renormalization per channel, and ForwardCall.
inline int64_t saved_size(int64_t channels) { return 4 * channels + ForwardCall::kSize; }

// The number of a device: 1 of "gpu(1)".
inline int number_of(const std::string& device) { return std::stoi(device.substr(device.find('(') + 1)); }

// Warns the user that a layer which works in place has taken another γ than its own (least_gamma.h).
void warn_of_gamma(const Group& group, const std::string& device, int64_t channel, double used);

// MXNet owns it from `keep` until `let_go`, and so does each pass that is under way.
class Operator : public std::enable_shared_from_this<Operator> {
 public:
  explicit Operator(Call call) : call_(std::move(call)) {}
  virtual ~Operator() = default;
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;

  // Their exceptions fail the step, if it is in training, and are the errors that the user sees. When they return, the
  // pass may still be under way.
  virtual void forward(std::shared_ptr<const ForwardArrays> arrays, ForwardRequests requests, bool is_train) = 0;
  virtual void backward(std::shared_ptr<const BackwardArrays> arrays, BackwardRequests requests) = 0;

  const Call& call() const { return call_; }

  void keep() { mxnets_ = shared_from_this(); }
  void let_go() { std::exchange(mxnets_, nullptr); }

  void* contexts[3] = {this, this, this};  // of the three callbacks

  // Generation of the step in which the last forward pass was completed; 0 if none was.
  uint64_t forward_generation = 0;

 protected:
  // Throw if the step has failed, the second also if the forward pass of this call was not run in this step.
  void begin_forward() const;
  void begin_backward() const;

  // The forward pass is complete.
  void end_forward();

  template <typename Kind>
  std::shared_ptr<Kind> self() {
    return std::static_pointer_cast<Kind>(shared_from_this());
  }

  const Call call_;

 private:
  void throw_if_failed(const std::string& direction) const;

  std::shared_ptr<Operator> mxnets_;
};

// The group that the attribute of a graph's node names (groups.cpp).
std::shared_ptr<Group> group_of(const std::string& reference);

std::shared_ptr<Operator> make_cpu_operator(Call call);

// Compiles and loads the kernels for all GPUs of the group, at the first call of this kind of layer. Throws
// std::invalid_argument for types that kernels.cu does not take, std::runtime_error where it cannot be compiled.
std::shared_ptr<Operator> make_gpu_operator(Call call);

}  // namespace gluon_syncbn
