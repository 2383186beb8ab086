// Arrays of MXNet's, as a callback is handed them; a pass keeps them until it is over.
#pragma once

#include <stdexcept>
#include <string>

#include "mxnet/c_api.h"

namespace gluon_syncbn {

// What MXNet or CUDA could not do. Whoever catches it adds for which layer.
class MXNetFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws MXNetFailure with MXNet's text if `code` is not 0.
inline void check_mxnet(int code, const std::string& what) {
  if (code != 0) throw MXNetFailure(what + ": " + mxnet().last_error());
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

// The memory of an array that is asked for, or null.
inline void* data_if(bool is_wanted, const Array& array) { return is_wanted ? array.data() : nullptr; }
inline void* data_if(Request request, const Array& array) { return data_if(request != Request::kNull, array); }

// Which inputs a graph's node has beside data, gamma and beta.
struct OptionalInputs {
  bool skip;         // the first: what is added before the activation
  bool order_token;  // the last
};

// Handles in the order in which MXNet passes them.
class Handles {
 public:
  explicit Handles(void** first) : next_(first) {}
  void* next() { return *next_++; }
  void* next_if(bool is_there) { return is_there ? next() : nullptr; }

 private:
  void** next_;
};

// What forward gets.
struct ForwardArrays {
  ForwardArrays(Handles handles, OptionalInputs has)
      : skip(handles.next_if(has.skip)),
        data(handles.next()),
        gamma(handles.next()),
        beta(handles.next()),
        order_token(handles.next_if(has.order_token)),
        out(handles.next()),
        saved(handles.next()),
        running_mean(handles.next()),
        running_var(handles.next()) {}

  const Array skip, data, gamma, beta, order_token;
  const Array out, saved;
  const Array running_mean, running_var;
};

// What backward gets: gradients of the outputs, inputs, outputs, gradients of the inputs, auxiliary states. Of inputs
// and outputs only those are there on which the operator has said that it depends.
struct BackwardArrays {
  BackwardArrays(Handles handles, OptionalInputs has)
      : d_out(handles.next()),
        d_saved(handles.next()),
        skip(handles.next_if(has.skip)),
        data(handles.next()),
        gamma(handles.next()),
        beta(handles.next()),
        order_token(handles.next_if(has.order_token)),
        out(handles.next()),
        saved(handles.next()),
        d_skip(handles.next_if(has.skip)),
        d_data(handles.next()),
        d_gamma(handles.next()),
        d_beta(handles.next()),
        d_order_token(handles.next_if(has.order_token)),
        running_mean(handles.next()),
        running_var(handles.next()) {}

  const Array d_out, d_saved;
  const Array skip, data, gamma, beta, order_token;
  const Array out, saved;
  const Array d_skip, d_data, d_gamma, d_beta, d_order_token;  // the last is never requested
  const Array running_mean, running_var;
};

// What MXNet asks of forward for each output.
struct ForwardRequests {
  explicit ForwardRequests(const int* requests)
      : out(static_cast<Request>(requests[0])), saved(static_cast<Request>(requests[1])) {}

  const Request out, saved;
};

// What it asks of backward for each input.
struct BackwardRequests {
  BackwardRequests(const int* requests, OptionalInputs has)
      : skip(has.skip ? static_cast<Request>(requests[0]) : Request::kNull),
        data(static_cast<Request>(requests[has.skip])),
        gamma(static_cast<Request>(requests[has.skip + 1])),
        beta(static_cast<Request>(requests[has.skip + 2])) {}

  const Request skip, data, gamma, beta;
};

}  // namespace gluon_syncbn
