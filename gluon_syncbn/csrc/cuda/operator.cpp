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
//   3. The rendezvous: two threads that arrive together meet in some µs (benchmarks/layer.py); else it is waiting for
//      the slower device, which every synchronized layer must. The merge in float64 is some ns per channel and device.
//   4. To the GPU again, as 1. Blocks read the two numbers of each of their channels over the bus.
//
// The callback returns with the second kernel in the engine's hands: MXNet lets nobody read the outputs before the
// kernels that name them are done. MXNet synchronizes its stream after each kernel that it launches (rtc.cc), on its
// own thread; nobody here waits for that.

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "in_place.h"
#include "meeting/all_reduce.h"
#include "mxnet/array.h"
#include "cuda/program.h"
#include "cuda/scratch.h"
#include "mxnet/operator.h"

namespace gluon_syncbn {
namespace {

bool is_requested(Request request) { return request != Request::kNull; }

class GpuOperator : public Operator {
 public:
  explicit GpuOperator(Call call)
      : Operator(std::move(call)), program_(GpuProgram::of(call_.dtype)), device_(std::stoi(call_.device.substr(4))) {}

  void forward(std::shared_ptr<const ForwardArrays> arrays, ForwardRequests requests, bool is_train) override {
    try {
      is_train ? train(*arrays, requests) : predict(*arrays, requests);
      end_forward();
    } catch (...) {
      fill_nan(program_, requests.out, arrays->out, call_.layout.size());
      rethrow("forward pass");
    }
  }

  void backward(std::shared_ptr<const BackwardArrays> handed, BackwardRequests requests) override {
    const BackwardArrays& arrays = *handed;
    try {
      send_back(arrays, requests);
    } catch (...) {
      fill_nan(program_, requests.data, arrays.d_data, call_.layout.size());
      fill_nan(program_, requests.skip, arrays.d_skip, call_.layout.size());
      GpuProgram& parameters = GpuProgram::of(call_.group->dtype);
      fill_nan(parameters, requests.gamma, arrays.d_gamma, call_.layout.channels);
      fill_nan(parameters, requests.beta, arrays.d_beta, call_.layout.channels);
      rethrow("backward pass");
    }
  }

 private:
  static int number(Request request) { return static_cast<int>(request); }

  void train(const ForwardArrays& arrays, ForwardRequests requests) {
    begin_forward();
    Meeting meeting(*call_.group, call_.device, true);
    meeting.begin_pass();
    const Launch launch = launch_forward(arrays, requests);
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, launch, call_.layout);
    const bool wants_running = call_.group->has_renorm();
    const double* numbers = find_moments(program_, device_, launch, call_.layout, arrays.data, arrays.running_mean,
                                         arrays.running_var, wants_running, *scratch);
    const Moments local{call_.layout.count(), vector_at(numbers, 0), vector_at(numbers, 1)};
    std::vector<double> running_mean, running_var;
    if (wants_running) {
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
    Scratch::give_back(scratch);
  }

  void predict(const ForwardArrays& arrays, ForwardRequests requests) {
    const Launch launch = launch_forward(arrays, requests);
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, launch, call_.layout);
    normalize(arrays, requests, launch, *scratch, {}, false);
    Scratch::give_back(scratch);
  }

  void send_back(const BackwardArrays& arrays, const BackwardRequests& requests) {
    begin_backward();
    Meeting meeting(*call_.group, call_.device, false);
    meeting.begin_pass();
    const bool has_residual = call_.has.skip, in_place = call_.in_place;
    const Array& values = in_place ? arrays.out : arrays.data;
    const Array& d_data = is_requested(requests.data) ? arrays.d_data : values;
    const Array& d_residual = is_requested(requests.skip) ? arrays.d_skip : d_data;
    const void *v = values.data(), *out = has_residual ? arrays.out.data() : v;
    const Launch launch =
        launch_for(call_.dtype, call_.layout, {v, arrays.d_out.data(), d_data.data(), out, d_residual.data()});
    const std::shared_ptr<Scratch> scratch = Scratch::lease(device_, launch, call_.layout);
    const double ticket = Scratch::next_ticket();
    GradientSumsArguments arguments{};
    arguments.x = &values;
    arguments.dy = &arrays.d_out;
    arguments.gamma = &arrays.gamma;
    arguments.beta = &arrays.beta;
    arguments.saved = &arrays.saved;
    arguments.partials = &scratch->partials;
    arguments.counters = &scratch->counters;
    arguments.message = &scratch->message;
    arguments.d_gamma = &arrays.d_gamma;
    arguments.d_beta = &arrays.d_beta;
    arguments.ticket = ticket;
    arguments.has_scale = call_.group->scale;
    arguments.gamma_request = number(requests.gamma);
    arguments.beta_request = number(requests.beta);
    if (has_residual) {
      arguments.y = &arrays.out;
      arguments.d_residual = &d_residual;
      arguments.residual_request = number(requests.skip);
      program_.gradient_sums_residual(device_, launch, call_.layout, arguments);
    } else {
      set_epilogue(arguments, call_.activation.kind);
      program_.gradient_sums(device_, launch, call_.layout, arguments);
    }
    const double* numbers = scratch->wait(ticket);
    const double* rest = numbers + 2 * channels();
    const ForwardCall forward_call = ForwardCall::load(*call_.group, call_.device, rest);
    if (in_place) warn_of_moved_gamma(rest + ForwardCall::kSize);
    if (forward_call.is_training()) {  // else the statistics did not depend on x
      const std::vector<double> local(numbers, rest);
      wait_until_done([&](Meeting::Done done) { meeting.bring_sums(local, forward_call, std::move(done)); });
      const std::vector<double> total = meeting.sums();
      scratch->put({&total});
    }
    if (is_requested(requests.data)) {
      const bool is_there = has_residual && requests.skip != Request::kNull && requests.skip != Request::kAdd;
      input_gradient(arrays, values, is_there ? arrays.d_skip : arrays.d_out, has_residual && !is_there, launch,
                     *scratch, requests.data);
    }
    Scratch::give_back(scratch);
  }

  void warn_of_moved_gamma(const double* moved) const {
    for (int64_t c = 0; c < channels(); ++c) {
      if (moved[c] != 0 && call_.group->is_first_warning()) {
        return warn_of_gamma(*call_.group, call_.device, c, least_gamma(call_.dtype));
      }
    }
  }

  Launch launch_forward(const ForwardArrays& arrays, ForwardRequests requests) const {
    const Array& out = is_requested(requests.out) ? arrays.out : arrays.data;
    const Array& skip = call_.has.skip ? arrays.skip : arrays.data;
    return launch_for(call_.dtype, call_.layout, {arrays.data.data(), out.data(), skip.data()});
  }

  // Number `which` of the vectors of C numbers.
  std::vector<double> vector_at(const double* numbers, int64_t which) const {
    return {numbers + which * channels(), numbers + (which + 1) * channels()};
  }

  // Runs while another exception propagates; its own failure is ignored.
  void fill_nan(GpuProgram& program, Request request, const Array& values, int64_t size) const {
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

  void normalize(const ForwardArrays& arrays, ForwardRequests requests, const Launch& launch, const Scratch& scratch,
                 const ForwardCall& forward_call, bool renorm) {
    NormalizeArguments arguments{};
    arguments.x = &arrays.data;
    arguments.y = &arrays.out;
    arguments.gamma = &arrays.gamma;
    arguments.beta = &arrays.beta;
    arguments.running_mean = &arrays.running_mean;
    arguments.running_var = &arrays.running_var;
    arguments.saved = &arrays.saved;
    arguments.message = &scratch.message;
    arguments.epsilon = call_.group->epsilon;
    arguments.momentum = call_.group->momentum;
    arguments.count = forward_call.count;
    arguments.round_id = static_cast<double>(forward_call.round_id);
    arguments.active_set = static_cast<double>(forward_call.active_set);
    set_epilogue(arguments, call_.activation.kind);
    arguments.training = forward_call.is_training();
    arguments.has_scale = call_.group->scale;
    arguments.renorm = renorm;
    arguments.wants_y = is_requested(requests.out);
    arguments.wants_saved = is_requested(requests.saved);
    arguments.residual = &arrays.skip;
    if (call_.has.skip) {
      program_.normalize_residual(device_, launch, call_.layout, arguments);
    } else {
      program_.normalize(device_, launch, call_.layout, arguments);
    }
  }

  // With `masks`, d_out has yet to pass the ReLU after the residual; without, it has passed it where there is a
  // residual.
  void input_gradient(const BackwardArrays& arrays, const Array& values, const Array& d_out, bool masks,
                      const Launch& launch, const Scratch& scratch, Request request) {
    InputGradientArguments arguments{};
    arguments.x = &values;
    arguments.dy = &d_out;
    arguments.dx = &arrays.d_data;
    arguments.gamma = &arrays.gamma;
    arguments.beta = &arrays.beta;
    arguments.saved = &arrays.saved;
    arguments.message = &scratch.message;
    arguments.has_scale = call_.group->scale;
    arguments.add = request == Request::kAdd;
    if (masks) {
      arguments.y = &arrays.out;
      program_.input_gradient_residual(device_, launch, call_.layout, arguments);
    } else {
      set_epilogue(arguments, call_.has.skip ? Activation::kNone : call_.activation.kind);
      program_.input_gradient(device_, launch, call_.layout, arguments);
    }
  }

  template <typename Arguments>
  void set_epilogue(Arguments& arguments, Activation::Kind activation) const {
    arguments.activation = activation;
    arguments.slope = call_.activation.slope;
    arguments.in_place = call_.in_place;
  }

  int64_t channels() const { return call_.layout.channels; }

  GpuProgram& program_;
  const int device_;
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
  } catch (const MXNetFailure& problem) {
    throw MXNetFailure("SyncBatchNorm '" + name + "': " + problem.what() + " Use backend='portable'.");
  }
}

}  // namespace gluon_syncbn
