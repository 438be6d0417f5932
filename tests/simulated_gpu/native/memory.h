// Memory of the devices: one file mapped twice. Tensors point into the front, which the host cannot touch; stream
// threads work through the back.
#pragma once

#include "stream.h"

namespace simulated_gpu {

class Memory {
 public:
  static Memory& get();

  // Takes memory of a device for a stream's next tasks, filled with NaN by the first of them. As CUDA's caching
  // allocator does, it gives freed memory at once to its stream's next allocation. Null where the limit is reached.
  char* allocate(Stream& stream, size_t num_bytes);
  void release(char* front);
  // Keeps memory from other owners until what another stream has been asked so far has ended.
  void used_by(char* front, Stream& stream);

  bool owns(const void* front) const;
  int device_of(const void* front) const;
  char* back(const void* front) const;
  char* front(const void* back) const;

  void set_limit(int device, size_t num_bytes);
  size_t limit(int device);
  size_t num_used(int device);
  // Gives the pages of free memory back to the system. All streams must have been synchronized.
  void trim();
  // Lets a host thread that has touched a page go on, for the sake of a report. False for an address elsewhere.
  bool expose(void* address);

 private:
  Memory();
  struct Block {
    size_t num_bytes;
    Stream* stream;
    bool is_captured;
    std::vector<Stream*> users;
  };
  using Place = std::tuple<int, int64_t, size_t>;  // device, stream (or that of graphs), bytes
  struct InUse {
    Place place;
    char* front;
    std::vector<Moment> uses;
  };
  void collect();

  char* front_;
  char* back_;
  int file_;
  std::mutex mutex_;
  std::map<char*, Block> blocks_;
  std::map<Place, std::vector<char*>> spare_;
  std::vector<InUse> in_use_;  // released while other streams may be at it
  size_t top_[kNumDevices] = {}, used_[kNumDevices] = {}, limit_[kNumDevices];
};

}  // namespace simulated_gpu
