// A call on a GPU. The kernels do all arithmetic on activations and parameters; the host only merges messages.
//
//   forward    moments → [message, pinned] → meet → [mean, variance, pinned] → normalize, running statistics
//   backward   gradient sums, dγ, dβ → [message] → meet → [ΣS1, ΣS2] → input gradient
//
// Where the time of a direction goes, beside the two kernels' own (each step is one arrow above):
//
//   1. To the GPU: this thread launches the first kernel, on a stream of its own; inputs are ready when MXNet calls
//      (scratch.h says why).
//   2. Back: the last block of each tile of channels writes its numbers over the bus into pinned memory, where this
//      thread sees them.
//   3. The rendezvous: two threads that arrive together meet in some µs (benchmarks/layer.py); else it is waiting for
//      the slower device, which every synchronized layer must. The merge in float64 is some ns per channel and device.
//   4. To the GPU again, as 1. Each block reads the numbers of its channels over the bus, while it reads the tensor.
//   5. The end: this thread watches the stream, and returns when the second kernel has ended; MXNet's engine goes on.
//
// All waits end with the layer's timeout, and an error that names the kernel or the devices that are missing.

#include "cuda/scratch.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "in_place.h"
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
    named("forward pass", [&] {
      const GpuContext context(device_);
      try {
        is_train ? train(*arrays, requests) : predict(*arrays, requests);
        end_forward();
      } catch (const CudaFailure&) {
        throw;  // nothing can be filled then
      } catch (...) {
        fill_nan({{data_if(requests.out, arrays->out), bytes_of(call_.dtype) * call_.layout.size()}});
        throw;
      }
    });
  }

  void backward(std::shared_ptr<const BackwardArrays> handed, BackwardRequests requests) override {
    const BackwardArrays& arrays = *handed;
    named("backward pass", [&] {
      const GpuContext context(device_);
      try {
        send_back(arrays, requests);
      } catch (const CudaFailure&) {
        throw;
      } catch (...) {
        const int64_t values = bytes_of(call_.dtype) * call_.layout.size();
        const int64_t vector = bytes_of(call_.group->dtype) * channels();
        fill_nan({{data_if(requests.data, arrays.d_data), values},
                  {data_if(requests.skip, arrays.d_skip), values},
                  {data_if(requests.gamma, arrays.d_gamma), vector},
                  {data_if(requests.beta, arrays.d_beta), vector}});
        throw;
      }
    });
  }

 private:
  KernelKind kind() const { return {call_.dtype, call_.activation.kind, call_.has.skip, call_.in_place}; }
  int64_t channels() const { return call_.layout.channels; }
  double timeout() const { return call_.group->timeout_seconds; }

  void train(const ForwardArrays& arrays, ForwardRequests requests) {
    begin_forward();
    Meeting meeting(*call_.group, call_.device, true);
    meeting.begin_pass();
    const bool has_renorm = call_.group->has_renorm;
    const Launch launch = launch_forward(arrays, requests);
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, call_.layout, launch);
    const double* numbers =
        find_moments(program_, launch, call_.layout, arrays.data.data(), data_if(has_renorm, arrays.running_mean),
                     data_if(has_renorm, arrays.running_var), *scratch, timeout());
    const Moments local{call_.layout.count(), vector_at(numbers, 0), vector_at(numbers, 1)};
    std::vector<double> running_mean, running_var;
    if (has_renorm) {
      running_mean = vector_at(numbers, 2);
      running_var = vector_at(numbers, 3);
    }
    call_.group->connect();
    wait_until_done([&](Meeting::Done done) { meeting.bring_moments(local, std::move(done)); });
    const Statistics all = meeting.statistics();
    if (all.renorm.is_off()) {
      scratch->put({&all.mean, &all.variance});
    } else {
      const RenormVectors made(all.renorm, call_.group->epsilon, all.mean, all.variance, running_mean, running_var);
      scratch->put({&all.mean, &all.variance, &made.r, &made.d});
    }
    normalize(arrays, requests, launch, *scratch, all.call, !all.renorm.is_off());
  }

  void predict(const ForwardArrays& arrays, ForwardRequests requests) {
    const Launch launch = launch_forward(arrays, requests);
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, call_.layout, launch);
    normalize(arrays, requests, launch, *scratch, {}, false);
  }

  Launch launch_forward(const ForwardArrays& arrays, ForwardRequests requests) const {
    std::vector<const void*> tensors{arrays.data.data()};
    if (requests.out != Request::kNull) tensors.push_back(arrays.out.data());
    if (call_.has.skip) tensors.push_back(arrays.skip.data());
    return launch_for(call_.dtype, call_.layout, tensors, program_.multiprocessors());
  }

  void normalize(const ForwardArrays& arrays, ForwardRequests requests, const Launch& launch, Scratch& scratch,
                 const ForwardCall& forward_call, bool renorm) {
    NormalizeArguments arguments{};
    arguments.shape = shape_of(call_.layout, launch);
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
    std::vector<const void*> tensors{input.x, input.dy};
    for (const void* tensor : {input.y, static_cast<const void*>(input.dx), static_cast<const void*>(d_residual)}) {
      if (tensor) tensors.push_back(tensor);
    }
    const Launch launch = launch_for(call_.dtype, call_.layout, tensors, program_.multiprocessors());
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, call_.layout, launch);

    GradientSumsArguments sums{};
    sums.shape = shape_of(call_.layout, launch);
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
    // The gradient of the residual is that of z, if nothing else was added to it.
    if (has_residual && (requests.skip == Request::kWrite || requests.skip == Request::kWriteInplace)) {
      input.dy = d_residual;
      input.y = nullptr;
    }
    input.shape = shape_of(call_.layout, launch);
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

  // Number `which` of the vectors of C numbers.
  std::vector<double> vector_at(const double* numbers, int64_t which) const {
    return {numbers + which * channels(), numbers + (which + 1) * channels()};
  }

  // Runs while another exception propagates; its own failure is ignored.
  void fill_nan(std::initializer_list<std::pair<void*, int64_t>> arrays) const {
    try {
      const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, call_.layout);
      for (const auto& [values, bytes] : arrays) {
        if (values) scratch->fill_nan(values, static_cast<size_t>(bytes));
      }
      scratch->wait(timeout());
    } catch (const std::exception&) {
    }
  }

  // Runs a pass; what CUDA or MXNet could not do is thrown with the layer's name.
  template <typename Pass>
  void named(const std::string& direction, const Pass& pass) const {
    const auto fail = [&](const std::exception& problem) {
      throw std::runtime_error("SyncBatchNorm '" + call_.group->name + "': " + direction + " on " + call_.device +
                               ": " + problem.what());
    };
    try {
      pass();
    } catch (const CudaFailure& problem) {
      fail(problem);
    } catch (const MXNetFailure& problem) {
      fail(problem);
    }
  }

  const int device_;
  const GpuProgram& program_;
};

}  // namespace

std::shared_ptr<Operator> make_gpu_operator(Call call) {
  if (call.dtype == DType::kBFloat16) {
    throw std::invalid_argument("SyncBatchNorm '" + call.group->name + "': bfloat16 on " + call.device +
                                " is not supported; use float16.");
  }
  const std::string name = call.group->name;
  try {
    return std::make_shared<GpuOperator>(std::move(call));
  } catch (const CudaFailure& problem) {
    throw std::runtime_error("SyncBatchNorm '" + name + "': " + problem.what() + " Use backend='portable'.");
  }
}

}  // namespace gluon_syncbn
