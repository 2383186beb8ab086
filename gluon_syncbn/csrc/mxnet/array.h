// MXNet's arrays, as it hands them to a callback; a pass keeps them until it is over.
#pragma once

#include <stdexcept>
#include <string>

#include "mxnet/c_api.h"

namespace gluon_syncbn {

// A failure of MXNet or CUDA. The catcher adds the name of the layer.
class MXNetFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws MXNetFailure with MXNet's text if `code` is not 0.
inline void check_mxnet(int code, const std::string& failure) {
  if (code != 0) throw MXNetFailure(failure + ": " + mxnet().last_error());
}

// One of the handles that MXNet passes to a callback, which must free all of them, used or not; or none, if null.
class Array {
 public:
  explicit Array(void* handle) : handle_(handle) {}
  ~Array() {
    if (handle_) mxnet().array_free(handle_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  void* handle() const { return handle_; }

  void* data() const {
    void* address = nullptr;
    if (mxnet().array_data(handle_, &address) != 0 || address == nullptr) {
      throw std::runtime_error("gluon_syncbn: MXNet did not give access to an array");
    }
    return address;
  }

 private:
  void* handle_;
};

// The memory of an array that is wanted, or null.
inline void* data_if(bool is_wanted, const Array& array) { return is_wanted ? array.data() : nullptr; }
inline void* data_if(Request request, const Array& array) { return data_if(request != Request::kNull, array); }

// The inputs that a graph's node may have beside data, gamma and beta.
struct OptionalInputs {
  bool skip;         // the first: a tensor that is added before the activation
  bool order_token;  // the last
};

// Handles in the order in which MXNet passes them; the members of a subclass take one after the other.
class Handles {
 public:
  Handles(void** first, OptionalInputs has) : next_(first), has_(has) {}

 protected:
  void* next() { return *next_++; }
  void* next_skip() { return has_.skip ? next() : nullptr; }
  void* next_order_token() { return has_.order_token ? next() : nullptr; }

 private:
  void** next_;
  const OptionalInputs has_;
};

// The arrays of a forward pass: inputs, outputs, auxiliary states.
struct ForwardArrays : private Handles {
  using Handles::Handles;

  const Array skip{next_skip()}, data{next()}, gamma{next()}, beta{next()}, order_token{next_order_token()};
  const Array out{next()}, saved{next()};
  const Array running_mean{next()}, running_var{next()};
};

// The arrays of a backward pass: gradients of the outputs, inputs, outputs, gradients of the inputs, auxiliary states.
// Of the inputs and outputs only those are there on which the operator has declared that it depends.
struct BackwardArrays : private Handles {
  using Handles::Handles;

  const Array d_out{next()}, d_saved{next()};
  const Array skip{next_skip()}, data{next()}, gamma{next()}, beta{next()}, order_token{next_order_token()};
  const Array out{next()}, saved{next()};
  const Array d_skip{next_skip()}, d_data{next()}, d_gamma{next()}, d_beta{next()};
  const Array d_order_token{next_order_token()};  // never requested
  const Array running_mean{next()}, running_var{next()};
};

// How MXNet wants each output of a forward pass.
struct ForwardRequests {
  explicit ForwardRequests(const int* requests)
      : out(static_cast<Request>(requests[0])), saved(static_cast<Request>(requests[1])) {}

  const Request out, saved;
};

// How it wants the gradient of each input.
struct BackwardRequests {
  BackwardRequests(const int* requests, OptionalInputs has)
      : skip(has.skip ? static_cast<Request>(requests[0]) : Request::kNull),
        data(static_cast<Request>(requests[has.skip])),
        gamma(static_cast<Request>(requests[has.skip + 1])),
        beta(static_cast<Request>(requests[has.skip + 2])) {}

  const Request skip, data, gamma, beta;
};

}  // namespace gluon_syncbn
