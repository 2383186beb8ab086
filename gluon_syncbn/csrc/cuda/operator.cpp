// A call on a GPU. The kernels do all arithmetic on activations and parameters; the host only merges messages.
//
//   forward    moments → [message, pinned] → meet → [mean, variance, pinned] → normalize, running statistics
//   backward   gradient sums, dγ, dβ → [message] → meet → [ΣS1, ΣS2] → input gradient
//
// Beside the two kernels, the arrows take the time of a pass. scratch.h has the ways to the GPU and back, over the bus:
// the last block of each tile of channels writes its numbers, and each block of the second kernel reads the numbers of
// its channels while it reads the tensor. In the rendezvous two threads that arrive together meet in some µs
// (benchmarks/layer.py); the merge in float64 takes some ns per channel and device.
//
// All waits end with the layer's timeout, and an error that names the kernel or the missing devices.

#include "cuda/scratch.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "least_gamma.h"
#include "meeting/all_reduce.h"
#include "mxnet/array.h"
#include "mxnet/operator.h"

namespace gluon_syncbn {
namespace {

class GpuOperator : public Operator {
 public:
  explicit GpuOperator(Call call)
      : Operator(std::move(call)), device_(number_of(call_.device)), program_(GpuProgram::of(kind(), device_)) {
    for (const std::string& other : call_.group->devices()) {
      if (other.compare(0, 4, "gpu(") == 0) GpuProgram::of(kind(), number_of(other));
    }
  }

  void forward(std::shared_ptr<const ForwardArrays> arrays, ForwardRequests requests, bool is_train) override {
    const auto pass = [&] {
      is_train ? train(*arrays, requests) : predict(*arrays, requests);
      end_forward();
    };
    run("forward pass", pass, [&]() -> Memory { return {{data_if(requests.out, arrays->out), tensor_bytes()}}; });
  }

  void backward(std::shared_ptr<const BackwardArrays> handed, BackwardRequests requests) override {
    const BackwardArrays& arrays = *handed;
    const int64_t vector_bytes = bytes_of(call_.group->dtype) * channels();
    const auto gradients = [&]() -> Memory {
      return {{data_if(requests.data, arrays.d_data), tensor_bytes()},
              {data_if(requests.skip, arrays.d_skip), tensor_bytes()},
              {data_if(requests.gamma, arrays.d_gamma), vector_bytes},
              {data_if(requests.beta, arrays.d_beta), vector_bytes}};
    };
    run("backward pass", [&] { send_back(arrays, requests); }, gradients);
  }

 private:
  using Memory = std::vector<std::pair<void*, int64_t>>;  // addresses, which may be null, and bytes

  KernelKind kind() const { return {call_.dtype, call_.activation.kind, call_.has.skip, call_.in_place}; }
  int64_t channels() const { return call_.layout.channels; }
  int64_t tensor_bytes() const { return bytes_of(call_.dtype) * call_.layout.size(); }
  double timeout() const { return call_.group->timeout_seconds; }

  void train(const ForwardArrays& arrays, ForwardRequests requests) {
    begin_forward();
    Meeting meeting(*call_.group, call_.device, true);
    meeting.begin_pass();
    const RenormLimits& limits = call_.group->limits;
    const bool renorm = !limits.is_off();
    const Launch launch = launch_forward(arrays, requests);
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, call_.layout, launch);
    const double* numbers =
        find_moments(program_, launch, call_.layout, arrays.data.data(), data_if(renorm, arrays.running_mean),
                     data_if(renorm, arrays.running_var), *scratch, timeout());
    const Moments local{call_.layout.count(), vector_at(numbers, 0), vector_at(numbers, 1)};
    call_.group->connect();
    wait_until_done([&](Meeting::Done done) { meeting.bring_moments(local, std::move(done)); });
    const Statistics all = meeting.statistics();
    if (!renorm) {
      scratch->put({&all.mean, &all.variance});
    } else {
      const RenormVectors made = renorm_vectors(limits, call_.group->epsilon, all.mean, all.variance,
                                                vector_at(numbers, 2), vector_at(numbers, 3));
      scratch->put({&all.mean, &all.variance, &made.r, &made.d});
    }
    normalize(arrays, requests, launch, *scratch, all.call, renorm);
  }

  void predict(const ForwardArrays& arrays, ForwardRequests requests) {
    const Launch launch = launch_forward(arrays, requests);
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, call_.layout, launch);
    normalize(arrays, requests, launch, *scratch, {}, false);
  }

  Launch launch_forward(const ForwardArrays& arrays, ForwardRequests requests) const {
    return launch_over({arrays.data.data(), data_if(requests.out, arrays.out), data_if(call_.has.skip, arrays.skip)});
  }

  // The launch for tensors at these addresses, of which some may be null.
  Launch launch_over(std::vector<const void*> tensors) const {
    tensors.erase(std::remove(tensors.begin(), tensors.end(), nullptr), tensors.end());
    return launch_for(call_.dtype, call_.layout, tensors, program_.multiprocessors());
  }

  void normalize(const ForwardArrays& arrays, ForwardRequests requests, const Launch& launch, Scratch& scratch,
                 const ForwardCall& forward_call, bool renorm) {
    NormalizeArguments arguments{};
    arguments.shape = launch.shape;
    arguments.x = arrays.data.data();
    arguments.residual = data_if(call_.has.skip, arrays.skip);
    arguments.y = data_if(requests.out, arrays.out);
    arguments.gamma = data_if(call_.group->scale, arrays.gamma);
    arguments.beta = arrays.beta.data();
    arguments.running_mean = arrays.running_mean.data();
    arguments.running_var = arrays.running_var.data();
    arguments.saved = static_cast<double*>(data_if(requests.saved, arrays.saved));
    arguments.memory = scratch.memory();
    arguments.epsilon = call_.group->epsilon;
    arguments.momentum = call_.group->momentum;
    arguments.slope = call_.activation.slope;
    arguments.count = forward_call.count;
    arguments.round_id = static_cast<double>(forward_call.round_id);
    arguments.active_set = static_cast<double>(forward_call.active_set);
    arguments.training = forward_call.is_training();
    arguments.renorm = renorm;
    scratch.launch(program_, Kernel::kNormalize, launch, &arguments);
    scratch.wait(timeout());
  }

  void send_back(const BackwardArrays& arrays, const BackwardRequests& requests) {
    begin_backward();
    Meeting meeting(*call_.group, call_.device, false);
    meeting.begin_pass();
    const bool has_residual = call_.has.skip;
    InputGradientArguments input{};
    input.x = (call_.in_place ? arrays.out : arrays.data).data();
    input.dy = arrays.d_out.data();
    input.y = data_if(has_residual, arrays.out);
    input.dx = data_if(requests.data, arrays.d_data);
    input.gamma = data_if(call_.group->scale, arrays.gamma);
    input.beta = arrays.beta.data();
    input.saved = static_cast<const double*>(arrays.saved.data());
    input.slope = call_.activation.slope;
    input.add = requests.data == Request::kAdd;
    void* const d_residual = data_if(requests.skip, arrays.d_skip);
    const Launch launch = launch_over({input.x, input.dy, input.y, input.dx, d_residual});
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, call_.layout, launch);

    GradientSumsArguments sums{};
    sums.shape = launch.shape;
    sums.x = input.x;
    sums.dy = input.dy;
    sums.y = input.y;
    sums.d_residual = d_residual;
    sums.gamma = input.gamma;
    sums.beta = input.beta;
    sums.saved = input.saved;
    sums.d_gamma = data_if(requests.gamma, arrays.d_gamma);
    sums.d_beta = data_if(requests.beta, arrays.d_beta);
    sums.memory = scratch->memory();
    sums.slope = input.slope;
    sums.residual_request = static_cast<int>(requests.skip);
    sums.gamma_request = static_cast<int>(requests.gamma);
    sums.beta_request = static_cast<int>(requests.beta);
    const int64_t told = 2 * channels() + ForwardCall::kSize + (call_.in_place ? channels() : 0);
    scratch->launch(program_, Kernel::kGradientSums, launch, &sums, told);
    const double* numbers = scratch->wait_for_message(timeout());
    const double* rest = numbers + 2 * channels();
    const ForwardCall forward_call = ForwardCall::load(*call_.group, call_.device, rest);
    if (call_.in_place) warn_of_moved_gamma(rest + ForwardCall::kSize);
    if (forward_call.is_training()) {  // else the statistics did not depend on x
      const std::vector<double> local(numbers, rest);
      wait_until_done([&](Meeting::Done done) { meeting.bring_sums(local, forward_call, std::move(done)); });
      const std::vector<double> total = meeting.sums();
      scratch->put({&total});
    }
    if (!input.dx) return scratch->wait(timeout());
    // If it was not added to another gradient, the gradient of the residual is also the gradient of z.
    if (has_residual && (requests.skip == Request::kWrite || requests.skip == Request::kWriteInplace)) {
      input.dy = d_residual;
      input.y = nullptr;
    }
    input.shape = launch.shape;
    input.memory = scratch->memory();
    scratch->launch(program_, Kernel::kInputGradient, launch, &input);
    scratch->wait(timeout());
  }

  void warn_of_moved_gamma(const double* moved) const {
    for (int64_t c = 0; c < channels(); ++c) {
      if (moved[c] != 0 && call_.group->is_first_warning()) {
        return warn_of_gamma(*call_.group, call_.device, c, least_gamma(call_.dtype));
      }
    }
  }

  // Copies number `which` of the vectors of C numbers.
  std::vector<double> vector_at(const double* numbers, int64_t which) const {
    return {numbers + which * channels(), numbers + (which + 1) * channels()};
  }

  // Runs a pass in the context of the GPU. If the pass fails, fills `outputs()` with NaN, unless CUDA has failed. Adds
  // the layer's name to errors of CUDA and MXNet.
  template <typename Pass, typename Outputs>
  void run(const std::string& direction, const Pass& pass, const Outputs& outputs) const {
    const auto fail = [&](const std::exception& problem) {
      throw std::runtime_error(call_.group->where() + direction + " on " + call_.device + ": " + problem.what());
    };
    try {
      const GpuContext context(device_);
      try {
        pass();
      } catch (const CudaFailure&) {
        throw;
      } catch (...) {
        fill_nan(outputs());
        throw;
      }
    } catch (const CudaFailure& problem) {
      fail(problem);
    } catch (const MXNetFailure& problem) {
      fail(problem);
    }
  }

  // Runs while another exception propagates, so it ignores its own failure.
  void fill_nan(const Memory& outputs) const {
    try {
      const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, call_.layout);
      for (const auto& [values, bytes] : outputs) {
        if (values) scratch->fill_nan(values, static_cast<size_t>(bytes));
      }
      scratch->wait(timeout());
    } catch (const std::exception&) {
    }
  }

  const int device_;
  const GpuProgram& program_;
};

}  // namespace

std::shared_ptr<Operator> make_gpu_operator(Call call) {
  if (call.dtype == DType::kBFloat16) {
    throw std::invalid_argument(call.group->where() + "bfloat16 on " + call.device + " is not supported; use float16.");
  }
  const std::string where = call.group->where();
  try {
    return std::make_shared<GpuOperator>(std::move(call));
  } catch (const CudaFailure& problem) {
    throw std::runtime_error(where + problem.what() + " Use backend='portable'.");
  }
}

}  // namespace gluon_syncbn
