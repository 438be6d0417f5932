// What tests ask of the devices, as torch.ops.simulated_gpu.
#include <torch/library.h>

#include "footprint.h"
#include "guard.h"
#include "memory.h"
#include "pinned.h"

namespace simulated_gpu {
namespace {

auto& graphs_mutex = *new std::mutex;
auto& graphs = *new std::map<int64_t, std::shared_ptr<Graph>>;
int64_t num_graphs = 0;

Stream& own(int64_t device) { return current_stream(static_cast<int>(device)); }

int64_t begin_capture(int64_t device) {
  std::lock_guard lock(graphs_mutex);
  const auto graph = graphs[++num_graphs] = std::make_shared<Graph>();
  own(device).begin_capture(graph);
  return num_graphs;
}
void replay(int64_t device, int64_t graph) {
  std::shared_ptr<Graph> found;
  {
    std::lock_guard lock(graphs_mutex);
    found = graphs.at(graph);
  }
  own(device).replay(*found);
}
void drop(int64_t graph) {
  std::lock_guard lock(graphs_mutex);
  graphs.erase(graph);
}

// Queues a call of C, which tells of its failures by `fail`.
void enqueue(int64_t device, int64_t call, const std::string& name) {
  auto* function = reinterpret_cast<void (*)()>(call);
  ++counts().launches;
  own(device).push(name, [=](const Task&) { function(); });
}

// Notes that the running task reads or writes items at these addresses of the accessible mapping.
void touch(const at::Tensor& addresses, int64_t item_bytes, bool is_write) {
  const Task* task = running_task();
  if (!task || addresses.numel() == 0) return;
  const auto* first = addresses.const_data_ptr<int64_t>();
  std::vector<int64_t> sorted(first, first + addresses.numel());
  std::sort(sorted.begin(), sorted.end());
  Ranges ranges;
  for (const int64_t one : sorted) {
    const auto at = reinterpret_cast<uintptr_t>(Memory::get().front(reinterpret_cast<void*>(one)));
    TORCH_CHECK(at, "a kernel touches an address that is not the device's");
    const uintptr_t end = at + static_cast<uintptr_t>(item_bytes);
    if (!ranges.empty() && at <= ranges.back().end) {
      ranges.back().end = std::max(ranges.back().end, end);
    } else {
      ranges.push_back({at, end});
    }
  }
  task->note(ranges, is_write ? Kind::Write : Kind::Read);
}

std::vector<int64_t> all_counts() {
  const Counts& all = counts();
  return {all.synchronizations, all.launches, all.to_device, all.to_host, all.within, all.synchronous};
}

TORCH_LIBRARY(simulated_gpu, m) {
  install_fault_handler();
  m.def("accessible", &accessible);
  m.def("counts", &all_counts);
  m.def("mark", [](int64_t device) { mark(own(device).now()); });
  m.def("exposed", [] {
    const Exposed& all = exposed();
    return std::vector<int64_t>{all.launches, all.bytes_to_device, all.bytes_to_host, all.waits};
  });
  m.def("races", [] { return History::get().take_races(); });
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", [](int64_t device) { own(device).end_capture(); });
  m.def("replay", &replay);
  m.def("drop", &drop);
  m.def("enqueue", &enqueue);
  m.def("touch", &touch);
  m.def("pin", [](int64_t address, int64_t num_bytes) {
    return Pinned::add(reinterpret_cast<char*>(address), static_cast<size_t>(num_bytes));
  });
  m.def("unpin", [](int64_t address) { Pinned::remove(reinterpret_cast<char*>(address)); });
  m.def("set_delay", &set_delay);
  m.def("set_lazy", &set_lazy);
  m.def("set_seed", &set_seed);
  m.def("set_limit", [](int64_t device, int64_t num_bytes) {
    Memory::get().set_limit(static_cast<int>(device), static_cast<size_t>(num_bytes));
  });
  m.def("num_used", [](int64_t device) { return static_cast<int64_t>(Memory::get().num_used(static_cast<int>(device))); });
  m.def("fail", [](int64_t device, const std::string& what) { set_fault(static_cast<int>(device), what); });
  m.def("repair", [](int64_t device) { repair(static_cast<int>(device)); });
  m.def("trim", [] { Memory::get().trim(); });
  m.def("close", &Stream::close_all);
}

}  // namespace
}  // namespace simulated_gpu
