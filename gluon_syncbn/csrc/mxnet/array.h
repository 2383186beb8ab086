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

// What forward gets; `after` is there only in some graphs.
struct ForwardArrays {
  ForwardArrays(void** handles, bool follows)
      : data(handles[0]),
        gamma(handles[1]),
        beta(handles[2]),
        after(follows ? handles[3] : nullptr),
        out(handles[3 + follows]),
        saved(handles[4 + follows]),
        running_mean(handles[5 + follows]),
        running_var(handles[6 + follows]) {}

  const Array data, gamma, beta, after;
  const Array out, saved;
  const Array running_mean, running_var;
};

// What backward gets: gradients of the outputs, inputs, outputs, gradients of the inputs, auxiliary states.
struct BackwardArrays {
  BackwardArrays(void** handles, bool follows)
      : d_out(handles[0]),
        d_saved(handles[1]),
        data(handles[2]),
        gamma(handles[3]),
        beta(handles[4]),
        after(follows ? handles[5] : nullptr),
        out(handles[5 + follows]),
        saved(handles[6 + follows]),
        d_data(handles[7 + follows]),
        d_gamma(handles[8 + follows]),
        d_beta(handles[9 + follows]),
        d_after(follows ? handles[10 + follows] : nullptr),
        running_mean(handles[10 + 2 * follows]),
        running_var(handles[11 + 2 * follows]) {}

  const Array d_out, d_saved;
  const Array data, gamma, beta, after;
  const Array out, saved;
  const Array d_data, d_gamma, d_beta, d_after;  // the last is never wanted
  const Array running_mean, running_var;
};

}  // namespace gluon_syncbn
