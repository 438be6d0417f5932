#include "pinned.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory.h"

namespace simulated_gpu {
namespace {

constexpr uintptr_t kPage = 4096;
auto& pieces_mutex = *new std::recursive_mutex;
auto& pieces = *new std::map<const char*, std::shared_ptr<Pinned>>;
struct sigaction before;

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

void on_fault(int, siginfo_t* info, void*) {
  if (!Pinned::forgive(info->si_addr)) sigaction(SIGSEGV, &before, nullptr);  // it faults again, and ends as it would
}

}  // namespace

Pinned::~Pinned() {
  History::get().forget({number(front_), number(front_) + num_bytes_});
  if (is_own_) munmap(front_, num_bytes_);
  munmap(back_, num_bytes_);
}

char* Pinned::allocate(size_t num_bytes) {
  const size_t rounded = (num_bytes + kPage - 1) / kPage * kPage;
  void* front = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (front == MAP_FAILED) return nullptr;
  void* back = mremap(front, 0, rounded, MREMAP_MAYMOVE);
  std::lock_guard lock(pieces_mutex);
  pieces[static_cast<char*>(front)].reset(
      new Pinned(static_cast<char*>(front), static_cast<char*>(back), rounded, true));
  return static_cast<char*>(front);
}

bool Pinned::add(char* front, size_t num_bytes) {
  if (number(front) % kPage != 0 || find(front) || find(front + num_bytes - 1)) return false;
  const size_t rounded = (num_bytes + kPage - 1) / kPage * kPage;
  void* back = mremap(front, 0, rounded, MREMAP_MAYMOVE);  // a second mapping of shared memory
  if (back == MAP_FAILED) return false;
  std::lock_guard lock(pieces_mutex);
  pieces[front].reset(new Pinned(front, static_cast<char*>(back), rounded, false));
  return true;
}

void Pinned::remove(const void* front) {
  std::shared_ptr<Pinned> piece;
  std::lock_guard lock(pieces_mutex);
  const auto found = pieces.find(static_cast<const char*>(front));
  if (found == pieces.end()) return;
  piece = found->second;  // tasks under way keep it, too
  pieces.erase(found);
  mprotect(piece->front_, piece->num_bytes_, PROT_READ | PROT_WRITE);
}

std::shared_ptr<Pinned> Pinned::find(const void* address) {
  std::lock_guard lock(pieces_mutex);
  const auto* at = static_cast<const char*>(address);
  auto after = pieces.upper_bound(at);
  if (after == pieces.begin()) return nullptr;
  const auto& piece = std::prev(after)->second;
  return at < piece->front_ + piece->num_bytes_ ? piece : nullptr;
}

void Pinned::begin(Range range, const Access& access) {
  std::lock_guard lock(pieces_mutex);
  uses_.push_back({range, access});
  protect(range);
}

// Gives the pages of a range the rights that their uses leave.
void Pinned::protect(Range range) {
  for (uintptr_t page = range.begin / kPage * kPage; page < range.end; page += kPage) {
    int rights = PROT_READ | PROT_WRITE;
    for (const Use& use : uses_) {
      if (use.range.begin < page + kPage && page < use.range.end) {
        rights = std::min(rights, use.access.kind == Kind::Write ? PROT_NONE : PROT_READ);
      }
    }
    mprotect(reinterpret_cast<void*>(page), kPage, rights);
  }
}

void Pinned::unprotect_ended(const Clock& clock) {
  std::lock_guard lock(pieces_mutex);
  for (auto& [front, piece] : pieces) {
    auto& uses = piece->uses_;
    const auto ended = std::stable_partition(
        uses.begin(), uses.end(), [&](const Use& use) { return !clock.covers(use.access.stamp); });
    const std::vector<Use> gone(ended, uses.end());
    uses.erase(ended, uses.end());
    for (const Use& use : gone) piece->protect(use.range);
  }
}

bool Pinned::forgive(void* address) {
  if (Memory::get().expose(address)) {
    History::get().note_race(
        "the host touched memory of sim:" + std::to_string(Memory::get().device_of(address)));
    return true;
  }
  const auto piece = find(address);
  if (!piece) return false;
  std::lock_guard lock(pieces_mutex);
  const uintptr_t at = number(address), page = at / kPage * kPage;
  for (const Use& use : piece->uses_) {
    if (use.range.begin <= at && at < use.range.end) {
      const bool is_read = use.access.kind == Kind::Read;
      History::get().note_race(
          std::string(is_read ? "the host wrote to" : "the host touched") + " pinned memory that " + *use.access.name +
          (is_read ? " reads" : " writes") + ", without waiting for it");
      break;
    }
  }
  mprotect(reinterpret_cast<void*>(page), kPage, PROT_READ | PROT_WRITE);
  return true;
}

void install_fault_handler() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before);
}

}  // namespace simulated_gpu
