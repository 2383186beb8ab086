// One layer's call on one device, with shapes known: what MXNet's callbacks run. A CPU and a GPU each have their own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "meeting/group.h"
#include "tensor.h"

namespace gluon_syncbn {

// What a graph's node knows of its call.
struct Call {
  std::shared_ptr<Group> group;
  std::string device;  // as MXNet prints it: "gpu(0)"
  Layout layout;
  DType dtype;
  bool relu;
  bool has_order_token;  // whether there is an input `after`
};

class Operator {
 public:
  virtual ~Operator() = default;

  // Both free `handles`. What they throw is the error that the user sees.
  virtual void forward(void** handles, const int* requests, bool is_train) = 0;
  virtual void backward(void** handles, const int* requests) = 0;

  void* contexts[3] = {this, this, this};  // of the three callbacks
};

std::unique_ptr<Operator> make_cpu_operator(Call call);

// Throws std::invalid_argument for what kernels.cu does not take, MXNetFailure where it cannot be compiled.
std::unique_ptr<Operator> make_gpu_operator(Call call);

}  // namespace gluon_syncbn
