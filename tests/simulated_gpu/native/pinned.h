// Pinned memory of the host: streams copy from and to it late, and the host must leave it alone meanwhile.
#pragma once

#include <memory>

#include "stream.h"

namespace simulated_gpu {

// A piece of it, mapped twice. From the launch of a copy until the host has waited for it, the host's mapping may not
// be written (the copy reads) or not be touched at all (the copy writes).
class Pinned {
 public:
  ~Pinned();

  static char* allocate(size_t num_bytes);
  // Pins memory that others have mapped as shared. Returns false where that cannot be done.
  static bool add(char* front, size_t num_bytes);
  static void remove(const void* front);
  static std::shared_ptr<Pinned> find(const void* address);
  static void unprotect_ended(const Clock& clock);
  // Handles a host's access to memory under copy, or to a device's: a race is noted, and the host goes on.
  static bool forgive(void* address);

  char* back(const void* address) const { return back_ + (static_cast<const char*>(address) - front_); }
  // Notes a copy to come; `kind` is what it does to this memory.
  void begin(Range range, const Access& access);

 private:
  Pinned(char* front, char* back, size_t num_bytes, bool is_own)
      : front_(front), back_(back), num_bytes_(num_bytes), is_own_(is_own) {}
  struct Use {
    Range range;
    Access access;
  };
  void protect(Range range);

  char* front_;
  char* back_;
  size_t num_bytes_;
  bool is_own_;
  std::vector<Use> uses_;
};

// Makes accesses to protected memory reports in place of the end of the process.
void install_fault_handler();

}  // namespace simulated_gpu
