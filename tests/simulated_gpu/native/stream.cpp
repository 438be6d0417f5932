#include "stream.h"

#include <chrono>
#include <random>
#include <stdexcept>

#include "pinned.h"

namespace simulated_gpu {
namespace {

std::atomic<int64_t> delay_us{0};
std::atomic<bool> is_lazy{false};
std::atomic<bool> is_seeded{false};
thread_local const Task* running = nullptr;

// Never destroyed: Python may free tensors after the statics are gone.
auto& all_mutex = *new std::mutex;
auto& all = *new std::map<std::pair<int, int64_t>, std::unique_ptr<Stream>>;
auto& order_mutex = *new std::mutex;  // held by the thread that chooses tasks
auto& order = *new std::minstd_rand;
auto& host_mutex = *new std::mutex;
auto& host = *new Clock;
auto& fault_mutex = *new std::mutex;
std::string faults[kNumDevices];

std::string fault_of(int device) {
  std::lock_guard lock(fault_mutex);
  return faults[device];
}

}  // namespace

const Task* running_task() { return running; }

namespace {
auto& mark_mutex = *new std::mutex;
Stamp marked{0, 0};
}  // namespace

Exposed& exposed() {
  static auto* all = new Exposed;
  return *all;
}

void mark(const Moment& moment) {
  std::lock_guard lock(mark_mutex);
  marked = moment.stamp;
  Exposed& all = exposed();
  all.launches = all.bytes_to_device = all.bytes_to_host = all.waits = 0;
}

bool is_behind_mark(const Clock& clock) {
  std::lock_guard lock(mark_mutex);
  return marked.time && clock.covers(marked);
}

Counts& counts() {
  static auto* all_counts = new Counts;
  return *all_counts;
}

void host_learns(const Clock& clock) {
  {
    std::lock_guard lock(host_mutex);
    host.join(clock);
  }
  Pinned::unprotect_ended(host_clock());
}
Clock host_clock() {
  std::lock_guard lock(host_mutex);
  return host;
}

void set_delay(int64_t most_us) { delay_us = most_us; }
void set_lazy(bool wanted) { is_lazy = wanted; }
void set_seed(int64_t seed) {
  std::lock_guard lock(order_mutex);
  order.seed(static_cast<unsigned>(seed));
  is_seeded = is_lazy = seed != 0;
}

void set_fault(int device, const std::string& what) {
  std::lock_guard lock(fault_mutex);
  if (faults[device].empty()) faults[device] = what;
}
void require_sound(int device) {
  const std::string fault = fault_of(device);
  if (!fault.empty()) throw std::runtime_error("device sim:" + std::to_string(device) + " has failed: " + fault);
}
void repair(int device) {
  for (Stream* stream : Stream::of(device)) {
    try {
      stream->synchronize();
    } catch (const std::runtime_error&) {  // the fault itself
    }
  }
  std::lock_guard lock(fault_mutex);
  faults[device].clear();
}

Stream& Stream::get(int device, int64_t id) {
  std::lock_guard lock(all_mutex);
  auto& stream = all[{device, id}];
  if (!stream) stream = std::make_unique<Stream>(device, id);
  return *stream;
}
std::vector<Stream*> Stream::of(int device) {
  std::lock_guard lock(all_mutex);
  std::vector<Stream*> found;
  for (auto& [place, stream] : all) {
    if (place.first == device) found.push_back(stream.get());
  }
  return found;
}
void Stream::close_all() {
  for (int device = 0; device < kNumDevices; ++device) {
    for (Stream* stream : of(device)) stream->close();
  }
}

Stream::Stream(int its_device, int64_t its_id)
    : device(its_device), id(its_id), index_(static_cast<size_t>(its_device * kNumStreams + its_id)) {
  thread_ = std::thread([this] { loop(); });
}

void Stream::close() {
  {
    std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Pushed Stream::push(const std::string& name, Work work, std::shared_ptr<const Moment> after) {
  require_sound(device);
  std::unique_lock lock(mutex_);
  if (graph_) {
    graph_->steps.push_back({name, std::move(work)});
    return {nullptr, {index_, 0}};
  }
  clock_.join(host_clock());
  const bool is_launch = !after && name.find("copy") == std::string::npos && name.find("the allocation") != 0;
  if (is_launch && is_behind_mark(clock_)) ++exposed().launches;
  const Stamp stamp = clock_.tick(index_);
  auto told = std::make_shared<const std::string>(
      name + " (sim:" + std::to_string(device) + ", stream " + std::to_string(id) + ")");
  entries_.push_back({{told, stamp, clock_}, std::move(work), std::move(after)});
  ++num_pushed_;
  lock.unlock();
  if (!is_lazy) changed_.notify_all();
  return {told, stamp};
}

Moment Stream::now() {
  std::lock_guard lock(mutex_);
  return {this, num_pushed_, {index_, num_pushed_}, clock_};
}

void Stream::wait(const Moment& moment) {
  if (moment.stream == this) return;
  {
    std::lock_guard lock(mutex_);
    if (graph_) throw std::runtime_error("a wait for another stream cannot be captured");
    clock_.join(moment.clock);
  }
  push("a wait", [moment](const Task&) { moment.stream->finish(moment.num_tasks); },
       std::make_shared<const Moment>(moment));
}

bool Stream::is_past(const Moment& moment) {
  std::lock_guard lock(mutex_);
  return num_done_ >= moment.num_tasks;
}

void Stream::synchronize(const Moment& moment) {
  if (is_capturing()) throw std::runtime_error("a synchronization cannot be captured");
  if (!host_clock().covers(moment.stamp)) {
    ++counts().synchronizations;
    if (is_behind_mark(moment.clock)) ++exposed().waits;
  }
  moment.stream->finish(moment.num_tasks);
  host_learns(moment.clock);
  require_sound(device);
}

void Stream::finish(uint64_t num_tasks) {
  if (is_seeded && !running) finish_in_drawn_order(num_tasks);
  std::unique_lock lock(mutex_);
  wait_until_done(num_tasks, lock);
}

// Asks for a task and blocks until it is done. The thread notifies only when a task in `awaited_` is done.
void Stream::wait_until_done(uint64_t num_tasks, std::unique_lock<std::mutex>& lock) {
  num_wanted_ = std::max(num_wanted_, num_tasks);
  const auto place = awaited_.insert(num_tasks);
  changed_.notify_all();
  done_.wait(lock, [&] { return num_done_ >= num_tasks || is_closing_; });
  awaited_.erase(place);
}

void Stream::finish_in_drawn_order(uint64_t num_tasks) {
  std::lock_guard choosing(order_mutex);
  while (!is_past({this, num_tasks, {}, {}})) {
    std::vector<std::pair<Stream*, Next>> ready;
    for (int device = kNumDevices - 1; device >= 0; --device) {
      const auto streams = of(device);
      for (auto one = streams.rbegin(); one != streams.rend(); ++one) {
        if (const Next next = (*one)->next(); next != Next::None) ready.push_back({*one, next});
      }
    }
    if (ready.empty()) return;  // the process ends
    Stream* chosen = ready.front().first;
    for (const auto& [stream, next] : ready) {
      chosen = stream;
      if (order() % 8 < (next == Next::Copy ? 1 : 5)) break;
    }
    chosen->run_one();
  }
}

Stream::Next Stream::next() {
  std::shared_ptr<const Moment> after;
  bool is_copy;
  {
    std::lock_guard lock(mutex_);
    if (entries_.empty() || is_closing_) return Next::None;
    after = entries_.front().after;
    is_copy = entries_.front().task.name->find("copy") != std::string::npos;
  }
  if (after && !after->stream->is_past(*after)) return Next::None;
  return is_copy ? Next::Copy : Next::Other;
}

void Stream::run_one() {
  std::unique_lock lock(mutex_);
  wait_until_done(num_done_ + 1, lock);
}

void Stream::begin_capture(std::shared_ptr<Graph> graph) {
  std::lock_guard lock(mutex_);
  graph_ = std::move(graph);
}
void Stream::end_capture() {
  std::lock_guard lock(mutex_);
  graph_.reset();
}
bool Stream::is_capturing() {
  std::lock_guard lock(mutex_);
  return graph_ != nullptr;
}
void Stream::replay(const Graph& graph) {
  ++counts().launches;
  for (const auto& step : graph.steps) push(step.name + " of a graph", step.work);
}

void Stream::loop() {
  std::minstd_rand random(static_cast<unsigned>(index_ + 1));
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] {
      return is_closing_ || (!entries_.empty() && (!is_lazy || num_done_ < num_wanted_));
    });
    if (is_closing_) break;
    const Entry entry = std::move(entries_.front());
    entries_.pop_front();
    lock.unlock();
    if (const int64_t most = delay_us) std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
    run(entry);
    lock.lock();
    if (awaited_.contains(++num_done_)) done_.notify_all();
  }
  done_.notify_all();
}

void Stream::run(const Entry& entry) {
  if (!fault_of(device).empty()) return;
  running = &entry.task;
  try {
    entry.work(entry.task);
  } catch (const std::exception& error) {
    const std::string what = error.what();
    set_fault(device, *entry.task.name + ": " + what.substr(0, what.find('\n')));  // without torch's stack
  }
  running = nullptr;
}

}  // namespace simulated_gpu
