// Streams as threads: their tasks run in order, late, and beside those of other streams.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "history.h"

namespace simulated_gpu {

constexpr int kNumDevices = 4;
constexpr int kNumStreams = 32;  // of a device; the first is its default, a further request takes an old one again

// Work under way on a stream's thread.
struct Task {
  std::shared_ptr<const std::string> name;
  Stamp stamp;
  Clock clock;
  void note(const Ranges& ranges, Kind kind) const { History::get().note(ranges, {kind, stamp, name}, clock); }
};
struct Pushed {
  std::shared_ptr<const std::string> name;
  Stamp stamp;
};
using Work = std::function<void(const Task&)>;

// The task that the calling stream's thread is running; null on others.
const Task* running_task();

// What was captured in place of being run.
struct Graph {
  struct Step {
    std::string name;
    Work work;
  };
  std::vector<Step> steps;
};

struct Counts {
  std::atomic<int64_t> synchronizations{0}, launches{0}, to_device{0}, to_host{0}, within{0}, synchronous{0};
};
Counts& counts();

// What comes behind a marked task in happens-before order: launches, bytes of copies, and waits of the host.
struct Exposed {
  std::atomic<int64_t> launches{0}, bytes_to_device{0}, bytes_to_host{0}, waits{0};
};
Exposed& exposed();

class Stream;

// A point in a stream: what an event records.
struct Moment {
  Stream* stream;
  uint64_t num_tasks;
  Stamp stamp;
  Clock clock;
};

class Stream {
 public:
  static Stream& get(int device, int64_t id);
  static std::vector<Stream*> of(int device);
  static void close_all();

  Stream(int device, int64_t id);

  // Queues work, or adds it to the graph being captured. Raises the fault of the device, if it has one. Returns the
  // task's place; of a captured one, the beginning of time.
  Pushed push(const std::string& name, Work work) { return push(name, std::move(work), nullptr); }
  Moment now();
  // Makes later tasks wait. Does not block.
  void wait(const Moment& moment);
  bool is_past(const Moment& moment);
  // Blocks until a moment has come; the host then knows of all before it. Raises the fault of the device.
  void synchronize(const Moment& moment);
  void synchronize() { synchronize(now()); }

  void begin_capture(std::shared_ptr<Graph> graph);
  void end_capture();
  bool is_capturing();
  void replay(const Graph& graph);

  const int device;
  const int64_t id;

 private:
  struct Entry {
    Task task;
    Work work;
    std::shared_ptr<const Moment> after;  // what it waits for, if anything
  };
  Pushed push(const std::string& name, Work work, std::shared_ptr<const Moment> after);
  void loop();
  void run(const Entry& entry);
  void finish(uint64_t num_tasks);  // blocks, without the host's learning of it
  void wait_until_done(uint64_t num_tasks, std::unique_lock<std::mutex>& lock);
  // Runs tasks of all streams one at a time, in an order drawn from the seed, until this stream has done so many.
  void finish_in_drawn_order(uint64_t num_tasks);
  enum class Next { None, Copy, Other };
  Next next();
  void run_one();
  void close();

  const size_t index_;
  std::mutex mutex_;
  std::condition_variable changed_, done_;  // for the thread; for waiters
  std::multiset<uint64_t> awaited_;         // tasks that somebody waits for
  std::deque<Entry> entries_;
  uint64_t num_pushed_ = 0, num_done_ = 0, num_wanted_ = 0;
  Clock clock_;
  std::shared_ptr<Graph> graph_;
  bool is_closing_ = false;
  std::thread thread_;
};

// Marks the last task of a stream, and forgets what came behind an earlier mark.
void mark(const Moment& moment);
bool is_behind_mark(const Clock& clock);

// The host has seen all before `clock` end. Its threads count as one: what their own locks order is not seen here.
void host_learns(const Clock& clock);
Clock host_clock();

// Tasks start after up to so many microseconds. Of a lazy scheduler, none starts before something waits for it.
void set_delay(int64_t most_us);
void set_lazy(bool is_lazy);
// Of a seeded scheduler none does, either; then tasks of all streams run one at a time, mostly those of the latest stream
// first and copies last. The same seed, and the same program of one thread, give the same order. 0: none.
void set_seed(int64_t seed);

// A fault stays: everything that the device is asked from then on raises it, and its tasks do nothing.
void set_fault(int device, const std::string& what);
void require_sound(int device);
void repair(int device);

}  // namespace simulated_gpu
