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

int wanted(int request) { return static_cast<Request>(request) != Request::kNull; }

class GpuOperator : public Operator {
 public:
  explicit GpuOperator(Call call)
      : call_(std::move(call)), program_(GpuProgram::of(call_.dtype)), device_(std::stoi(call_.device.substr(4))) {}

  void forward(void** handles, const int* requests, bool is_train) override {
    const ForwardArrays arrays(handles, call_.follows);
    try {
      is_train ? train(arrays, requests) : predict(arrays, requests);
    } catch (...) {
      lose(program_, requests[0], arrays.out, call_.layout.size());
      rethrow("forward pass");
    }
  }

  void backward(void** handles, const int* requests) override {
    const BackwardArrays arrays(handles, call_.follows);
    const int data_request = requests[0], gamma_request = requests[1], beta_request = requests[2];
    try {
      send_back(arrays, data_request, gamma_request, beta_request);
    } catch (...) {
      lose(program_, data_request, arrays.d_data, call_.layout.size());
      GpuProgram& parameters = GpuProgram::of(call_.group->dtype);
      lose(parameters, gamma_request, arrays.d_gamma, call_.layout.channels);
      lose(parameters, beta_request, arrays.d_beta, call_.layout.channels);
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
    normalize(arrays, requests, launch, *scratch, all, true);
    Scratch::give_back(scratch);
  }

  void predict(const ForwardArrays& arrays, const int* requests) {
    const Launch launch = launch_forward(arrays, requests);
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, launch, call_.layout);
    normalize(arrays, requests, launch, *scratch, {0, {}, {}, 0, kPrediction}, false);
    Scratch::give_back(scratch);
  }

  void send_back(const BackwardArrays& arrays, int data_request, int gamma_request, int beta_request) {
    const Array& d_data = wanted(data_request) ? arrays.d_data : arrays.data;
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
    const double* left = numbers + 2 * channels();  // by the forward pass: count, number, taking_part
    if (was_training(*call_.group, call_.device, left)) {  // else the statistics did not depend on x
      const std::vector<double> total =
          all_reduce_sums(*call_.group, call_.device, {numbers, left}, static_cast<uint64_t>(left[1]),
                          static_cast<int64_t>(left[2]));
      scratch->put(total, {});
    }
    if (wanted(data_request)) input_gradient(arrays, launch, *scratch, data_request);
    Scratch::give_back(scratch);
  }

  Launch launch_forward(const ForwardArrays& arrays, const int* requests) const {
    const Array& out = wanted(requests[0]) ? arrays.out : arrays.data;
    return launch_for(call_.dtype, call_.layout, {arrays.data.data(), out.data()});
  }

  // While an error is under way, which says more than that this did not work either.
  void lose(GpuProgram& program, int request, const Array& values, int64_t size) const {
    try {
      if (wanted(request)) program.lose(device_, values, size);
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
                 const Statistics& all, bool training) {
    Arguments arguments;
    arguments.array(arrays.data).array(arrays.out).array(arrays.gamma).array(arrays.beta);
    arguments.array(arrays.running_mean).array(arrays.running_var).array(arrays.saved).array(scratch.message);
    arguments.layout(call_.layout).integer(launch.aligned);
    arguments.real(call_.group->epsilon).real(call_.group->momentum).real(all.count);
    arguments.real(static_cast<double>(all.number)).real(static_cast<double>(all.taking_part));
    arguments.integer(training).integer(call_.group->scale).integer(call_.relu);
    arguments.integer(wanted(requests[0])).integer(wanted(requests[1]));
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
