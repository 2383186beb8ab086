// Operations that the package gives to MXNet's engine beside the operators of graphs, so that a failed step changes no
// weight.
//
// Why they are needed
// -------------------
// When an operator has failed, the engine skips everything after it: an operator that reads or writes an array with an
// error does not run, and hands the error on to the arrays that it would have written. But all of these arrays share
// one exception object, and the engine forgets it for all of them when it first throws it to a reader of one of them
// (ThreadedEngine::ThrowException). The operators that the engine has not reached by then do run, on memory that was
// never written: backward passes, then the optimizer. So errors cannot be left to the engine alone.
//
// The package asks for an operation with MXEnginePushSyncND: a C function, the arrays that it reads, and the arrays
// that it writes. The engine skips an ordinary operation like an operator. An operation with the property "no skip"
// runs although an array that it reads or writes has an error; it leaves the error as it is, or throws one of its own
// in its place.
//
//   watch   After a call of a net, and before a backward pass: an ordinary operation reads each output and counts
//           itself; a "no skip" operation, which writes the output, then looks at the count. If the count is too low,
//           the engine has skipped something: the step has failed (meeting/step.h). A reader of the output comes after
//           both, so the failure is known before the engine can forget its exception. After a call, one more operation
//           writes the running statistics that the call writes, and throws if the step has failed: so they have an
//           exception of their own, and nothing writes them any more (a backward pass of MXNet's own BatchNorm would,
//           on a CPU).
//   read    Before an array is read: an ordinary operation reads it. If the engine skips that, the array has an error,
//           and Python has the step fail before the array is read. It waits as long as the reader would; where there is
//           nothing to wait for, no other thread takes part.
//   gate    Before an optimizer: an ordinary operation reads some gradients, of all devices, and counts itself; a "no
//           skip" operation writes them, and throws if the step has failed, or the engine has skipped the other. So the
//           gradients have an error, and the engine skips the updates that read them. Several gates wait for the heads
//           of backward passes, so none opens after a failure in a forward pass. If a backward pass fails, some gates
//           may be open already: the gradients that they guard were complete on all devices. (Where a KVStore adds
//           gradients up, one gate for all would cost the time in which that runs beside the backward pass: 10% of a
//           step.)
//   seal    After an optimizer: a "no skip" operation writes all gradients, weights and states of the optimizer. A
//           reader of one of them comes after all updates, and cannot make the engine forget an exception by which it
//           has yet to skip an update. Before a call of a graph that writes running statistics which the engine takes
//           for arrays that it reads: a "no skip" operation writes them. So the call comes after their earlier readers.
//   poison  Gives an array an error.
//
// The engine also has a list of all exceptions, to which each of its threads adds the exceptions thrown there, without
// a lock. Two threads that add in the same instant, or one that adds while the list moves to more memory and another
// looks something up, corrupt it: a crash, there or much later ("double free or corruption"). So operations of this
// file take turns to throw, since they often fail together; and before there is a gate, the list is given memory for
// many exceptions (`reserve`; the engine keeps the memory when it clears the list).
//
// No operation waits for another while it runs. The engine orders them by their arrays, and by tokens: arrays without
// contents that the earlier operations write and the later ones read.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mxnet/array.h"
#include "mxnet/c_api.h"

namespace gluon_syncbn {

// A priority keeps the engine from bundling an operation with other operators, which would then wait with it.
constexpr int kPriority = 1;

// Has the engine run `operation` on the CPU thread number `thread`; the engine's profile shows it under `name`.
void push(std::function<void()> operation, EngineProperty property, int thread, std::vector<void*> reads,
          std::vector<void*> writes, const char* name = "SyncBatchNorm");

// The same for an ordinary operation that writes `token` and is complete when the function that it is given is called.
void push_async(std::function<void(OnComplete)> operation, int thread, void* token);

// Gives `array`, an NDArray handle, this error: a read of it throws the error.
void poison(void* array, const std::string& error);

// Throws `error` out of an operation of the engine, when earlier errors have had their time. An error of a call of an
// operator is thrown twice, the second time by the operation that MXNet runs after the call.
[[noreturn]] void throw_in_turn(const std::string& error);

// The handle of an array without contents, for the order that it gives. Array frees it, and the engine keeps its
// variable.
void* new_token();

}  // namespace gluon_syncbn
