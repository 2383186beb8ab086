// Temporary space for operators on CPU devices, so that no device waits for a buffer that another one uses.
//
// Why it is needed
// ----------------
// An operator that needs temporary space gets a buffer when it is pushed to the engine, and writes the buffer's engine
// variable when it runs. So two operators that share a buffer run one after the other, in the order in which they were
// pushed. MXNet has four buffers for all CPU devices and hands them out in turn. With synchronized layers that is a
// deadlock: an operator of cpu(0) behind a layer has a buffer, and waits until cpu(1) reaches that layer; an operator
// of cpu(1) before the layer has the same buffer, and waits for the operator of cpu(0).
//
// The rules
// ---------
// 1. Devices do not share buffers, and neither do threads that are alive.
// 2. Operators of one device may. They wait in the order in which the device calls the layers, and that is the same on
//    all devices, so all devices come to every layer.
// 3. But cpu(0) may also compute something for cpu(1) in the middle of a step, such as its shard of the batch. That
//    must not wait for the rest of the step on cpu(0). So while a step is open, an operator shares no buffer with
//    pending operators of other calls. A call is a call of a net's graph, a backward pass, or one operator alone.
//    (Once autograd has recorded a copy from one device to another, a backward pass is many operators alone.)
//
// A step is
//   closed  when every pending operator can finish without operators that Python has yet to push. The operators of a
//           device use kFew buffers in turn, as if all of them were one call.
//   open    from the first pass of a synchronized layer, forward or backward, until Python says that all devices have
//           begun the same passes: when weights are updated, or at the next record(). The operators of a call use kFew
//           buffers in turn. The first call gets the first buffers of its device, the second call the next ones, and so
//           on; the operators that used them before are of an earlier step, and can finish. So each buffer serves the
//           same operators in every step and keeps its size. Behind the last buffer the first one is next that is found
//           (of kTries) whose operators have run. If there is none, the device gets one more buffer. So a device needs
//           about as many buffers as calls are pending in a step.
//
// To find out whether the operators of a buffer have run, an operation of the engine writes the buffer's variable after
// them, and counts. (The variable's own count would not tell: operators that the engine runs as one count once.)
//
// An executor of a symbol, and a net that is hybridized with static_alloc and static_shape, ask once for a buffer for
// all their operators on a device, and keep it: they are its owner. Python says which graph asks, and when the graph is
// gone. A net asks anew when its shapes change, or when it trains after a prediction. Nothing tells which of its
// buffers are then of no use; nor, for its backward pass, which net asks. But the version of a buffer's variable tells
// whether a graph was at work. So a buffer that was idle for some steps is given anew: to its owner, or to anyone if
// its owner is gone; backward passes are one owner. A net that is called several times in a step on a device is given
// none anew: one of them is perhaps in use. An owner that has many gets the one that was longest without work.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "mxnet/c_api.h"

namespace gluon_syncbn {

// The buffers of the process. Devices get them one by one, for good.
class Stock {
 public:
  // Before there are devices.
  void add(const Resource& buffer) { buffers_.push_back(buffer); }

  // A buffer for a device that has got `taken` of them on its thread; none if it has too many. The first half is for
  // all; of the second half, a device gets at most a sixteenth.
  std::optional<Resource> take(size_t taken);

  size_t size() const { return buffers_.size(); }

 private:
  std::vector<Resource> buffers_;
  std::atomic<size_t> num_taken_{0};
};

// Which step is open or closed: a number that grows when a step opens and when it closes.
class StepClock {
 public:
  using Number = uint64_t;
  static bool is_open(Number number) { return number % 2 == 1; }

  Number number() const { return number_; }
  void open() { become(true); }
  void close() { become(false); }

 private:
  void become(bool open) {
    Number now = number_;
    while (is_open(now) != open && !number_.compare_exchange_weak(now, now + 1)) {
    }
  }

  std::atomic<Number> number_{0};
};

// The buffers of one device on one thread. They stay where they are in memory, for good.
class DeviceBuffers {
 public:
  explicit DeviceBuffers(int device) : device_(device) {}

  // The buffer for the operator that is pushed next, in the call of this number, or alone (0); none if the device can
  // have none. Sets `is_crowded` if pending operators of another call of the open step use it, too.
  std::optional<Resource> next(Stock& stock, StepClock::Number step, uint64_t call, bool& is_crowded);

 private:
  static constexpr size_t kFew = 2;       // so operators keep roughly to the order of the program, as they do in MXNet
  static constexpr size_t kTries = 32;    // how many it looks at before it gets one more
  static constexpr size_t kUnpushed = 8;  // an operator asks for fewer before it is pushed
  static constexpr uint64_t kAlone = 0, kClosed = ~uint64_t{0};  // in place of a call's number

  struct Buffer {
    Resource resource;
    StepClock::Number step = 0;       // in which the last operator has got it
    size_t uses = 0;                  // how many operators have got it
    size_t last_request = 0;          // of the last of them
    size_t asked = 0;                 // how many of them the engine was asked about last
    std::atomic<size_t> finished{0};  // and how many have run for certain
  };

  bool is_idle(Buffer& buffer);

  // These return a position among the buffers.
  std::optional<size_t> unused(Stock& stock);  // by pending operators of the open step
  std::optional<size_t> one_more(Stock& stock);
  size_t in_turn();

  const int device_;
  std::deque<Buffer> buffers_;
  size_t requests_ = 0;
  size_t turn_ = 0;
  StepClock::Number step_ = 0;  // that `turn_` is of

  uint64_t call_ = 0;                 // the last one
  std::vector<size_t> used_by_call_;  // positions of its buffers
  size_t turn_in_call_ = 0;
};

// A graph that Python has, and that keeps buffers.
class BufferOwner {
 public:
  // The graph is called on this device.
  void call(int device, StepClock::Number step) {
    if (last_call(device).exchange(step) == step && StepClock::is_open(step)) has_many_states = true;
  }

  bool was_called(int device, StepClock::Number step) { return last_call(device) == step; }

  std::atomic<bool> is_gone{false};
  // In a step it was called on a device again, while the buffer of the first call may be in use: MXNet then has several
  // states of it, each with a buffer.
  std::atomic<bool> has_many_states{false};

 private:
  std::atomic<StepClock::Number>& last_call(int device) { return last_calls_[static_cast<size_t>(device) % kDevices]; }

  static constexpr size_t kDevices = 32;
  std::atomic<StepClock::Number> last_calls_[kDevices] = {};
};

// The buffers of one device that graphs keep which were made on one thread.
class KeptBuffers {
 public:
  explicit KeptBuffers(int device) : device_(device) {}

  // The buffer for the graph that asks, or for a backward pass (null); none if there is none. Sets `is_crowded` if
  // another graph may keep it, too.
  std::optional<Resource> next(Stock& stock, StepClock::Number step, const std::shared_ptr<BufferOwner>& owner,
                               bool& is_crowded);

 private:
  static constexpr StepClock::Number kIdle = 4;      // how long an idle buffer was so: two steps open and close
  static constexpr size_t kIdleRequests = 32;        // or so many requests, between steps
  static constexpr size_t kMost = 8, kMostNew = 64;  // of an owner; of one that got all in this open step

  struct Kept {
    Resource resource;
    std::shared_ptr<BufferOwner> owner;
    StepClock::Number given = 0;  // the step in which it was given to the owner
    size_t version = 0;           // when it was last looked at
    StepClock::Number step = 0;   // in which it had another version, or was given
    size_t request = 0;           // the same, in requests
  };

  const int device_;
  std::vector<Kept> buffers_;
  size_t requests_ = 0;
};

}  // namespace gluon_syncbn
