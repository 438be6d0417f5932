// The device as torch knows it: current devices and streams, events, allocators.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "stream.h"

namespace simulated_gpu {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// The calling thread's current stream of a device.
Stream& current_stream(int device);
// Memory of the calling thread's current device, for its current stream.
c10::Allocator* allocator();

}  // namespace simulated_gpu
