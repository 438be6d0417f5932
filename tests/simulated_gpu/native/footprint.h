// The bytes that an operator touches, as addresses that tensors have.
#pragma once

#include <ATen/core/Tensor.h>

#include "history.h"

namespace simulated_gpu {

// A tensor of the host over the same memory by its accessible mapping: of a device, or pinned.
at::Tensor accessible(const at::Tensor& tensor);
// Adds the bytes of a tensor's elements; a tensor in very many pieces counts from its first byte to its last.
void add_bytes(const at::Tensor& tensor, Ranges& ranges);
// Adds the bytes of the elements that index tensors choose, where they are of integers of one shape; else of all.
// Reads the indices: to be called when they have been computed.
void add_chosen_bytes(
    const at::Tensor& tensor, const std::vector<std::pair<int64_t, at::Tensor>>& dim_to_index, Ranges& ranges);

}  // namespace simulated_gpu
