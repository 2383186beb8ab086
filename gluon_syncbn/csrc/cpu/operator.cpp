#include <omp.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "cpu/kernels.h"
#include "least_gamma.h"
#include "meeting/all_reduce.h"
#include "mxnet/array.h"
#include "mxnet/operator.h"
#include "mxnet/pass.h"

namespace gluon_syncbn {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// The affine map of both passes of a call, per channel.
struct Parameters {
  std::vector<double> gamma;  // with r of Batch Renormalization, and as clamp_gamma returns it
  std::vector<double> beta;   // with d of Batch Renormalization
  std::vector<double> scale;  // gamma·invstd
};

// The forward pass leaves these four vectors, and its call, for the backward pass.
struct Saved {
  std::vector<double> mean, invstd;
  std::vector<double> r, d;  // of Batch Renormalization

  static Saved load(const double* saved, int64_t channels) {
    const auto vector_at = [&](int64_t i) {
      return std::vector<double>(saved + i * channels, saved + (i + 1) * channels);
    };
    return {vector_at(0), vector_at(1), vector_at(2), vector_at(3)};
  }

  void save(double* to, const ForwardCall& call) const {
    if (!to) return;
    for (const std::vector<double>* vector : {&mean, &invstd, &r, &d}) {
      to = std::copy(vector->begin(), vector->end(), to);
    }
    call.save(to);
  }
};

class CpuOperator : public Operator {
 public:
  explicit CpuOperator(Call call) : Operator(std::move(call)), threads_(omp_get_max_threads()) {}

  void forward(std::shared_ptr<const ForwardArrays> arrays, ForwardRequests requests, bool is_train) override {
    if (!is_train) return predict(*arrays, requests);
    const auto pass = std::make_shared<ForwardPass>(self<CpuOperator>(), arrays, requests);
    try {
      if (!step().has_failed()) call_.group->connect();
    } catch (...) {
      pass->lose();
      throw;
    }
    run(pass, number_of(call_.device), arrays->out.handle());
  }

  void backward(std::shared_ptr<const BackwardArrays> arrays, BackwardRequests requests) override {
    run(std::make_shared<BackwardPass>(self<CpuOperator>(), arrays, requests), number_of(call_.device),
        arrays->d_out.handle());
  }

 private:
  // A pass of a training step. Its meeting refers to the operator's call.
  class CpuPass : public EnginePass {
   protected:
    CpuPass(std::shared_ptr<CpuOperator> op, bool is_forward)
        : op_(std::move(op)), call_(op_->call_), meeting_(*call_.group, call_.device, is_forward) {}

    const std::shared_ptr<CpuOperator> op_;
    const Call& call_;
    Meeting meeting_;
  };

  class ForwardPass : public CpuPass {
   public:
    ForwardPass(std::shared_ptr<CpuOperator> op, std::shared_ptr<const ForwardArrays> arrays, ForwardRequests requests)
        : CpuPass(std::move(op), true), arrays_(std::move(arrays)), requests_(requests) {}

    void bring(std::function<void()> done) override {
      meeting_.begin_pass();
      op_->begin_forward();
      meeting_.bring_moments(moments(call_.dtype, arrays_->data.data(), call_.layout, op_->threads_), std::move(done));
    }

    void finish() override {
      const Statistics all = meeting_.statistics();
      Saved now = op_->plain(all.mean, all.variance);
      if (!call_.group->limits.is_off()) {
        RenormVectors made = renorm_vectors(call_.group->limits, call_.group->epsilon, all.mean, all.variance,
                                            op_->read(arrays_->running_mean), op_->read(arrays_->running_var));
        now.r = std::move(made.r);
        now.d = std::move(made.d);
      }
      now.save(saved(), all.call);
      if (void* y = data_if(requests_.out, arrays_->out)) {
        const Parameters parameters = op_->parameters_of(arrays_->gamma, arrays_->beta, now);
        const Affine affine =
            Affine::rounded(call_.dtype, now.mean, parameters.scale, parameters.beta, call_.activation);
        normalize(call_.dtype, arrays_->data.data(), data_if(call_.has.skip, arrays_->skip), call_.layout, affine, y,
                  op_->threads_);
      }
      op_->average(arrays_->running_mean, all.mean);
      op_->average(arrays_->running_var, all.variance);
      op_->end_forward();
      meeting_.end_pass();
    }

    void lose() override {
      if (void* y = data_if(requests_.out, arrays_->out)) fill_nan(call_.dtype, y, call_.layout.size());
      if (saved()) std::fill_n(saved(), saved_size(call_.layout.channels), kNaN);
    }

   private:
    double* saved() const { return static_cast<double*>(data_if(requests_.saved, arrays_->saved)); }

    const std::shared_ptr<const ForwardArrays> arrays_;
    const ForwardRequests requests_;
  };

  class BackwardPass : public CpuPass {
   public:
    BackwardPass(std::shared_ptr<CpuOperator> op, std::shared_ptr<const BackwardArrays> arrays,
                 BackwardRequests requests)
        : CpuPass(std::move(op), false), arrays_(std::move(arrays)), requests_(requests) {}

    void bring(std::function<void()> done) override {
      meeting_.begin_pass();
      const size_t channels = static_cast<size_t>(call_.layout.channels);
      const auto* saved = static_cast<const double*>(arrays_->saved.data());
      op_->begin_backward();
      forward_call_ = ForwardCall::load(*call_.group, call_.device, saved + 4 * channels);
      then_ = Saved::load(saved, call_.layout.channels);
      parameters_ = op_->parameters_of(arrays_->gamma, arrays_->beta, then_);
      const bool in_place = call_.in_place;
      center_ = in_place ? parameters_.beta : then_.mean;
      xhat_scale_ = in_place ? parameters_.gamma : then_.invstd;
      if (in_place) {
        for (double& scale : xhat_scale_) scale = 1 / scale;
      }
      affine_ = Affine::rounded(call_.dtype, center_, parameters_.scale, parameters_.beta, call_.activation);
      input_ = {in_place ? arrays_->out.data() : arrays_->data.data(), arrays_->d_out.data(),
                data_if(call_.has.skip, arrays_->out), in_place};
      const bool add_to_skip = requests_.skip == Request::kAdd;
      void* d_skip = data_if(requests_.skip, arrays_->d_skip);
      GradientSums sums = gradient_sums(call_.dtype, input_, call_.layout, affine_, d_skip, add_to_skip, op_->threads_);
      s1_ = std::move(sums.dz);
      s2_.resize(channels);
      for (size_t c = 0; c < channels; ++c) {
        s2_[c] = xhat_scale_[c] * (sums.dz_centred[c] - (center_[c] - affine_.shift[c]) * s1_[c]);
      }
      if (!forward_call_.is_training()) return done();  // the statistics did not depend on x
      std::vector<double> message(s1_);
      message.insert(message.end(), s2_.begin(), s2_.end());
      meeting_.bring_sums(std::move(message), forward_call_, std::move(done));
    }

    void finish() override {
      const size_t channels = static_cast<size_t>(call_.layout.channels);
      InputGradient gradient{std::vector<double>(channels, 0.0), std::vector<double>(channels, 0.0)};
      if (forward_call_.is_training()) {
        const std::vector<double> total = meeting_.sums();
        for (size_t c = 0; c < channels; ++c) {
          const double mean_s1 = total[c] / forward_call_.count, mean_s2 = total[channels + c] / forward_call_.count;
          gradient.slope[c] = -parameters_.scale[c] * xhat_scale_[c] * mean_s2;
          gradient.constant[c] = -parameters_.scale[c] * mean_s1 - gradient.slope[c] * (center_[c] - affine_.shift[c]);
        }
      }
      if (requests_.data != Request::kNull) {
        if (requests_.skip != Request::kNull && requests_.skip != Request::kAdd) {  // dz lies there now
          input_ = {input_.values, arrays_->d_skip.data()};
          affine_.activation = {};
        }
        input_gradient(call_.dtype, input_, call_.layout, affine_, gradient, arrays_->d_data.data(),
                       requests_.data == Request::kAdd, op_->threads_);
      }
      op_->write(arrays_->d_beta, s1_, requests_.beta);
      for (size_t c = 0; c < channels; ++c) {
        s2_[c] = call_.group->scale ? then_.r[c] * s2_[c] + then_.d[c] * s1_[c] : 0;
      }
      op_->write(arrays_->d_gamma, s2_, requests_.gamma);
      meeting_.end_pass();
    }

    void lose() override {
      const int64_t size = call_.layout.size();
      if (requests_.data != Request::kNull) fill_nan(call_.dtype, arrays_->d_data.data(), size);
      if (requests_.skip != Request::kNull) fill_nan(call_.dtype, arrays_->d_skip.data(), size);
      const std::vector<double> lost(static_cast<size_t>(call_.layout.channels), kNaN);
      op_->write(arrays_->d_gamma, lost, requests_.gamma);
      op_->write(arrays_->d_beta, lost, requests_.beta);
    }

   private:
    const std::shared_ptr<const BackwardArrays> arrays_;
    const BackwardRequests requests_;
    ForwardCall forward_call_;
    Saved then_;  // by the forward pass
    Parameters parameters_;
    std::vector<double> center_, xhat_scale_;  // (v − center)·xhat_scale is x̂
    Affine affine_;
    BackwardInput input_{};
    std::vector<double> s1_, s2_;  // this device's Σ dz and Σ dz·x̂
  };

  void predict(const ForwardArrays& arrays, ForwardRequests requests) {
    auto* saved = static_cast<double*>(data_if(requests.saved, arrays.saved));
    plain(read(arrays.running_mean), read(arrays.running_var)).save(saved, {});
    // Where `saved` is not requested, no backward pass can follow, and least_gamma.h need not be able to undo γ.
    const bool in_place = call_.in_place && saved;
    if (void* y = data_if(requests.out, arrays.out)) {
      normalize(call_.dtype, arrays.data.data(), data_if(call_.has.skip, arrays.skip), call_.layout,
                prediction_affine(arrays, in_place), y, threads_);
    }
    end_forward();
  }

  // Without Batch Renormalization.
  Saved plain(std::vector<double> mean, std::vector<double> variance) const {
    for (double& value : variance) value = 1 / std::sqrt(value + call_.group->epsilon);
    const size_t channels = mean.size();
    return {std::move(mean), std::move(variance), std::vector<double>(channels, 1), std::vector<double>(channels, 0)};
  }

  std::vector<double> read(const Array& vector) const {
    const auto read_from = [&](const auto* from) { return std::vector<double>(from, from + call_.layout.channels); };
    if (call_.group->dtype == DType::kFloat64) return read_from(static_cast<const double*>(vector.data()));
    return read_from(static_cast<const float*>(vector.data()));
  }

  template <typename T>
  static void write_to(T* to, const std::vector<double>& values, bool add) {
    for (size_t i = 0; i < values.size(); ++i) to[i] = static_cast<T>(add ? to[i] + values[i] : values[i]);
  }

  void write(const Array& vector, const std::vector<double>& values, Request request) const {
    if (request == Request::kNull) return;  // there may be no memory then
    const bool add = request == Request::kAdd;
    if (call_.group->dtype == DType::kFloat64) return write_to(static_cast<double*>(vector.data()), values, add);
    write_to(static_cast<float*>(vector.data()), values, add);
  }

  std::vector<double> read_gamma(const Array& gamma) const {
    return call_.group->scale ? read(gamma) : std::vector<double>(static_cast<size_t>(call_.layout.channels), 1.0);
  }

  // Gives the same numbers in both passes of a call.
  Parameters parameters_of(const Array& gamma, const Array& beta, const Saved& saved) const {
    Parameters all{read_gamma(gamma), read(beta), saved.invstd};
    for (size_t c = 0; c < all.gamma.size(); ++c) {
      all.beta[c] += all.gamma[c] * saved.d[c];
      all.gamma[c] *= saved.r[c];
      if (call_.in_place) all.gamma[c] = clamped(all.gamma[c], all.beta[c], c);
      all.scale[c] *= all.gamma[c];
    }
    return all;
  }

  // `clamp_gamma`; warns the user.
  double clamped(double gamma, double beta, size_t channel) const {
    const double taken = clamp_gamma(call_.dtype, gamma, beta);
    if (taken != gamma && call_.group->is_first_warning()) {
      warn_of_gamma(*call_.group, call_.device, static_cast<int64_t>(channel), taken);
    }
    return taken;
  }

  // Rounds every step of prediction mode as MXNet's own BatchNorm does, which computes in float32 here.
  Affine prediction_affine(const ForwardArrays& arrays, bool in_place) const {
    Affine affine{read(arrays.running_mean), read_gamma(arrays.gamma), read(arrays.beta), call_.activation};
    const std::vector<double> variance = read(arrays.running_var);
    for (size_t c = 0; c < variance.size(); ++c) {
      if (in_place) affine.scale[c] = clamped(affine.scale[c], affine.bias[c], c);
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
    write(running, values, Request::kWrite);
  }

  const int threads_;
};

}  // namespace

std::shared_ptr<Operator> make_cpu_operator(Call call) { return std::make_shared<CpuOperator>(std::move(call)); }

}  // namespace gluon_syncbn
