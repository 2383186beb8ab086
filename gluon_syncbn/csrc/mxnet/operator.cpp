// The compiled operator as MXNet sees it: a custom operator whose callbacks are C functions, so that no Python runs in
// a training step. This file knows MXNet's C interface, and groups.cpp the groups that Python has made;
// cpu/operator.cpp and cuda/operator.cpp have the order of a pass:
//
//   forward    moments of x → meet → statistics of the whole mini-batch → y, running statistics
//   backward   sums of dy and dy·x̂ → meet → dx, dγ, dβ
//
// Inputs: data, gamma, beta; in some graphs, before them, a skip, which is added before the activation, and after them
// an order token, the `saved` of the call that must come before this one (block.py says why; graphs call this input
// `after`, and the attribute `follows` says that it is there). Auxiliary states: running_mean, running_var. Outputs:
// out, and for the backward pass `saved` (operator.h). The arrays are dense: backends/native.py keeps oneDNN's layouts
// away from the operator.
//
// Threads: MXNet runs forward and backward on threads that it adds on demand, one per callback that has not returned.
// On a CPU they hand the pass to the engine (pass.h); on a GPU they wait for each other in a rendezvous. Groups are
// shared by layer, graph and calls, and freed with the last.

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/float16.h"
#include "cuda/scratch.h"
#include "exported.h"
#include "meeting/all_reduce.h"
#include "meeting/group.h"
#include "meeting/step.h"
#include "mxnet/c_api.h"
#include "mxnet/engine.h"
#include "mxnet/operator.h"
#include "mxnet/python.h"
#include "numbers.h"
#include "tensor.h"

namespace gluon_syncbn {
namespace {

constexpr const char* kOperator = "gluon_syncbn_native";

// The part of a graph's node that is known before shapes are.
struct Property {
  const std::shared_ptr<Group> group;
  const int axis;
  const Activation activation;
  const bool in_place;
  const OptionalInputs has;
  std::vector<void*> contexts = std::vector<void*>(kPropertyCallbacks, this);

  // Where MXNet has arrays, shapes and types: inputs, outputs, auxiliary states. The skip is at 0.
  const int data = has.skip, gamma = data + 1, beta = data + 2, order_token = data + 3;
  const int out = order_token + has.order_token, saved = out + 1;

  Layout layout_of(const std::vector<int64_t>& shape) const {
    const int ndim = static_cast<int>(shape.size());
    const int real_axis = axis < 0 ? axis + ndim : axis;
    if (ndim < 2 || real_axis < 0 || real_axis >= ndim) {
      throw std::invalid_argument(group->where() + "axis=" + std::to_string(axis) + " does not fit an input of " +
                                  std::to_string(ndim) + " axes; it takes 2 or more axes.");
    }
    Layout layout{1, shape[static_cast<size_t>(real_axis)], 1};
    for (int i = 0; i < ndim; ++i) {
      if (i < real_axis) layout.outer *= shape[static_cast<size_t>(i)];
      if (i > real_axis) layout.inner *= shape[static_cast<size_t>(i)];
    }
    return layout;
  }
};

// Runs a callback's body; an exception reaches the user as the text of an MXNetError.
template <typename Body>
int or_error(const Body& body) {
  try {
    body();
    return 1;
  } catch (const std::exception& problem) {
    throw dmlc::Error(problem.what());
  }
}

int list_names(char*** names, const char** list) {
  *names = const_cast<char**>(list);
  return 1;
}
int list_arguments(char*** names, void* state) {
  static const char* list[] = {"skip", "data", "gamma", "beta", nullptr};
  static const char* list_and_after[] = {"skip", "data", "gamma", "beta", "after", nullptr};
  const OptionalInputs has = static_cast<const Property*>(state)->has;
  return list_names(names, (has.order_token ? list_and_after : list) + !has.skip);
}
int list_outputs(char*** names, void*) {
  static const char* list[] = {"out", "saved", nullptr};
  return list_names(names, list);
}
int list_states(char*** names, void*) {
  static const char* list[] = {"running_mean", "running_var", nullptr};
  return list_names(names, list);
}

int infer_shape(int num, int* ndims, int** shapes, void* state) {
  return or_error([&] {
    const auto& at = *static_cast<const Property*>(state);
    thread_local int channels, saved;  // MXNet copies the shapes before this thread calls again
    if (ndims[at.data] <= 0) {         // it also asks before it knows the input
      ndims[at.out] = ndims[at.saved] = 0;
      return;
    }
    channels = static_cast<int>(at.layout_of({shapes[at.data], shapes[at.data] + ndims[at.data]}).channels);
    saved = channels < 0 ? -1 : static_cast<int>(saved_size(channels));  // -1 is not known yet
    for (int i : {at.gamma, at.beta}) {
      if (ndims[i] == 1 && shapes[i][0] > 0 && shapes[i][0] != channels) {
        throw std::invalid_argument(at.group->where() + "the input has " + std::to_string(channels) + " channels, " +
                                    (i == at.gamma ? "gamma" : "beta") + " has " + std::to_string(shapes[i][0]) + ".");
      }
    }
    for (int i = at.gamma; i < num; ++i) {
      ndims[i] = 1;
      shapes[i] = &channels;
    }
    for (int i : {0, at.out}) {  // a skip, and the output
      ndims[i] = ndims[at.data];
      shapes[i] = shapes[at.data];
    }
    shapes[at.saved] = &saved;
    if (at.has.order_token) shapes[at.order_token] = &saved;
  });
}

const char* dtype_name(int flag) {
  if (flag == 0) return "float32";
  if (flag == 1) return "float64";
  if (flag == 2) return "float16";
  return flag == 12 ? "bfloat16" : "of a type that is not supported";
}

int infer_type(int num, int* dtypes, void* state) {
  return or_error([&] {
    const auto& at = *static_cast<const Property*>(state);
    const int parameters = static_cast<int>(at.group->dtype), wide = static_cast<int>(DType::kFloat64);
    const int type = dtypes[at.data] < 0 ? dtypes[at.out] : dtypes[at.data];
    const bool half = type == static_cast<int>(DType::kFloat16) || type == static_cast<int>(DType::kBFloat16);
    if (type >= 0 && type != parameters && !(half && at.group->dtype == DType::kFloat32)) {
      throw std::invalid_argument(at.group->where() + "the input is " + dtype_name(type) +
                                  ", parameters and statistics are " + dtype_name(parameters) +
                                  "; call cast() on the net.");
    }
    for (int i = at.gamma; i < num; ++i) dtypes[i] = parameters;
    dtypes[0] = dtypes[at.data] = dtypes[at.out] = type;
    dtypes[at.saved] = wide;
    if (at.has.order_token) dtypes[at.order_token] = wide;
  });
}

int declare_backward_dependency(const int* out_grad, const int* in_data, const int* out_data, int* num_deps, int** deps,
                                void* state) {
  const auto& at = *static_cast<const Property*>(state);
  thread_local std::vector<int> list;
  list = {out_grad[0], in_data[at.gamma], in_data[at.beta], out_data[1]};
  if (at.in_place || at.has.skip) list.push_back(out_data[0]);
  if (!at.in_place) list.push_back(in_data[at.data]);  // else MXNet need not keep it
  *num_deps = static_cast<int>(list.size());
  *deps = list.data();
  return 1;
}

int delete_operator(void* state) {
  static_cast<Operator*>(state)->let_go();
  return 1;
}

// Runs a pass of an operator. Its error is not returned to MXNet, which keeps the failures of custom operators in one
// slot per process, and can lose one of two that come in the same instant. Instead `array`, an array of the call, gets
// the error: MXNet looks at all arrays of a call when it is complete. In training the step fails.
template <typename Pass>
int or_poison(const Array& array, bool is_train, const Pass& pass) {
  return or_error([&] {
    try {
      pass();
    } catch (const std::exception& problem) {
      if (is_train) step().fail(problem.what());
      poison(array.handle(), problem.what());
    }
  });
}

int run_forward(int, void** handles, int*, const int* requests, int is_train, void* state) {
  auto* self = static_cast<Operator*>(state);
  const auto arrays = std::make_shared<const ForwardArrays>(handles, self->call().has);
  self->forward_generation = 0;
  return or_poison(arrays->out, is_train != 0,
                   [&] { self->forward(arrays, ForwardRequests(requests), is_train != 0); });
}

int run_backward(int, void** handles, int*, const int* requests, int, void* state) {
  auto* self = static_cast<Operator*>(state);
  const OptionalInputs has = self->call().has;
  const auto arrays = std::make_shared<const BackwardArrays>(handles, has);
  return or_poison(arrays->d_out, true, [&] { self->backward(arrays, BackwardRequests(requests, has)); });
}

// MXNet's leaky ReLU has its slope as float32, and multiplies float16 by one of float16.
double slope_as(DType dtype, double slope) {
  const auto value = static_cast<float>(slope);
  return static_cast<double>(dtype == DType::kFloat16 ? half_to_float(float_to_half(value)) : value);
}

int create_operator(const char* device, int, unsigned** shapes, const int* ndims, const int* dtypes,
                    MXCallbackList* ret, void* state) {
  return or_error([&] {
    const auto& at = *static_cast<const Property*>(state);
    const Layout layout = at.layout_of({shapes[at.data], shapes[at.data] + ndims[at.data]});
    if (layout.size() == 0) {
      throw std::invalid_argument(at.group->where() + "the input on " + device +
                                  " is empty. A device without images cannot take part; leave it out with "
                                  "gluon_syncbn.devices(...).");
    }
    const DType dtype = dtype_of(dtypes[at.data]);
    Activation activation = at.activation;
    activation.slope = slope_as(dtype, activation.slope);
    Call call{at.group, device, layout, dtype, activation, at.in_place, at.has};
    const bool on_gpu = call.device.compare(0, 3, "gpu") == 0;
    const auto created = on_gpu ? make_gpu_operator(std::move(call)) : make_cpu_operator(std::move(call));
    created->keep();
    static AnyCallback callbacks[kOperatorCallbacks] = {any(delete_operator), any(run_forward), any(run_backward)};
    ret->num_callbacks = kOperatorCallbacks;
    ret->callbacks = callbacks;
    ret->contexts = created->contexts;
  });
}

// "relu", "leaky", or none.
Activation activation_of(std::map<std::string, std::string>& arguments) {
  const std::string& name = arguments["activation"];
  if (name == "relu") return {Activation::kReLU, 0};
  if (name == "leaky") return {Activation::kLeakyReLU, number_in(arguments["slope"])};
  return {};
}

int delete_property(void* state) {
  delete static_cast<Property*>(state);
  return 1;
}

int create_property(const char*, int num_arguments, const char** keys, const char** values, MXCallbackList* ret) {
  static AnyCallback callbacks[kPropertyCallbacks] = {any(delete_property), any(list_arguments),
                                                      any(list_outputs),    any(list_states),
                                                      any(infer_shape),     any(declare_backward_dependency),
                                                      any(create_operator), any(infer_type)};
  // MXNet calls the first of them, which deletes, even if no property could be made.
  static void* no_contexts[kPropertyCallbacks] = {};
  ret->num_callbacks = kPropertyCallbacks;
  ret->callbacks = callbacks;
  ret->contexts = no_contexts;
  return or_error([&] {
    std::map<std::string, std::string> arguments;
    for (int i = 0; i < num_arguments; ++i) arguments[keys[i]] = values[i];
    const Activation activation = activation_of(arguments);
    // The input cannot be recovered from the output of a ReLU.
    const bool in_place = arguments["in_place"] == "1" && activation.kind != Activation::kReLU;
    const OptionalInputs has{arguments["skip"] == "1", arguments["follows"] == "1"};
    const auto group = group_of(arguments["group"]);
    if (has.skip && activation.kind != Activation::kReLU) {
      throw std::invalid_argument(group->where() + "its graph asks for what cannot be computed in one pass.");
    }
    ret->contexts = (new Property{group, std::stoi(arguments["axis"]), activation, in_place, has})->contexts.data();
  });
}

}  // namespace

void Operator::begin_forward() const { throw_if_failed("forward"); }

void Operator::end_forward() { forward_generation = step().generation(); }

void Operator::begin_backward() const {
  throw_if_failed("backward");
  if (forward_generation != step().generation()) throw_never_ran(*call_.group, call_.device);
}

void Operator::throw_if_failed(const std::string& direction) const {
  if (!step().has_failed()) return;
  throw std::runtime_error(call_.group->where() + "the " + direction + " pass on " + call_.device +
                           " was not run, because the step had failed: " + step().failure());
}

void warn_of_gamma(const Group& group, const std::string& device, int64_t channel, double used) {
  warn_user(group.where() + "in_place=True cannot recover the input where |gamma| is this small; channel " +
            std::to_string(channel) + " on " + device + " uses " + text_of(used, std::scientific, 1) +
            " instead. Shown once per layer.");
}

}  // namespace gluon_syncbn

// Registers the operator; 0, or MXNet's error code. `kernels` is the text of the CUDA kernels.
EXPORTED int gluon_syncbn_register(const char* kernels) {
  gluon_syncbn::GpuProgram::set_source(kernels);
  return gluon_syncbn::mxnet().custom_op_register(gluon_syncbn::kOperator, gluon_syncbn::create_property);
}

// Compiles the kernels for GPUs and tries them on this one. Returns why they cannot be used, or an empty text.
EXPORTED const char* gluon_syncbn_check_gpu(int device) {
  return gluon_syncbn::error_of([device] { gluon_syncbn::check_gpu(device); });
}
