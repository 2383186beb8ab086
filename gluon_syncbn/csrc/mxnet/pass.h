// A pass of a layer on a CPU device as MXNet's engine runs it: in two operations, between which the devices meet, so
// that no thread waits.
//
// MXNet calls a custom operator back on a thread of its own pool, one per call that is under way. Threads that waited
// for each other there would cost more than all else, as they and the engine's threads queue for the cores. So the
// callback hands two operations to the engine, for the device's own thread, and returns:
//
//   bring    asynchronous. Computes the device's message, leaves it at the rendezvous together with the function that
//            completes the operation, and returns. The operation is complete when the round is over.
//   finish   starts when `bring` is complete: the rest of the pass; or, if something has failed until then, fills the
//            outputs of the pass with NaN, and throws. The error reaches the outputs of this call, with its own text.
//
// Both write one of the arrays that the callback was handed (`token`), and so run in this order. These arrays are
// copies with variables of their own, and MXNet takes the call for complete when the callback has returned and nothing
// is pending on any of them (src/operator/custom/custom-inl.h, CustomOperatorWait).
//
// Who owns what: the two operations own the pass, and the engine the operations, until each is complete; the
// rendezvous' callback owns it, too, as long as the round is open. The pass owns its arrays and its operator.
//
// With the NaiveEngine, which waits for each operation where it is pushed, and where MXNet's CallbackOnComplete differs
// from OnComplete, the same halves run on the callback's thread, which waits between them.
#pragma once

#include <functional>
#include <memory>

namespace gluon_syncbn {

class EnginePass {
 public:
  virtual ~EnginePass() = default;

  // The first half. Calls `done` once, on any thread, when the meeting is over; or throws and does not call it.
  virtual void bring(std::function<void()> done) = 0;

  // The second half; throws if the meeting has failed.
  virtual void finish() = 0;

  // Called after one of the two has thrown: fills the outputs of the pass with NaN.
  virtual void lose() = 0;
};

// Runs a pass in training on CPU device number `device`. Its errors fail the step, and reach every reader of the call's
// outputs; where there is only the callback's thread they are thrown here. `token`: the handle of an array of the call.
void run(std::shared_ptr<EnginePass> pass, int device, void* token);

}  // namespace gluon_syncbn
