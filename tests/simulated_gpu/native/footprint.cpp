#include "footprint.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "memory.h"
#include "pinned.h"

namespace simulated_gpu {
namespace {

constexpr int64_t kMostPieces = 1 << 14;

void add_pieces(
    uintptr_t at, const std::vector<std::pair<int64_t, int64_t>>& strides_and_sizes, size_t dim, int64_t run,
    Ranges& ranges) {
  if (dim == strides_and_sizes.size()) {
    ranges.push_back({at, at + static_cast<uintptr_t>(run)});
    return;
  }
  const auto [stride, size] = strides_and_sizes[dim];
  for (int64_t i = 0; i < size; ++i) add_pieces(at + static_cast<uintptr_t>(i * stride), strides_and_sizes, dim + 1, run, ranges);
}

}  // namespace

at::Tensor accessible(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().device(at::kCPU).dtype(tensor.scalar_type());
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  char* back = nullptr;
  if (tensor.is_privateuseone()) {
    back = Memory::get().back(tensor.data_ptr());
  } else if (const auto piece = Pinned::find(tensor.data_ptr())) {
    back = piece->back(tensor.data_ptr());
  } else {
    return tensor;
  }
  return at::from_blob(back, tensor.sizes(), tensor.strides(), options);
}

void add_bytes(const at::Tensor& tensor, Ranges& ranges) {
  if (tensor.numel() == 0) return;
  const auto at = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  std::vector<std::pair<int64_t, int64_t>> outer;  // strides in bytes and sizes, the largest stride first
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) != 0) {
      outer.emplace_back(tensor.stride(dim) * tensor.itemsize(), tensor.size(dim));
    }
  }
  std::sort(outer.rbegin(), outer.rend());
  int64_t run = tensor.itemsize(), num_pieces = 1;
  while (!outer.empty() && outer.back().first <= run) {
    run += outer.back().first * (outer.back().second - 1);
    outer.pop_back();
  }
  int64_t end = run;
  for (const auto& [stride, size] : outer) {
    num_pieces *= size;
    end += stride * (size - 1);
  }
  if (num_pieces > kMostPieces) {
    ranges.push_back({at, at + static_cast<uintptr_t>(end)});
  } else {
    add_pieces(at, outer, 0, run, ranges);
  }
}

void add_chosen_bytes(
    const at::Tensor& tensor, const std::vector<std::pair<int64_t, at::Tensor>>& dim_to_index, Ranges& ranges) {
  const at::Tensor& first = dim_to_index.front().second;
  for (const auto& [dim, index] : dim_to_index) {
    const bool is_counted = index.scalar_type() == at::kLong || index.scalar_type() == at::kInt;
    if (!is_counted || index.sizes() != first.sizes()) return add_bytes(tensor, ranges);
  }
  std::vector<at::Tensor> values;
  for (const auto& [dim, index] : dim_to_index) values.push_back(accessible(index).to(at::kLong).flatten().contiguous());
  for (int64_t i = 0; i < first.numel(); ++i) {
    // By hand: a view of the host over memory that it cannot touch.
    auto sizes = tensor.sizes().vec();
    int64_t offset = 0;
    for (size_t k = 0; k < values.size(); ++k) {
      const int64_t dim = dim_to_index[k].first, value = values[k].const_data_ptr<int64_t>()[i];
      offset += (value < 0 ? value + tensor.size(dim) : value) * tensor.stride(dim);
      sizes[static_cast<size_t>(dim)] = 1;
    }
    const auto options = at::TensorOptions().device(at::kCPU).dtype(tensor.scalar_type());
    add_bytes(
        at::from_blob(
            static_cast<char*>(tensor.data_ptr()) + offset * tensor.itemsize(), sizes, tensor.strides(), options),
        ranges);
  }
}

}  // namespace simulated_gpu
