// The device as torch knows it: current devices and streams, events, allocators.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "guard.h"
#include "memory.h"
#include "pinned.h"

namespace simulated_gpu {
namespace {

thread_local int current_device = 0;
thread_local int64_t current_streams[kNumDevices] = {};
std::atomic<int64_t> num_streams[kNumDevices];

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
c10::Stream as_torch(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(device)), id);
}
Stream& as_own(const c10::Stream& stream) { return Stream::get(index_of(stream.device()), stream.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index_of(device) < kNumDevices, "there is no device ", device, ": there are ", kNumDevices);
    current_device = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return as_torch(index_of(device), current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_torch(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return as_torch(index_of(device), 1 + num_streams[index_of(device)]++ % (kNumStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[index_of(stream.device())] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return is_past(as_own(stream).now()); }
  void synchronizeStream(const c10::Stream& stream) const override { as_own(stream).synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (Stream* stream : Stream::of(device)) stream->synchronize();
  }
  bool isStreamCapturing(const c10::Stream& stream) const override { return as_own(stream).is_capturing(); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<Moment*>(*event);
    *event = new Moment(as_own(stream).now());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) as_own(stream).wait(*static_cast<Moment*>(event));
  }
  bool queryEvent(void* event) const override { return !event || is_past(*static_cast<Moment*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) static_cast<Moment*>(event)->stream->synchronize(*static_cast<Moment*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Memory::get().used_by(static_cast<char*>(data.get()), as_own(stream));
  }

  static bool is_past(const Moment& moment) {
    const bool is_past = moment.stream->is_past(moment);
    if (is_past) host_learns(moment.clock);
    return is_past;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct DeviceAllocator final : c10::Allocator {
  static void release(void* pointer) {
    if (pointer) Memory::get().release(static_cast<char*>(pointer));
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(current_device));
    if (num_bytes == 0) return {nullptr, nullptr, &release, device};
    Stream& stream = current_stream(current_device);
    char* front = Memory::get().allocate(stream, num_bytes);
    TORCH_CHECK_WITH(
        OutOfMemoryError, front, "out of memory on ", device, ": ", num_bytes, " bytes asked, ",
        Memory::get().num_used(current_device), " of ", Memory::get().limit(current_device), " in use");
    return {front, front, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    Stream& stream = current_stream(Memory::get().device_of(target));
    stream.push("a copy of storages", [=](const Task&) {
      std::memcpy(Memory::get().back(target), Memory::get().back(source), num_bytes);
    });
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator)

struct PinnedAllocator final : c10::Allocator {
  static void release(void* pointer) {
    if (pointer) Pinned::remove(pointer);
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    char* front = num_bytes ? Pinned::allocate(num_bytes) : nullptr;
    TORCH_CHECK(front || !num_bytes, "no host memory for ", num_bytes, " pinned bytes");
    return {front, front, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
};
PinnedAllocator pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return Pinned::find(pointer) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void* pointer) const override {
    return {kType, static_cast<c10::DeviceIndex>(Memory::get().device_of(pointer))};
  }
};
const bool are_hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

Stream& current_stream(int device) { return Stream::get(device, current_streams[device]); }
c10::Allocator* allocator() { return &device_allocator; }

}  // namespace simulated_gpu
