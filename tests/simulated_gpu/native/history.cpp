#include "history.h"

namespace simulated_gpu {

History& History::get() {
  static auto* history = new History;
  return *history;
}

void History::note(const Ranges& ranges, const Access& access, const Clock& clock) {
  std::lock_guard lock(mutex_);
  for (const Range range : ranges) {
    if (range.begin >= range.end) continue;
    split(range.begin);
    split(range.end);
    access.kind == Kind::Write ? write(range, access, clock) : read(range, access, clock);
  }
}

void History::note_race(const std::string& what) {
  std::lock_guard lock(mutex_);
  races_.push_back(what);
}

void History::forget(Range range) {
  std::lock_guard lock(mutex_);
  split(range.begin);
  split(range.end);
  cells_.erase(cells_.lower_bound(range.begin), cells_.lower_bound(range.end));
}

std::vector<std::string> History::take_races() {
  std::lock_guard lock(mutex_);
  told_.clear();
  return std::exchange(races_, {});
}

// Cuts the cell that lies across an address.
void History::split(uintptr_t at) {
  auto after = cells_.upper_bound(at);
  if (after == cells_.begin()) return;
  auto& [begin, cell] = *std::prev(after);
  if (begin == at || cell.end <= at) return;
  Cell upper = cell;
  cell.end = at;
  cells_.emplace(at, std::move(upper));
}

void History::write(Range range, const Access& access, const Clock& clock) {
  const auto first = cells_.lower_bound(range.begin), last = cells_.lower_bound(range.end);
  for (auto it = first; it != last; ++it) {
    if (it->second.write) require_order(*it->second.write, access, clock, range);
    for (const Access& read : it->second.reads) require_order(read, access, clock, range);
  }
  cells_.erase(first, last);
  cells_.emplace(range.begin, Cell{range.end, std::make_shared<const Access>(access), {}});
}

void History::read(Range range, const Access& access, const Clock& clock) {
  uintptr_t at = range.begin;
  for (auto it = cells_.lower_bound(range.begin); at < range.end; ++it) {
    const uintptr_t begin = it == cells_.end() ? range.end : std::min(it->first, range.end);
    if (at < begin) it = cells_.emplace(at, Cell{begin, nullptr, {access}}).first;  // never touched before
    Cell& cell = it->second;
    at = cell.end;
    if (cell.write) require_order(*cell.write, access, clock, range);
    const auto own = std::find_if(cell.reads.begin(), cell.reads.end(), [&](const Access& one) {
      return one.stamp.stream == access.stamp.stream;
    });
    own == cell.reads.end() ? cell.reads.push_back(access) : void(*own = access);
  }
}

void History::require_order(const Access& before, const Access& now, const Clock& clock, Range where) {
  if (clock.covers(before.stamp)) return;
  if (!told_.emplace(*before.name, *now.name).second) return;
  const auto told = [](const Access& one) { return (one.kind == Kind::Write ? "a write of " : "a read of ") + *one.name; };
  races_.push_back(
      "nothing orders " + told(before) + " and " + told(now) + ", which share some of " +
      std::to_string(where.end - where.begin) + " bytes");
}

}  // namespace simulated_gpu
