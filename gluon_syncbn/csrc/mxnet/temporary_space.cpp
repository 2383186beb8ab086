#include "mxnet/temporary_space.h"

#include <algorithm>

namespace gluon_syncbn {

void Stock::add(const Resource& resource) {
  std::lock_guard<std::mutex> lock(mutex);
  buffers_.push_back({resource});
  ++size_;
}

std::optional<Buffer> Stock::take(size_t taken) {
  std::lock_guard<std::mutex> lock(mutex);
  if (buffers_.size() <= size_ / 2 && taken > 0 && taken >= size_ / 32) return std::nullopt;
  // Those that were given back come last, and may be in use.
  const auto found = std::find_if(buffers_.begin(), buffers_.end(), [](const Buffer& one) { return one.is_idle(); });
  if (found == buffers_.end()) return std::nullopt;
  const Buffer buffer = *found;
  buffers_.erase(found);
  return buffer;
}

void Stock::give_back(const std::vector<Buffer>& buffers) {
  std::lock_guard<std::mutex> lock(mutex);
  buffers_.insert(buffers_.end(), buffers.begin(), buffers.end());
}

void OpenStep::open() {
  if (!is_open_.exchange(true)) ++number_;
}

std::optional<Resource> DeviceBuffers::next(Stock& stock, const OpenStep& step, bool& is_crowded) {
  const uint64_t number = step.number();
  if (step_ != number) {
    step_ = number;
    turn_ = 0;
  }
  if (!step.is_open()) {
    if (turn_ >= kFew) turn_ = 0;
    if (turn_ >= buffers_.size()) grow(stock);
  } else {
    for (size_t tries = std::min(kTries, buffers_.size()); tries > 0; --tries) {
      Buffer& buffer = in_turn();
      if (buffer.step != step_ || buffer.is_idle()) return use(buffer);
    }
    if (grow(stock)) return use(buffers_.back());
    is_crowded = true;
  }
  if (buffers_.empty()) return std::nullopt;
  return use(in_turn());
}

Buffer& DeviceBuffers::in_turn() {
  if (turn_ >= buffers_.size()) turn_ = 0;
  return buffers_[turn_++];
}

bool DeviceBuffers::grow(Stock& stock) {
  const std::optional<Buffer> more = stock.take(buffers_.size());
  if (more) buffers_.push_back(*more);
  return more.has_value();
}

Resource DeviceBuffers::use(Buffer& buffer) {
  ++buffer.uses;
  buffer.step = step_;
  return buffer.resource;
}

std::optional<Resource> KeptBuffers::next(Stock& stock) {
  ++requests_;
  for (Kept& kept : buffers_) {
    const size_t version = kept.resource.variable->version();
    if (version != kept.version) kept.last_used = requests_;
    kept.version = version;
  }
  if (buffers_.size() < kKept) {
    if (const std::optional<Buffer> more = stock.take(buffers_.size())) {
      buffers_.push_back({more->resource, more->uses, requests_});
      return more->resource;
    }
  }
  if (buffers_.empty()) return std::nullopt;
  Kept& idle = *std::min_element(buffers_.begin(), buffers_.end(),
                                 [](const Kept& a, const Kept& b) { return a.last_used < b.last_used; });
  idle.last_used = requests_;
  return idle.resource;
}

}  // namespace gluon_syncbn
