// Arrays of MXNet's, as a callback is handed them.
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

// What forward gets; `order_token` is there only in some graphs.
struct ForwardArrays {
  ForwardArrays(void** handles, bool has_order_token)
      : data(handles[0]),
        gamma(handles[1]),
        beta(handles[2]),
        order_token(has_order_token ? handles[3] : nullptr),
        out(handles[3 + has_order_token]),
        saved(handles[4 + has_order_token]),
        running_mean(handles[5 + has_order_token]),
        running_var(handles[6 + has_order_token]) {}

  const Array data, gamma, beta, order_token;
  const Array out, saved;
  const Array running_mean, running_var;
};

// What backward gets: gradients of the outputs, inputs, outputs, gradients of the inputs, auxiliary states.
struct BackwardArrays {
  BackwardArrays(void** handles, bool has_order_token)
      : d_out(handles[0]),
        d_saved(handles[1]),
        data(handles[2]),
        gamma(handles[3]),
        beta(handles[4]),
        order_token(has_order_token ? handles[5] : nullptr),
        out(handles[5 + has_order_token]),
        saved(handles[6 + has_order_token]),
        d_data(handles[7 + has_order_token]),
        d_gamma(handles[8 + has_order_token]),
        d_beta(handles[9 + has_order_token]),
        d_order_token(has_order_token ? handles[10 + has_order_token] : nullptr),
        running_mean(handles[10 + 2 * has_order_token]),
        running_var(handles[11 + 2 * has_order_token]) {}

  const Array d_out, d_saved;
  const Array data, gamma, beta, order_token;
  const Array out, saved;
  const Array d_data, d_gamma, d_beta, d_order_token;  // the last is never requested
  const Array running_mean, running_var;
};

}  // namespace gluon_syncbn
