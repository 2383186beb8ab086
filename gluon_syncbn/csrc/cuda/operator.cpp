// A call on a GPU. The kernels do all arithmetic on activations and parameters; the host only merges messages.
//
//   forward    moments → [message, pinned] → meet → [mean, variance, pinned] → normalize, running statistics
//   backward   gradient sums, dγ, dβ → [message] → meet → [ΣS1, ΣS2] → input gradient
//
// Where the time of a direction goes, beside the two kernels' own (each step is one arrow above):
//
//   1. To the GPU: this thread hands the first kernel to MXNet's engine, whose thread for the GPU wakes up and launches
//      it: inputs are ready when MXNet calls us, so nothing else is waited for.
//   2. Back: the kernel's last block writes 2C numbers and a ticket over the bus into pinned memory, where this thread
//      sees it (Scratch::wait). It is the one time that a direction waits for the GPU.
//   3. The rendezvous: two threads that arrive together meet in about 1 µs (benchmarks/layer.py); else it is waiting for
//      the slower device, which every synchronized layer must. The merge in float64 is some ns per channel and device.
//   4. To the GPU again, as 1. Blocks read the two numbers of each of their channels over the bus.
//
// The callback returns with the second kernel in the engine's hands: MXNet lets nobody read the outputs before the
// kernels that name them are done. MXNet synchronizes its stream behind each kernel that it launches (rtc.cc), on its
// own thread; nobody here waits for that.

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "meeting/all_reduce.h"
#include "mxnet/array.h"
#include "cuda/program.h"
#include "cuda/scratch.h"
#include "mxnet/operator.h"

namespace gluon_syncbn {
namespace {

int is_requested(int request) { return static_cast<Request>(request) != Request::kNull; }

class GpuOperator : public Operator {
 public:
  explicit GpuOperator(Call call)
      : call_(std::move(call)), program_(GpuProgram::of(call_.dtype)), device_(std::stoi(call_.device.substr(4))) {}

  void forward(void** handles, const int* requests, bool is_train) override {
    const ForwardArrays arrays(handles, call_.has_order_token);
    try {
      is_train ? train(arrays, requests) : predict(arrays, requests);
    } catch (...) {
      fill_nan(program_, requests[0], arrays.out, call_.layout.size());
      rethrow("forward pass");
    }
  }

  void backward(void** handles, const int* requests) override {
    const BackwardArrays arrays(handles, call_.has_order_token);
    const int data_request = requests[0], gamma_request = requests[1], beta_request = requests[2];
    try {
      send_back(arrays, data_request, gamma_request, beta_request);
    } catch (...) {
      fill_nan(program_, data_request, arrays.d_data, call_.layout.size());
      GpuProgram& parameters = GpuProgram::of(call_.group->dtype);
      fill_nan(parameters, gamma_request, arrays.d_gamma, call_.layout.channels);
      fill_nan(parameters, beta_request, arrays.d_beta, call_.layout.channels);
      rethrow("backward pass");
    }
  }

 private:
  void train(const ForwardArrays& arrays, const int* requests) {
    const Launch launch = launch_forward(arrays, requests);
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, launch, call_.layout);
    const double* numbers = find_moments(program_, device_, launch, call_.layout, arrays.data, *scratch);
    const Moments local{call_.layout.count(), {numbers, numbers + channels()},
                        {numbers + channels(), numbers + 2 * channels()}};
    const Statistics all = all_reduce_moments(*call_.group, call_.device, local);
    scratch->put(all.mean, all.variance);
    normalize(arrays, requests, launch, *scratch, all.call);
    Scratch::give_back(scratch);
  }

  void predict(const ForwardArrays& arrays, const int* requests) {
    const Launch launch = launch_forward(arrays, requests);
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, launch, call_.layout);
    normalize(arrays, requests, launch, *scratch, {});
    Scratch::give_back(scratch);
  }

  void send_back(const BackwardArrays& arrays, int data_request, int gamma_request, int beta_request) {
    const Array& d_data = is_requested(data_request) ? arrays.d_data : arrays.data;
    const Launch launch =
        launch_for(call_.dtype, call_.layout, {arrays.data.data(), arrays.d_out.data(), d_data.data()});
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, launch, call_.layout);
    const double ticket = Scratch::next_ticket();
    Arguments arguments;
    arguments.array(arrays.data).array(arrays.d_out).array(arrays.gamma).array(arrays.beta).array(arrays.saved);
    arguments.array(scratch->partials).array(scratch->counters).array(scratch->message);
    arguments.array(arrays.d_gamma).array(arrays.d_beta).layout(call_.layout).integer(launch.aligned).real(ticket);
    arguments.integer(call_.group->scale).integer(call_.relu).integer(gamma_request).integer(beta_request);
    program_.launch("gradient_sums", device_, launch, arguments);
    const double* numbers = scratch->wait(ticket);
    const double* behind = numbers + 2 * channels();
    const ForwardCall forward_call = ForwardCall::load(*call_.group, call_.device, behind);
    if (forward_call.is_training()) {  // else the statistics did not depend on x
      const std::vector<double> total =
          all_reduce_sums(*call_.group, call_.device, {numbers, behind}, forward_call);
      scratch->put(total, {});
    }
    if (is_requested(data_request)) input_gradient(arrays, launch, *scratch, data_request);
    Scratch::give_back(scratch);
  }

  Launch launch_forward(const ForwardArrays& arrays, const int* requests) const {
    const Array& out = is_requested(requests[0]) ? arrays.out : arrays.data;
    return launch_for(call_.dtype, call_.layout, {arrays.data.data(), out.data()});
  }

  // Runs while another exception propagates; its own failure is ignored.
  void fill_nan(GpuProgram& program, int request, const Array& values, int64_t size) const {
    try {
      if (is_requested(request)) program.fill_nan(device_, values, size);
    } catch (const MXNetFailure&) {
    }
  }

  // What is being thrown, with the layer's name if it has none yet.
  [[noreturn]] void rethrow(const std::string& direction) const {
    try {
      throw;
    } catch (const MXNetFailure& problem) {
      throw MXNetFailure("SyncBatchNorm '" + call_.group->name + "': " + direction + " on " + call_.device + ": " +
                         problem.what());
    }
  }

  void normalize(const ForwardArrays& arrays, const int* requests, const Launch& launch, const Scratch& scratch,
                 const ForwardCall& forward_call) {
    Arguments arguments;
    arguments.array(arrays.data).array(arrays.out).array(arrays.gamma).array(arrays.beta);
    arguments.array(arrays.running_mean).array(arrays.running_var).array(arrays.saved).array(scratch.message);
    arguments.layout(call_.layout).integer(launch.aligned);
    arguments.real(call_.group->epsilon).real(call_.group->momentum).real(forward_call.count);
    arguments.real(static_cast<double>(forward_call.round_id)).real(static_cast<double>(forward_call.active_set));
    arguments.integer(forward_call.is_training()).integer(call_.group->scale).integer(call_.relu);
    arguments.integer(is_requested(requests[0])).integer(is_requested(requests[1]));
    program_.launch("normalize", device_, launch, arguments);
  }

  void input_gradient(const BackwardArrays& arrays, const Launch& launch, const Scratch& scratch, int request) {
    Arguments arguments;
    arguments.array(arrays.data).array(arrays.d_out).array(arrays.d_data).array(arrays.gamma).array(arrays.beta);
    arguments.array(arrays.saved).array(scratch.message).layout(call_.layout).integer(launch.aligned);
    arguments.integer(call_.group->scale).integer(call_.relu);
    arguments.integer(static_cast<Request>(request) == Request::kAdd);
    program_.launch("input_gradient", device_, launch, arguments);
  }

  int64_t channels() const { return call_.layout.channels; }

  const Call call_;
  GpuProgram& program_;
  const int device_;
};

}  // namespace

std::unique_ptr<Operator> make_gpu_operator(Call call) {
  if (call.dtype == DType::kBFloat16) {
    throw std::invalid_argument("SyncBatchNorm '" + call.group->name + "': bfloat16 on " + call.device +
                                " is not supported; use float16.");
  }
  const std::string name = call.group->name;
  try {
    return std::make_unique<GpuOperator>(std::move(call));
  } catch (const MXNetFailure& problem) {
    throw MXNetFailure("SyncBatchNorm '" + name + "': " + problem.what() + " Use backend='portable'.");
  }
}

}  // namespace gluon_syncbn
