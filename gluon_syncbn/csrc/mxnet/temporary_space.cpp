#include "mxnet/temporary_space.h"

#include <algorithm>

namespace gluon_syncbn {
namespace {

constexpr uint64_t kAlone = 0, kClosed = ~uint64_t{0};

}  // namespace

void Stock::add(const Resource& buffer) {
  std::lock_guard<std::mutex> lock(mutex);
  buffers_.push_back(buffer);
  ++size_;
}

std::optional<Resource> Stock::take(size_t taken) {
  std::lock_guard<std::mutex> lock(mutex);
  if (buffers_.empty() || (buffers_.size() <= size_ / 2 && taken > 0 && taken >= size_ / 32)) return std::nullopt;
  const Resource buffer = buffers_.back();
  buffers_.pop_back();
  return buffer;
}

void OpenStep::open() {
  if (!is_open_.exchange(true)) ++number_;
}

std::optional<Resource> DeviceBuffers::next(Stock& stock, const OpenStep& step, uint64_t call, bool& is_crowded) {
  const bool is_open = step.is_open();
  if (!is_open) call = kClosed;
  const uint64_t number = step.number();
  const bool is_new = step_ != number;
  if (is_new) {
    step_ = number;
    turn_ = 0;
  }
  if (is_new || call != call_ || call == kAlone) {
    call_ = call;
    used_by_call_.clear();
    turn_in_call_ = 0;
  }
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
  return buffer.resource;
}

std::optional<size_t> DeviceBuffers::unused(Stock& stock) {
  for (size_t tries = std::min(kTries, buffers_.size()); tries > 0; --tries) {
    const size_t at = in_turn();
    if (buffers_[at].step != step_ || buffers_[at].is_idle()) return at;
  }
  return one_more(stock);
}

std::optional<size_t> DeviceBuffers::one_more(Stock& stock) {
  const std::optional<Resource> more = stock.take(buffers_.size());
  if (!more) return std::nullopt;
  buffers_.push_back({*more});
  return buffers_.size() - 1;
}

size_t DeviceBuffers::in_turn() {
  if (turn_ >= buffers_.size()) turn_ = 0;
  return turn_++;
}

std::optional<Resource> KeptBuffers::next(Stock& stock) {
  ++requests_;
  for (Kept& kept : buffers_) {
    const size_t version = kept.resource.variable->version();
    if (version != kept.version) kept.last_used = requests_;
    kept.version = version;
  }
  if (buffers_.size() < kKept) {
    if (const std::optional<Resource> more = stock.take(buffers_.size())) {
      buffers_.push_back({*more, 0, requests_});
      return *more;
    }
  }
  if (buffers_.empty()) return std::nullopt;
  Kept& idle = *std::min_element(buffers_.begin(), buffers_.end(),
                                 [](const Kept& a, const Kept& b) { return a.last_used < b.last_used; });
  idle.last_used = requests_;
  return idle.resource;
}

}  // namespace gluon_syncbn
