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
//    must not wait for what cpu(0) has yet to do in the step. So while a step is open, an operator shares no buffer
//    with pending operators of other calls. A call is a call of a net's graph, a backward pass, or one operator alone.
//
// A step is
//   closed  when every pending operator can finish without what Python has yet to push. The operators of a device use
//           kFew buffers in turn, as if all of them were one call.
//   open    from its first call of a synchronized layer until weights are updated, or until the next record() if all
//           devices have begun the same passes by then (Python says so). The operators of a call use kFew buffers in
//           turn. The first call gets the first buffers of its device, the second call the next ones, and so on; what
//           used them before is of an earlier step, and can finish. So a device needs as many buffers as a step has
//           calls, however far Python is ahead of the engine, and each buffer serves the same operators in every step
//           and keeps its size. Behind the last buffer the first one is next, if its operators have run, which the
//           version of its variable tells. If not, the device gets one more buffer.
//
// An executor of a symbol, and a net that is hybridized with static_alloc and static_shape, ask once for a buffer for
// all their operators on a device, and keep it. A device has kKept buffers for them, and they get the one that has been
// idle for the longest time: it belongs to a graph that was made anew, for another shape for example. MXNet does not
// say when it frees a graph.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "mxnet/resource_manager.h"

namespace gluon_syncbn {

// The buffers that no device has.
class Stock {
 public:
  void add(const Resource& buffer);

  // One for a device that has got `taken` of them on its thread; none if that are too many. The first half is for all;
  // of the second half, a device gets at most a sixteenth.
  std::optional<Resource> take(size_t taken);

  // With those that were taken.
  size_t size() const { return size_; }

  std::mutex mutex;

 private:
  std::vector<Resource> buffers_;
  size_t size_ = 0;
};

// Whether a step is open, and the number of the last one.
class OpenStep {
 public:
  void open();
  void close() { is_open_ = false; }

  bool is_open() const { return is_open_; }
  uint64_t number() const { return number_; }

 private:
  std::atomic<bool> is_open_{false};
  std::atomic<uint64_t> number_{0};
};

// The buffers of one device on one thread.
class DeviceBuffers {
 public:
  // The buffer for the operator that is pushed next, in the call of this number, or alone (0); none if the device can
  // have none. Sets `is_crowded` if pending operators of another call of the open step use it, too.
  std::optional<Resource> next(Stock& stock, const OpenStep& step, uint64_t call, bool& is_crowded);

 private:
  static constexpr size_t kFew = 2;     // so operators keep roughly to the order of the program, as they do in MXNet
  static constexpr size_t kTries = 32;  // how many it looks at before it gets one more

  struct Buffer {
    bool is_idle() const { return resource.variable->version() >= uses; }

    Resource resource;
    size_t uses = 0;    // how many operators have got it: the version of its variable when all of them have run
    uint64_t step = 0;  // in which the last of them was pushed
  };

  // These return a position among the buffers.
  std::optional<size_t> unused(Stock& stock);  // by pending operators of the open step
  std::optional<size_t> one_more(Stock& stock);
  size_t in_turn();

  std::vector<Buffer> buffers_;
  size_t turn_ = 0;
  uint64_t step_ = 0;  // that `turn_` is of

  uint64_t call_ = 0;                 // the last one
  std::vector<size_t> used_by_call_;  // positions of its buffers
  size_t turn_in_call_ = 0;
};

// The buffers of one device that graphs keep, on any thread. Its owner locks it.
class KeptBuffers {
 public:
  // None if there is none.
  std::optional<Resource> next(Stock& stock);

 private:
  static constexpr size_t kKept = 8;

  struct Kept {
    Resource resource;
    size_t version;      // when it was last looked at
    uint64_t last_used;  // the number of the request at which it had another version
  };

  std::vector<Kept> buffers_;
  uint64_t requests_ = 0;
};

}  // namespace gluon_syncbn
