#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

namespace simulated_gpu {
namespace {

constexpr size_t kSpan = size_t(64) << 30;  // addresses of a device; few have memory behind them
constexpr size_t kLimit = size_t(2) << 30;
constexpr size_t kAlignment = 4096;  // so that two blocks share no page, and a page exposed is one block's
constexpr int64_t kOfGraphs = -1;    // all graphs share what they free: one runs at a time

}  // namespace

Memory& Memory::get() {
  static auto* memory = new Memory;
  return *memory;
}

Memory::Memory() : file_(memfd_create("simulated_gpu", MFD_CLOEXEC)) {
  if (file_ < 0 || ftruncate(file_, kNumDevices * kSpan) != 0) throw std::runtime_error("no memory file");
  const auto map = [&](int access) {
    void* mapped = mmap(nullptr, kNumDevices * kSpan, access, MAP_SHARED | MAP_NORESERVE, file_, 0);
    if (mapped == MAP_FAILED) throw std::runtime_error("the memory of the devices cannot be mapped");
    return static_cast<char*>(mapped);
  };
  front_ = map(PROT_NONE);
  back_ = map(PROT_READ | PROT_WRITE);
  std::fill(limit_, limit_ + kNumDevices, kLimit);
}

char* Memory::allocate(Stream& stream, size_t num_bytes) {
  const size_t rounded = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  const bool is_captured = stream.is_capturing();
  char* found = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (used_[stream.device] + rounded > limit_[stream.device]) return nullptr;
    collect();
    auto& spare = spare_[{stream.device, is_captured ? kOfGraphs : stream.id, rounded}];
    if (!spare.empty()) {
      found = spare.back();
      spare.pop_back();
    } else {
      if (top_[stream.device] + rounded > kSpan) return nullptr;
      found = front_ + stream.device * kSpan + top_[stream.device];
      top_[stream.device] += rounded;
    }
    used_[stream.device] += rounded;
    blocks_[found] = {rounded, &stream, is_captured, {}};
  }
  stream.push("the allocation of " + std::to_string(num_bytes) + " bytes", [this, found, num_bytes](const Task& task) {
    const auto begin = reinterpret_cast<uintptr_t>(found);
    task.note({{begin, begin + num_bytes}}, Kind::Write);
    std::memset(back(found), 0xFF, num_bytes);
  });
  return found;
}

void Memory::release(char* front) {
  std::lock_guard lock(mutex_);
  const auto found = blocks_.find(front);
  if (found == blocks_.end()) return;
  const Block block = found->second;
  blocks_.erase(found);
  used_[block.stream->device] -= block.num_bytes;
  const Place place{block.stream->device, block.is_captured ? kOfGraphs : block.stream->id, block.num_bytes};
  if (block.users.empty()) {
    spare_[place].push_back(front);
  } else {
    std::vector<Moment> uses;
    for (Stream* user : block.users) uses.push_back(user->now());
    in_use_.push_back({place, front, std::move(uses)});
  }
}

// Makes memory spare that other streams have done with, which the host finds by asking their events.
void Memory::collect() {
  for (auto it = in_use_.begin(); it != in_use_.end();) {
    const bool has_ended =
        std::all_of(it->uses.begin(), it->uses.end(), [](const Moment& use) { return use.stream->is_past(use); });
    if (!has_ended) {
      ++it;
      continue;
    }
    for (const Moment& use : it->uses) host_learns(use.clock);
    spare_[it->place].push_back(it->front);
    it = in_use_.erase(it);
  }
}

void Memory::used_by(char* front, Stream& stream) {
  std::lock_guard lock(mutex_);
  const auto found = blocks_.find(front);
  if (found != blocks_.end() && found->second.stream != &stream) found->second.users.push_back(&stream);
}

bool Memory::owns(const void* front) const {
  return front >= front_ && front < front_ + kNumDevices * kSpan;
}
int Memory::device_of(const void* front) const {
  return static_cast<int>((static_cast<const char*>(front) - front_) / kSpan);
}
char* Memory::back(const void* front) const { return back_ + (static_cast<const char*>(front) - front_); }
char* Memory::front(const void* back) const {
  const auto* at = static_cast<const char*>(back);
  return at >= back_ && at < back_ + kNumDevices * kSpan ? front_ + (at - back_) : nullptr;
}

void Memory::set_limit(int device, size_t num_bytes) {
  std::lock_guard lock(mutex_);
  limit_[device] = num_bytes;
}
size_t Memory::limit(int device) {
  std::lock_guard lock(mutex_);
  return limit_[device];
}
size_t Memory::num_used(int device) {
  std::lock_guard lock(mutex_);
  return used_[device];
}

void Memory::trim() {
  std::lock_guard lock(mutex_);
  for (const auto& [place, fronts] : spare_) {
    for (char* one : fronts) {
      const auto size = static_cast<off_t>(std::get<size_t>(place));
      fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, one - front_, size);
      const auto begin = reinterpret_cast<uintptr_t>(one);
      History::get().forget({begin, begin + static_cast<uintptr_t>(size)});
    }
  }
}

bool Memory::expose(void* address) {
  if (!owns(address)) return false;
  const auto page = reinterpret_cast<uintptr_t>(address) / kAlignment * kAlignment;
  mprotect(reinterpret_cast<void*>(page), kAlignment, PROT_READ | PROT_WRITE);
  return true;
}

}  // namespace simulated_gpu
