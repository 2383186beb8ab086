#include "mxnet/temporary_space.h"

#include <algorithm>

#include "mxnet/engine.h"

namespace gluon_syncbn {

std::optional<Resource> Stock::take(size_t taken) {
  const size_t size = buffers_.size();
  size_t now = num_taken_;
  do {
    const bool has_many = taken > 0 && taken >= size / 32;
    if (now == size || (now >= size - size / 2 && has_many)) return std::nullopt;
  } while (!num_taken_.compare_exchange_weak(now, now + 1));
  return buffers_[now];
}

std::optional<Resource> DeviceBuffers::next(Stock& stock, StepClock::Number step, uint64_t call, bool& is_crowded) {
  const bool is_open = StepClock::is_open(step);
  if (!is_open) call = kClosed;
  if (step_ != step) turn_ = 0;
  if (step_ != step || call_ != call || call == kAlone) {
    used_by_call_.clear();
    turn_in_call_ = 0;
  }
  step_ = step;
  call_ = call;
  ++requests_;
  if (used_by_call_.size() < kFew) {
    std::optional<size_t> found;
    if (is_open) {
      found = unused(stock);
    } else if (used_by_call_.size() < buffers_.size()) {
      found = used_by_call_.size();
    } else {
      found = one_more(stock);
    }
    if (!found && used_by_call_.empty() && !buffers_.empty()) {
      is_crowded = true;
      found = in_turn();
    }
    if (found) used_by_call_.push_back(*found);
  }
  if (used_by_call_.empty()) return std::nullopt;
  Buffer& buffer = buffers_[used_by_call_[turn_in_call_++ % used_by_call_.size()]];
  ++buffer.uses;
  buffer.step = step_;
  buffer.last_request = requests_;
  return buffer.resource;
}

bool DeviceBuffers::is_idle(Buffer& buffer) {
  const size_t finished = buffer.finished;
  if (finished == buffer.uses) return true;
  if (finished == buffer.asked && requests_ - buffer.last_request >= kUnpushed) {
    buffer.asked = buffer.uses;
    const auto count = [](void*, void* counted) {
      Buffer& its = *static_cast<Buffer*>(counted);
      its.finished = its.asked;
    };
    const DeviceContext context = {kCpu, device_};
    const EngineProperty property = EngineProperty::kNoSkip;
    check_mxnet(mxnet().engine_push_variables(count, &buffer, nullptr, &context, nullptr, 0, &buffer.resource.variable,
                                              1, &property, kPriority, "temporary space"),
                "MXNet's engine took no operation");
  }
  return false;
}

std::optional<size_t> DeviceBuffers::unused(Stock& stock) {
  for (size_t tries = std::min(kTries, buffers_.size()); tries > 0; --tries) {
    const size_t at = in_turn();
    if (buffers_[at].step != step_ || is_idle(buffers_[at])) return at;
  }
  return one_more(stock);
}

std::optional<size_t> DeviceBuffers::one_more(Stock& stock) {
  const std::optional<Resource> more = stock.take(buffers_.size());
  if (!more) return std::nullopt;
  buffers_.emplace_back().resource = *more;
  return buffers_.size() - 1;
}

size_t DeviceBuffers::in_turn() {
  if (turn_ >= buffers_.size()) turn_ = 0;
  return turn_++;
}

std::optional<Resource> KeptBuffers::next(Stock& stock, StepClock::Number step,
                                          const std::shared_ptr<BufferOwner>& owner, bool& is_crowded) {
  ++requests_;
  const bool has_many_states = owner != nullptr && owner->has_many_states;
  size_t num_own = 0, num_new = 0;
  Kept *idle = nullptr, *oldest = nullptr;
  for (Kept& kept : buffers_) {
    const size_t version = kept.resource.variable->version();
    if (version != kept.version) {
      kept.version = version;
      kept.step = step;
      kept.request = requests_;
    }
    const bool is_own = kept.owner == owner;
    const bool is_idle =
        step - kept.step >= kIdle || (!StepClock::is_open(step) && requests_ - kept.request >= kIdleRequests);
    if (is_own) ++num_own;
    if (is_own && StepClock::is_open(step) && kept.given == step) ++num_new;
    if (is_own && (oldest == nullptr || kept.request < oldest->request)) oldest = &kept;
    const bool is_gone = kept.owner != nullptr && kept.owner->is_gone && !kept.owner->was_called(device_, step);
    if (is_idle && (is_gone || (is_own && !has_many_states))) idle = &kept;
  }
  const size_t most = num_new == num_own || has_many_states ? kMostNew : kMost;
  Kept* found = idle;
  if (found == nullptr && num_own < most) {
    if (const std::optional<Resource> more = stock.take(buffers_.size())) {
      found = &buffers_.emplace_back();
      found->resource = *more;
      found->version = more->variable->version();
    } else {
      is_crowded = StepClock::is_open(step);
    }
  }
  if (found == nullptr) found = oldest;
  if (found == nullptr) return std::nullopt;
  found->owner = owner;
  found->given = found->step = step;
  found->request = requests_;
  return found->resource;
}

}  // namespace gluon_syncbn
