#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/kernels.h"
#include "in_place.h"
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

// What both passes of a call go by, per channel.
struct Parameters {
  std::vector<double> gamma;  // of the whole affine map: with r of Batch Renormalization, and as usable_gamma has it
  std::vector<double> beta;   // with d of Batch Renormalization
  std::vector<double> scale;  // gamma·invstd
};

class CpuOperator : public Operator {
 public:
  explicit CpuOperator(Call call) : Operator(std::move(call)), threads_(omp_get_max_threads()) {}

  void forward(const ForwardArrays& arrays, const int* requests, bool is_train) override {
    const void* x = arrays.data.data();
    const void* skip = call_.has.skip ? arrays.skip.data() : nullptr;
    void* y = data_if_requested(arrays.out, requests[0]);
    auto* saved = static_cast<double*>(data_if_requested(arrays.saved, requests[1]));
    if (!is_train) {
      Saved::plain(read(arrays.running_mean), inverse_deviation(read(arrays.running_var))).save(saved, {});
      // Where nobody asks for `saved`, no backward pass can follow, and γ need not be one that in_place.h can undo.
      const bool in_place = call_.in_place && saved;
      if (y) normalize(call_.dtype, x, skip, call_.layout, prediction_affine(arrays, in_place), y, threads_);
      return;
    }
    ProfiledPass pass(call_.group->name, call_.device, true);
    try {
      begin_forward();
      const Moments local = moments(call_.dtype, x, call_.layout, threads_);
      const Statistics all = all_reduce_moments(*call_.group, call_.device, local, pass);
      Saved now = Saved::plain(all.mean, inverse_deviation(all.variance));
      if (!all.renorm.is_off()) renormalize(arrays, all, now);
      now.save(saved, all.call);
      if (y) {
        const Parameters parameters = parameters_of(arrays.gamma, arrays.beta, now);
        const Affine affine =
            Affine::rounded(call_.dtype, now.mean, parameters.scale, parameters.beta, call_.activation);
        normalize(call_.dtype, x, skip, call_.layout, affine, y, threads_);
      }
      average(arrays.running_mean, all.mean);
      average(arrays.running_var, all.variance);
    } catch (...) {
      if (y) fill(call_.dtype, y, call_.layout.size(), kNaN);
      if (saved) std::fill_n(saved, saved_size(call_.layout.channels), kNaN);
      throw;
    }
  }

  void backward(const BackwardArrays& arrays, const BackwardRequests& requests) override {
    const size_t channels = static_cast<size_t>(call_.layout.channels);
    const auto* saved = static_cast<const double*>(arrays.saved.data());
    ProfiledPass pass(call_.group->name, call_.device, false);
    try {
      begin_backward();
      const ForwardCall forward_call = ForwardCall::load(*call_.group, call_.device, Saved::call(saved, channels));
      const Saved then(saved, channels);
      const Parameters parameters = parameters_of(arrays.gamma, arrays.beta, then);
      const bool in_place = call_.in_place;
      // v − center is x̂ times this.
      const std::vector<double>& center = in_place ? parameters.beta : then.mean;
      std::vector<double> per = then.invstd;
      if (in_place) {
        for (size_t c = 0; c < channels; ++c) per[c] = 1 / parameters.gamma[c];
      }
      const Affine affine = Affine::rounded(call_.dtype, center, parameters.scale, parameters.beta, call_.activation);
      BackwardInput input{in_place ? arrays.out.data() : arrays.data.data(), arrays.d_out.data(),
                          call_.has.skip ? arrays.out.data() : nullptr, in_place};
      const bool add_to_skip = requests.skip == Request::kAdd;
      void* d_skip = requests.skip == Request::kNull ? nullptr : arrays.d_skip.data();
      const GradientSums sums =
          gradient_sums(call_.dtype, input, call_.layout, affine, d_skip, add_to_skip, threads_);
      // This device's S1 = Σ dz and S2 = Σ dz·x̂.
      const std::vector<double>& s1 = sums.dz;
      std::vector<double> s2(channels);
      for (size_t c = 0; c < channels; ++c) {
        s2[c] = per[c] * (sums.dz_centred[c] - (center[c] - affine.shift[c]) * s1[c]);
      }
      InputGradient gradient{parameters.scale, std::vector<double>(channels, 0.0), std::vector<double>(channels, 0.0)};
      if (forward_call.is_training()) {  // else the statistics did not depend on x
        const double total_count = forward_call.count;
        std::vector<double> message(s1);
        message.insert(message.end(), s2.begin(), s2.end());
        const std::vector<double> total =
            all_reduce_sums(*call_.group, call_.device, std::move(message), forward_call, pass);
        for (size_t c = 0; c < channels; ++c) {
          const double mean_s1 = total[c] / total_count, mean_s2 = total[channels + c] / total_count;
          gradient.slope[c] = -gradient.factor[c] * per[c] * mean_s2;
          gradient.constant[c] =
              -gradient.factor[c] * mean_s1 - gradient.slope[c] * (center[c] - affine.shift[c]);
        }
      }
      if (requests.data != Request::kNull) {
        Affine passed = affine;
        if (d_skip && !add_to_skip) {  // dz lies there now
          input = {input.values, d_skip};
          passed.activation = {};
        }
        input_gradient(call_.dtype, input, call_.layout, passed, gradient, arrays.d_data.data(),
                       requests.data == Request::kAdd, threads_);
      }
      write_vector(call_.group->dtype, arrays.d_beta, s1, requests.beta);
      for (size_t c = 0; c < channels; ++c) s2[c] = call_.group->scale ? then.r[c] * s2[c] + then.d[c] * s1[c] : 0;
      write_vector(call_.group->dtype, arrays.d_gamma, s2, requests.gamma);
    } catch (...) {
      if (requests.data != Request::kNull) fill(call_.dtype, arrays.d_data.data(), call_.layout.size(), kNaN);
      if (requests.skip != Request::kNull) fill(call_.dtype, arrays.d_skip.data(), call_.layout.size(), kNaN);
      const std::vector<double> lost(channels, kNaN);
      write_vector(call_.group->dtype, arrays.d_gamma, lost, requests.gamma);
      write_vector(call_.group->dtype, arrays.d_beta, lost, requests.beta);
      throw;
    }
  }

 private:
  // What forward leaves for backward: four vectors, and the call.
  struct Saved {
    std::vector<double> mean, invstd;
    std::vector<double> r, d;  // of Batch Renormalization

    static Saved plain(std::vector<double> mean, std::vector<double> invstd) {
      const size_t channels = mean.size();
      return {std::move(mean), std::move(invstd), std::vector<double>(channels, 1.0),
              std::vector<double>(channels, 0.0)};
    }

    Saved(std::vector<double> mean, std::vector<double> invstd, std::vector<double> r, std::vector<double> d)
        : mean(std::move(mean)), invstd(std::move(invstd)), r(std::move(r)), d(std::move(d)) {}
    Saved(const double* saved, size_t channels)
        : mean(saved, saved + channels),
          invstd(saved + channels, saved + 2 * channels),
          r(saved + 2 * channels, saved + 3 * channels),
          d(saved + 3 * channels, saved + 4 * channels) {}

    static const double* call(const double* saved, size_t channels) { return saved + 4 * channels; }

    void save(double* to, const ForwardCall& call) const {
      if (!to) return;
      for (const std::vector<double>* vector : {&mean, &invstd, &r, &d}) {
        to = std::copy(vector->begin(), vector->end(), to);
      }
      call.save(to);
    }
  };

  void renormalize(const ForwardArrays& arrays, const Statistics& all, Saved& now) const {
    RenormVectors made(all.renorm, call_.group->epsilon, all.mean, all.variance, read(arrays.running_mean),
                       read(arrays.running_var));
    now.r = std::move(made.r);
    now.d = std::move(made.d);
  }

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

  // The same in both passes of a call.
  Parameters parameters_of(const Array& gamma, const Array& beta, const Saved& saved) const {
    Parameters all{read_gamma(gamma), read(beta), saved.invstd};
    for (size_t c = 0; c < all.gamma.size(); ++c) {
      all.beta[c] += all.gamma[c] * saved.d[c];
      all.gamma[c] *= saved.r[c];
      if (call_.in_place) all.gamma[c] = usable(all.gamma[c], all.beta[c], c);
      all.scale[c] *= all.gamma[c];
    }
    return all;
  }

  // `usable_gamma`, and the user is told of it.
  double usable(double gamma, double beta, size_t channel) const {
    const double taken = usable_gamma(call_.dtype, gamma, beta);
    if (taken != gamma && call_.group->is_first_warning()) {
      warn_of_gamma(*call_.group, call_.device, static_cast<int64_t>(channel), taken);
    }
    return taken;
  }

  // In prediction mode every step is rounded as in MXNet's own BatchNorm, which computes in float32 here.
  Affine prediction_affine(const ForwardArrays& arrays, bool in_place) const {
    Affine affine{read(arrays.running_mean), read_gamma(arrays.gamma), read(arrays.beta), call_.activation};
    const std::vector<double> variance = read(arrays.running_var);
    for (size_t c = 0; c < variance.size(); ++c) {
      if (in_place) affine.scale[c] = usable(affine.scale[c], affine.bias[c], c);
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

  const int threads_;
};

}  // namespace

std::unique_ptr<Operator> make_cpu_operator(Call call) { return std::make_unique<CpuOperator>(std::move(call)); }

}  // namespace gluon_syncbn
