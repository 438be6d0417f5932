// Vector clocks: what has happened before what, among streams and the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace simulated_gpu {

// The place of a task among those of its stream.
struct Stamp {
  size_t stream;
  uint64_t time;
};

// How far into each stream a point has everything behind it. The host has a clock, too, but no tasks.
class Clock {
 public:
  Stamp tick(size_t stream) {
    reserve(stream);
    return {stream, ++times_[stream]};
  }
  void join(const Clock& other) {
    if (!other.times_.empty()) reserve(other.times_.size() - 1);
    for (size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }
  bool covers(Stamp stamp) const {
    return stamp.time == 0 || (stamp.stream < times_.size() && times_[stamp.stream] >= stamp.time);
  }

 private:
  void reserve(size_t stream) {
    if (times_.size() <= stream) times_.resize(stream + 1);
  }
  std::vector<uint64_t> times_;
};

}  // namespace simulated_gpu
