// One layer's call on one device, with shapes known: what MXNet's callbacks run. A CPU and a GPU each have their own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "activation.h"
#include "meeting/all_reduce.h"
#include "meeting/group.h"
#include "mxnet/array.h"
#include "tensor.h"

namespace gluon_syncbn {

// What a graph's node knows of its call.
struct Call {
  std::shared_ptr<Group> group;
  std::string device;  // as MXNet prints it: "gpu(0)"
  Layout layout;
  DType dtype;
  Activation activation;
  bool in_place;  // whether the backward pass goes by y, and x may be gone
  OptionalInputs has;
};

// How many numbers `saved` has: mean, invstd, and r and d of Batch Renormalization per channel, and ForwardCall.
inline int64_t saved_size(int64_t channels) { return 4 * channels + ForwardCall::kSize; }

// Tells the user that a layer which works in place takes another γ than its own; see in_place.h.
void warn_of_gamma(const Group& group, const std::string& device, int64_t channel, double usable);

class Operator {
 public:
  explicit Operator(Call call) : call_(std::move(call)) {}
  virtual ~Operator() = default;
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;

  // What they throw fails the step, and is the error that the user sees.
  virtual void forward(const ForwardArrays& arrays, const int* requests, bool is_train) = 0;
  virtual void backward(const BackwardArrays& arrays, const BackwardRequests& requests) = 0;

  const Call& call() const { return call_; }

  void* contexts[3] = {this, this, this};  // of the three callbacks
  uint64_t forward_generation = 0;         // of the step in which the last forward pass was completed; 0 if none was

 protected:
  // Throw if the step has failed, the second also if the forward pass of this call was not run in this step.
  void begin_forward() const;
  void begin_backward() const;

  const Call call_;
};

std::unique_ptr<Operator> make_cpu_operator(Call call);

// Throws std::invalid_argument for what kernels.cu does not take, MXNetFailure where it cannot be compiled.
std::unique_ptr<Operator> make_gpu_operator(Call call);

}  // namespace gluon_syncbn
