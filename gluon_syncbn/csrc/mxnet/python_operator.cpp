// Wraps a custom operator that is written in Python, for three things that MXNet's own wrapping lacks.
//
// Errors keep their text. MXNet's Python side prints an error that an operator raises and returns 0 from the callback;
// MXNet then throws the text of a failed check, which says nothing. Here each callback that can fail calls Python's
// callback, and where that returns 0 or has left a text behind, with gluon_syncbn_leave_error on the same thread,
// throws that text. (Passes in training give their error to an array instead: mxnet/engine.h, poison.)
//
// Ctrl-C does no harm, and exits are clean (python.h). Each change of thread takes time, so Python is asked as seldom
// as can be. To delete stays on the main thread: Ctrl-C there can only keep some hundred bytes from being freed.
//
// Threads may ask at a time. MXNet's Python side keeps the shapes that it has returned until it is asked again; another
// thread may do that while MXNet still reads them. (Without this, two threads that called one net failed within a
// thousand calls.) Here each thread gets a copy.
//
// Ownership: MXNet owns the list of callbacks that create_property fills in, and calls its delete callback once, which
// deletes the wrapper after Python's own delete; the same for the list that the property's create callback fills in.

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "exported.h"
#include "mxnet/c_api.h"
#include "mxnet/python.h"

namespace gluon_syncbn {
namespace {

struct {
  CustomOpPropCreator make = nullptr;
  std::string name;
} wrapped;

int or_error(int returned) {
  const std::string text = take_error();
  if (returned && text.empty()) return returned;
  throw dmlc::Error(text.empty() ? "gluon_syncbn: an operator failed; the reason was printed above." : text);
}

// A list of callbacks of which some are replaced; those get the wrapper as their context, to find the original.
struct Wrapper {
  explicit Wrapper(const MXCallbackList& list)
      : original(list),
        callbacks(list.callbacks, list.callbacks + list.num_callbacks),
        contexts(list.contexts, list.contexts + list.num_callbacks) {}

  template <typename Function>
  void replace(int index, Function function) {
    callbacks[static_cast<size_t>(index)] = any(function);
    contexts[static_cast<size_t>(index)] = this;
  }

  template <typename Function, typename... Arguments>
  static int call(void* state, int index, Arguments... arguments) {
    const MXCallbackList& list = static_cast<Wrapper*>(state)->original;
    const auto function = reinterpret_cast<Function>(reinterpret_cast<void (*)(void)>(list.callbacks[index]));
    take_error();  // of an earlier call
    return function(arguments..., list.contexts[index]);
  }

  void fill(MXCallbackList* ret) {
    ret->num_callbacks = static_cast<int>(callbacks.size());
    ret->callbacks = callbacks.data();
    ret->contexts = contexts.data();
  }

  const MXCallbackList original;
  std::vector<AnyCallback> callbacks;
  std::vector<void*> contexts;
};

// The property's lists, asked for once.
struct PropertyWrapper : Wrapper {
  explicit PropertyWrapper(const MXCallbackList& list) : Wrapper(list) {
    for (int index : {kPropertyListArguments, kPropertyListOutputs, kPropertyListStates}) {
      char** pythons = nullptr;
      or_error(call<CustomOpList>(this, index, &pythons));
      for (; *pythons; ++pythons) lists[index].emplace_back(*pythons);
      for (std::string& name : lists[index]) pointers[index].push_back(&name[0]);
      pointers[index].push_back(nullptr);
    }
    callbacks.resize(kPropertyCallbacks);
  }

  std::vector<std::string> lists[kPropertyListStates + 1];
  std::vector<char*> pointers[kPropertyListStates + 1];  // to the same, and a null, as MXNet wants them
  std::mutex inferring;                                  // from the question for shapes until they are copied
};

template <typename Kind>
int remove(void* state) {
  while_python_lives([state] { Wrapper::call<CustomOpDelete>(state, 0); });  // delete is the first of either list
  delete static_cast<Kind*>(state);
  return 1;
}

int create_operator(const char* device, int num_inputs, unsigned** shapes, const int* ndims, const int* dtypes,
                    MXCallbackList* ret, void* state) {
  call_off_main_thread([&] {
    return or_error(
        Wrapper::call<CustomOpCreate>(state, kPropertyCreateOperator, device, num_inputs, shapes, ndims, dtypes, ret));
  });
  auto* wrapper = new Wrapper(*ret);
  wrapper->replace(kOperatorDelete, remove<Wrapper>);
  wrapper->fill(ret);
  return 1;
}

template <int index>
int list(char*** names, void* state) {
  *names = static_cast<PropertyWrapper*>(state)->pointers[index].data();
  return 1;
}

int infer_shape(int num, int* ndims, int** shapes, void* state) {
  // MXNet copies the shapes before this thread calls again.
  thread_local std::vector<std::vector<int>> of_this_thread;
  std::vector<std::vector<int>>& copies = of_this_thread;  // where the call below runs on another thread, too
  return call_off_main_thread([&] {
    std::unique_lock<std::mutex> lock(static_cast<PropertyWrapper*>(state)->inferring, std::defer_lock);
    // A thread that has this lock may wait for the interpreter lock; a thread with the interpreter lock must not wait
    // for this one.
    if (!holds_interpreter_lock()) lock.lock();
    const int returned = or_error(Wrapper::call<CustomOpInferShape>(state, kPropertyInferShape, num, ndims, shapes));
    copies.assign(num, {});
    for (int i = 0; i < num; ++i) {
      copies[i].assign(shapes[i], shapes[i] + std::max(ndims[i], 0));
      shapes[i] = copies[i].data();
    }
    return returned;
  });
}

// On everything, as CustomOpProp has it.
int declare_backward_dependency(const int* out_grad, const int* in_data, const int* out_data, int* num_deps, int** deps,
                                void* state) {
  const auto& lists = static_cast<PropertyWrapper*>(state)->lists;
  const size_t arguments = lists[kPropertyListArguments].size(), outputs = lists[kPropertyListOutputs].size();
  thread_local std::vector<int> all;
  all.assign(out_grad, out_grad + outputs);
  all.insert(all.end(), in_data, in_data + arguments);
  all.insert(all.end(), out_data, out_data + outputs);
  *num_deps = static_cast<int>(all.size());
  *deps = all.data();
  return 1;
}

int infer_type(int num, int* dtypes, void* state) {
  return call_off_main_thread(
      [&] { return or_error(Wrapper::call<CustomOpInferType>(state, kPropertyInferType, num, dtypes)); });
}

int nothing_to_delete(void*) { return 1; }

int create_property(const char*, int num_arguments, const char** keys, const char** values, MXCallbackList* ret) {
  // MXNet calls the first callback, which deletes, even if no property could be made.
  static AnyCallback no_callbacks[] = {any(nothing_to_delete)};
  static void* no_contexts[] = {nullptr};
  *ret = {1, no_callbacks, no_contexts};
  MXCallbackList made{};
  PropertyWrapper* wrapper = nullptr;
  call_off_main_thread([&] {
    take_error();  // of an earlier call
    or_error(wrapped.make(wrapped.name.c_str(), num_arguments, keys, values, &made));
    wrapper = new PropertyWrapper(made);
    return 1;
  });
  wrapper->replace(kPropertyDelete, remove<PropertyWrapper>);
  wrapper->replace(kPropertyListArguments, list<kPropertyListArguments>);
  wrapper->replace(kPropertyListOutputs, list<kPropertyListOutputs>);
  wrapper->replace(kPropertyListStates, list<kPropertyListStates>);
  wrapper->replace(kPropertyInferShape, infer_shape);
  wrapper->replace(kPropertyBackwardDependency, declare_backward_dependency);
  wrapper->replace(kPropertyCreateOperator, create_operator);
  wrapper->replace(kPropertyInferType, infer_type);
  wrapper->fill(ret);
  return 1;
}

}  // namespace
}  // namespace gluon_syncbn

// Registers, as `op_type`, the operator that Python knows as `name` and makes with `creator`; 0, or MXNet's error code.
EXPORTED int gluon_syncbn_wrap_python_operator(const char* op_type, const char* name, CustomOpPropCreator creator) {
  gluon_syncbn::wrapped = {creator, name};
  return gluon_syncbn::mxnet().custom_op_register(op_type, gluon_syncbn::create_property);
}
