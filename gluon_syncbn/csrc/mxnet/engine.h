// What is given to MXNet's engine beside the operators of graphs, so that a failed step changes no weight.
//
// Why it is needed
// ----------------
// When an operator has failed, the engine skips everything after it: an operator that reads or writes an array with an
// error is not run, and hands the error on to what it would have written. But all of these arrays share one exception
// object, and it is forgotten for all of them when it is first thrown to the user, by whoever reads one of them
// (ThreadedEngine::ThrowException). What has not been reached by then runs after all, on memory that no one has
// written: backward passes, then the optimizer. So errors cannot be left to the engine alone.
//
// An operation is asked for with MXEnginePushSyncND: a C function, the arrays that it reads, and those that it writes.
// An ordinary one is skipped like an operator. One with the property "no skip" runs although what it reads or writes
// has an error; it leaves the error as it is, or throws one of its own in its place.
//
//   watch   After a call of a net, and before a backward pass: an ordinary operation reads each output and counts
//           itself; one that is not skipped, which writes the output, then looks at the count. If someone is missing,
//           the engine has skipped something: the step has failed (meeting/step.h). Who reads the output comes after
//           both, so the failure is known before its exception can be forgotten. After a call, one more operation
//           writes the running statistics that the call writes, and throws if the step has failed: so they have an
//           exception of their own, and nothing writes them any more (a backward pass of MXNet's own BatchNorm would,
//           on a CPU).
//   read    Before someone reads an array: an ordinary operation reads it. If that is skipped, the array has an error,
//           and Python has the step fail before the array is read. It waits for what the reader would wait for; where
//           nothing is to be waited for, no other thread takes part.
//   gate    Before an optimizer: an ordinary operation reads some gradients, of all devices, and counts itself; one
//           that is not skipped writes them, and throws if the step has failed, or the other was skipped. So the
//           gradients have an error, and the updates that read them are skipped. Several gates wait for the heads of
//           backward passes, so none opens after a failure in a forward pass. If a backward pass fails, some gates may
//           be open already: the gradients that they guard were complete on all devices. (Where a KVStore adds
//           gradients up, one gate for all would cost the time in which that runs beside the backward pass: 10% of a
//           step.)
//   seal    After an optimizer: an operation, not skipped, writes all gradients, weights and states of the optimizer.
//           Who reads one of them comes after all updates, and cannot make the engine forget an exception by which one
//           is yet to be skipped.
//   poison  Gives an array an error.
//
// The engine also has a list of all exceptions, to which each thread of it adds what is thrown there, without a lock.
// Two that add in the same instant, or one that adds while the list moves to more memory and another looks something
// up, corrupt it: a crash, there or much later ("double free or corruption"). So what throws here waits for its turn,
// since those who throw often come together; and before there is a gate, the list is given memory for many exceptions
// (`reserve`; the engine keeps the memory when it clears the list).
//
// No operation waits for another while it runs; the engine knows who comes first by the arrays, and by tokens, arrays
// without contents that those write who come before, and those read who come after.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mxnet/array.h"
#include "mxnet/c_api.h"

namespace gluon_syncbn {

// Hands `function(object)` to the engine, for the CPU thread number `thread`; its profile has it by its `name`.
template <typename Object>
void push(void (*function)(Object&), std::shared_ptr<Object> object, EngineProperty property, int thread,
          std::vector<void*> reads, std::vector<void*> writes, const char* name = "SyncBatchNorm") {
  struct Task {
    void (*function)(Object&);
    std::shared_ptr<Object> object;
  };
  const auto run = [](void*, void* task) {
    const auto* mine = static_cast<Task*>(task);
    mine->function(*mine->object);
  };
  const auto drop = [](void* task) { delete static_cast<Task*>(task); };
  const int context[] = {kCpu, thread};
  // A priority keeps it from being bundled with other operators, which would then wait with it.
  const int priority = 1;
  // The engine drops the task, also if it refuses it.
  check_mxnet(mxnet().engine_push(run, new Task{function, std::move(object)}, drop, context, reads.data(),
                                  static_cast<int>(reads.size()), writes.data(), static_cast<int>(writes.size()),
                                  &property, priority, name),
              "MXNet's engine took no operation");
}

// Whoever reads `array`, an NDArray handle, gets this error.
void poison(void* array, const std::string& error);

// Throws `error` out of an operation of the engine, when those who were here before have had the time to. An error of
// a call of an operator is thrown twice, the second time by what MXNet runs after the call.
[[noreturn]] void throw_in_turn(const std::string& error);

// The handle of an array without contents, for the order that it gives. Array frees it; the engine keeps what it needs.
void* new_token();

}  // namespace gluon_syncbn
