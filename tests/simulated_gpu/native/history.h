// The last write and the reads since then of every byte, and the pairs of accesses that nothing orders.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>

#include <string>
#include <utility>
#include <vector>

#include "clock.h"

namespace simulated_gpu {

struct Range {
  uintptr_t begin, end;
};
using Ranges = std::vector<Range>;
enum class Kind { Read, Write };

struct Access {
  Kind kind;
  Stamp stamp;
  std::shared_ptr<const std::string> name;  // of the task, with its stream
};

// A task notes its accesses when it runs. Whichever of two comes later finds the other: so a missing wait is found in
// whatever order they run.
class History {
 public:
  static History& get();
  // Notes accesses of a task whose clock is `clock`; races are kept until they are taken.
  void note(const Ranges& ranges, const Access& access, const Clock& clock);
  void note_race(const std::string& what);
  void forget(Range range);
  std::vector<std::string> take_races();

 private:
  struct Cell {
    uintptr_t end;
    std::shared_ptr<const Access> write;
    std::vector<Access> reads;  // the last of each stream
  };
  using Cells = std::map<uintptr_t, Cell>;
  void split(uintptr_t at);
  void write(Range range, const Access& access, const Clock& clock);
  void read(Range range, const Access& access, const Clock& clock);
  void require_order(const Access& before, const Access& now, const Clock& clock, Range where);

  std::mutex mutex_;
  Cells cells_;
  std::vector<std::string> races_;
  std::set<std::pair<std::string, std::string>> told_;
};

}  // namespace simulated_gpu
