#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/kernels.h"
#include "meeting/all_reduce.h"
#include "mxnet/array.h"
#include "mxnet/operator.h"

namespace gluon_syncbn {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

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

class CpuOperator : public Operator {
 public:
  explicit CpuOperator(Call call) : call_(std::move(call)), threads_(omp_get_max_threads()) {}

  void forward(void** handles, const int* requests, bool is_train) override {
    const ForwardArrays arrays(handles, call_.has_order_token);
    const void* x = arrays.data.data();
    void* y = data_if_requested(arrays.out, requests[0]);
    auto* saved = static_cast<double*>(data_if_requested(arrays.saved, requests[1]));
    if (!is_train) {
      const Statistics running{{}, read(arrays.running_mean), read(arrays.running_var)};
      save_for_backward(saved, running, inverse_deviation(running.variance));
      if (y) normalize(call_.dtype, x, call_.layout, prediction_affine(arrays), y, threads_);
      return;
    }
    try {
      const Moments local = moments(call_.dtype, x, call_.layout, threads_);
      const Statistics all = all_reduce_moments(*call_.group, call_.device, local);
      const std::vector<double> invstd = inverse_deviation(all.variance);
      save_for_backward(saved, all, invstd);
      if (y) {
        normalize(call_.dtype, x, call_.layout, affine_of(all.mean, scale_of(arrays.gamma, invstd), arrays.beta), y,
                  threads_);
      }
      average(arrays.running_mean, all.mean);
      average(arrays.running_var, all.variance);
    } catch (...) {
      if (y) fill(call_.dtype, y, call_.layout.size(), kNaN);
      if (saved) std::fill_n(saved, 2 * call_.layout.channels + ForwardCall::kSize, kNaN);
      throw;
    }
  }

  void backward(void** handles, const int* requests) override {
    const BackwardArrays arrays(handles, call_.has_order_token);
    const auto data_request = static_cast<Request>(requests[0]);
    const auto gamma_request = static_cast<Request>(requests[1]);
    const auto beta_request = static_cast<Request>(requests[2]);
    const size_t channels = static_cast<size_t>(call_.layout.channels);
    const auto* saved = static_cast<const double*>(arrays.saved.data());
    const std::vector<double> mean(saved, saved + channels);
    const std::vector<double> invstd(saved + channels, saved + 2 * channels);
    try {
      const ForwardCall forward_call = ForwardCall::load(*call_.group, call_.device, saved + 2 * channels);
      const std::vector<double> scale = scale_of(arrays.gamma, invstd);
      const Affine affine = affine_of(mean, scale, arrays.beta);
      const void* x = arrays.data.data();
      const void* dy = arrays.d_out.data();
      const GradientSums sums = gradient_sums(call_.dtype, x, dy, call_.layout, affine, threads_);
      // This device's S1 = Σ dy, which is dβ, and S2 = Σ dy·x̂, which is dγ.
      const std::vector<double>& s1 = sums.dy;
      std::vector<double> s2(channels);
      for (size_t c = 0; c < channels; ++c) {
        s2[c] = invstd[c] * (sums.dy_centred[c] - (mean[c] - affine.shift[c]) * s1[c]);
      }
      InputGradient gradient{scale, std::vector<double>(channels, 0.0), std::vector<double>(channels, 0.0)};
      if (forward_call.is_training()) {  // else the statistics did not depend on x
        const double total_count = forward_call.count;
        std::vector<double> message(s1);
        message.insert(message.end(), s2.begin(), s2.end());
        const std::vector<double> total =
            all_reduce_sums(*call_.group, call_.device, std::move(message), forward_call);
        for (size_t c = 0; c < channels; ++c) {
          const double mean_s1 = total[c] / total_count, mean_s2 = total[channels + c] / total_count;
          gradient.slope[c] = -gradient.factor[c] * invstd[c] * mean_s2;
          gradient.constant[c] =
              -gradient.factor[c] * mean_s1 - gradient.slope[c] * (mean[c] - affine.shift[c]);
        }
      }
      if (data_request != Request::kNull) {
        input_gradient(call_.dtype, x, dy, call_.layout, affine, gradient, arrays.d_data.data(),
                       data_request == Request::kAdd, threads_);
      }
      write_vector(call_.group->dtype, arrays.d_beta, s1, beta_request);
      if (!call_.group->scale) s2.assign(channels, 0.0);
      write_vector(call_.group->dtype, arrays.d_gamma, s2, gamma_request);
    } catch (...) {
      if (data_request != Request::kNull) fill(call_.dtype, arrays.d_data.data(), call_.layout.size(), kNaN);
      const std::vector<double> lost(channels, kNaN);
      write_vector(call_.group->dtype, arrays.d_gamma, lost, gamma_request);
      write_vector(call_.group->dtype, arrays.d_beta, lost, beta_request);
      throw;
    }
  }

 private:
  std::vector<double> read(const Array& vector) const {
    return read_vector(call_.group->dtype, vector.data(), static_cast<size_t>(call_.layout.channels));
  }

  std::vector<double> read_gamma(const Array& gamma) const {
    return call_.group->scale ? read(gamma) : std::vector<double>(static_cast<size_t>(call_.layout.channels), 1.0);
  }

  std::vector<double> inverse_deviation(std::vector<double> variance) const {
    for (double& value : variance) value = 1 / std::sqrt(value + call_.group->epsilon);
    return variance;
  }

  // γ·invstd, by which both y and dx are scaled.
  std::vector<double> scale_of(const Array& gamma, const std::vector<double>& invstd) const {
    std::vector<double> scale = read_gamma(gamma);
    for (size_t c = 0; c < scale.size(); ++c) scale[c] *= invstd[c];
    return scale;
  }

  Affine affine_of(const std::vector<double>& mean, const std::vector<double>& scale, const Array& beta) const {
    return Affine::rounded(call_.dtype, mean, scale, read(beta), call_.relu);
  }

  // In prediction mode every step is rounded as in MXNet's own BatchNorm, which computes in float32 here.
  Affine prediction_affine(const ForwardArrays& arrays) const {
    Affine affine{read(arrays.running_mean), read_gamma(arrays.gamma), read(arrays.beta), call_.relu};
    const std::vector<double> variance = read(arrays.running_var);
    for (size_t c = 0; c < variance.size(); ++c) {
      if (call_.group->dtype == DType::kFloat64) {
        affine.scale[c] /= std::sqrt(variance[c] + call_.group->epsilon);
      } else {
        affine.scale[c] = static_cast<float>(affine.scale[c]) /
                          std::sqrt(static_cast<float>(variance[c]) + static_cast<float>(call_.group->epsilon));
      }
    }
    return affine;
  }

  void average(const Array& running, const std::vector<double>& now) const {
    std::vector<double> values = read(running);
    for (size_t c = 0; c < values.size(); ++c) {
      values[c] = values[c] * call_.group->momentum + now[c] * (1 - call_.group->momentum);
    }
    write_vector(call_.group->dtype, running, values);
  }

  static void* data_if_requested(const Array& array, int request) {
    return static_cast<Request>(request) == Request::kNull ? nullptr : array.data();
  }

  static void save_for_backward(double* saved, const Statistics& all, const std::vector<double>& invstd) {
    if (!saved) return;
    const size_t channels = all.mean.size();
    std::memcpy(saved, all.mean.data(), channels * sizeof(double));
    std::memcpy(saved + channels, invstd.data(), channels * sizeof(double));
    all.call.save(saved + 2 * channels);
  }

  const Call call_;
  const int threads_;
};

}  // namespace

std::unique_ptr<Operator> make_cpu_operator(Call call) { return std::make_unique<CpuOperator>(std::move(call)); }

}  // namespace gluon_syncbn
