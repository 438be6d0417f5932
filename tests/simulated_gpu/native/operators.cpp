// Operators: shapes from their Meta kernels at once, values by their CPU kernels later, on a stream's thread.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include "footprint.h"
#include "guard.h"
#include "memory.h"
#include "pinned.h"

namespace simulated_gpu {
namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

at::Tensor twin(const at::Tensor& one, c10::Device device) {
  return at::empty_strided(one.sizes(), one.strides(), at::TensorOptions().device(device).dtype(one.scalar_type()));
}

template <class F>
IValue map_tensors(const IValue& value, F f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const auto& one : value.toTensorVector()) mapped.push_back(f(one));
    return IValue(mapped);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const auto& one : value.toOptionalTensorVector()) {
      mapped.push_back(one.has_value() && one->defined() ? std::optional<at::Tensor>(f(*one)) : std::nullopt);
    }
    return IValue(mapped);
  }
  return value;
}
template <class F>
void each_tensor(const IValue& value, F f) {
  map_tensors(value, [&](const at::Tensor& one) {
    f(one);
    return one;
  });
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// Pageable memory is read at once, and written before the call returns; pinned memory late, if the caller wants that.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (self.numel() == 0) return target;
  const bool to_device = target.is_privateuseone(), from_device = self.is_privateuseone();
  Stream& stream = current_stream(from_device ? self.device().index() : target.device().index());
  Stream& other = current_stream(to_device ? target.device().index() : self.device().index());
  stream.wait(other.now());
  const at::Tensor& on_host = to_device ? self : target;
  const auto piece = to_device && from_device ? nullptr : Pinned::find(on_host.data_ptr());
  Ranges reads, writes, of_host;
  if (from_device || piece) add_bytes(self, reads);
  if (to_device || piece) add_bytes(target, writes);
  const at::Tensor source = from_device || piece ? accessible(self) : self.clone(), into = accessible(target);
  const auto copy = [source, into, reads, writes, piece](const Task& task) {
    c10::InferenceMode guard;
    task.note(reads, Kind::Read);
    task.note(writes, Kind::Write);
    into.copy_(source);
  };
  ++(!from_device ? counts().to_device : !to_device ? counts().to_host : counts().within);
  const Pushed pushed = stream.push(
      !from_device ? "a copy to the device" : !to_device ? "a copy to the host" : "a copy on the device", copy);
  const Moment copied = stream.now();
  if (to_device != from_device && pushed.stamp.time && is_behind_mark(copied.clock)) {
    (to_device ? exposed().bytes_to_device : exposed().bytes_to_host) += static_cast<int64_t>(self.nbytes());
  }
  other.wait(copied);
  const bool is_late = non_blocking && (piece || to_device);
  if (to_device && from_device) return target;
  if (!is_late) {
    stream.synchronize();
  } else if (piece && pushed.stamp.time) {
    const Ranges& used = to_device ? reads : writes;
    const Access access{to_device ? Kind::Read : Kind::Write, pushed.stamp, pushed.name};
    piece->begin({used.front().begin, used.back().end}, access);
  }
  return target;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  Ranges reads;
  add_bytes(self, reads);
  Stream& stream = current_stream(self.device().index());
  stream.push("a read of one number", [reads](const Task& task) { task.note(reads, Kind::Read); });
  ++counts().to_host;
  stream.synchronize();
  return at::native::_local_scalar_dense_cpu(accessible(self));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
at::Tensor& set_storage_at(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}
at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Memory::get().used_by(static_cast<char*>(self.storage().mutable_data()), Stream::get(stream.device_index(), stream.id()));
}

// What an operator touches. Of one with indices, the elements that they choose: what they are is known when it runs.
class Footprint {
 public:
  Footprint(const c10::FunctionSchema& schema, const std::vector<IValue>& args) {
    if (schema.name() == "aten::index" || schema.name() == "aten::index_put_" ||
        schema.name() == "aten::_index_put_impl_") {
      const auto indices = args[1].toOptionalTensorVector();
      for (size_t dim = 0; dim < indices.size(); ++dim) {
        if (indices[dim].has_value() && indices[dim]->defined()) choose(static_cast<int64_t>(dim), *indices[dim]);
      }
    } else if (schema.name() == "aten::index_select" && args[0].toTensor().dim() > 0) {
      choose(at::maybe_wrap_dim(args[1].toInt(), args[0].toTensor().dim()), args[2].toTensor());
    }
    for (size_t i = 0; i < args.size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      const bool is_written = alias && alias->isWrite();
      each_tensor(args[i], [&](const at::Tensor& one) {
        if (!one.is_privateuseone()) return;
        if (i == 0 && !indices_.empty()) {
          const auto options = at::TensorOptions().device(at::kCPU).dtype(one.scalar_type());
          indexed_ = at::from_blob(one.data_ptr(), one.sizes(), one.strides(), options);  // its geometry alone
          indexed_kind_ = is_written ? Kind::Write : Kind::Read;
        } else {
          add_bytes(one, is_written ? writes_ : reads_);
        }
      });
    }
  }
  void add_written(const at::Tensor& fresh) { add_bytes(fresh, writes_); }
  void note(const Task& task) const {
    task.note(reads_, Kind::Read);
    if (indexed_.defined()) {
      Ranges chosen;
      add_chosen_bytes(indexed_, indices_, chosen);
      task.note(chosen, indexed_kind_);
    }
    task.note(writes_, Kind::Write);
  }

 private:
  void choose(int64_t dim, const at::Tensor& index) {
    indices_.emplace_back(dim, index.is_privateuseone() ? accessible(index) : index.clone());
  }
  Ranges reads_, writes_;
  at::Tensor indexed_;
  Kind indexed_kind_ = Kind::Read;
  std::vector<std::pair<int64_t, at::Tensor>> indices_;
};

int device_of(const std::vector<IValue>& args) {
  int device = -1;
  for (const auto& arg : args) {
    each_tensor(arg, [&](const at::Tensor& one) {
      if (!one.is_privateuseone()) return;
      TORCH_CHECK(device < 0 || device == one.device().index(), "tensors of two devices: ", device, " and ", one.device());
      device = one.device().index();
    });
    if (device < 0 && arg.isDevice() && arg.toDevice().type() == kType) device = arg.toDevice().index();
  }
  return device < 0 ? c10::impl::getDeviceGuardImpl(kType)->getDevice().index() : device;
}

// Runs the Meta kernel; returns whether there is one, with all results tensors. `metas` becomes the results.
bool find_shapes(const c10::OperatorHandle& op, Stack& metas) {
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &metas);
  } catch (const std::exception&) {
    return false;
  }
  return std::all_of(metas.begin(), metas.end(), [](const IValue& one) { return one.isTensor() || one.isTensorList(); });
}

Stack run_on_cpu(const c10::OperatorHandle& op, Stack arguments) {
  c10::InferenceMode guard;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  return arguments;
}

void fill(const std::vector<std::pair<size_t, IValue>>& fresh, const Stack& results) {
  c10::InferenceMode guard;
  for (const auto& [place, into] : fresh) {
    std::vector<at::Tensor> targets, sources;
    each_tensor(into, [&](const at::Tensor& one) { targets.push_back(one); });
    each_tensor(results[place], [&](const at::Tensor& one) { sources.push_back(one); });
    for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(sources[i]);
  }
}

IValue aliased(const c10::FunctionSchema& schema, const c10::AliasInfo& info, const std::vector<IValue>& args) {
  TORCH_CHECK(info.isWrite(), "a view without a kernel: ", schema.name());
  for (size_t i = 0; i < args.size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other && *other == info) return args[i];
  }
  TORCH_CHECK(false, "a result of no argument: ", schema.name());
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t num_args = schema.arguments().size();
  const std::vector<IValue> args(stack->end() - static_cast<std::ptrdiff_t>(num_args), stack->end());
  stack->resize(stack->size() - num_args);
  const int index = device_of(args);
  const c10::Device device(kType, static_cast<c10::DeviceIndex>(index));
  const c10::DeviceGuard guard(device);
  Stream& stream = current_stream(index);
  const std::string name = c10::toString(op.operator_name());

  Stack metas;
  for (const auto& arg : args) {
    metas.push_back(arg.isDevice() ? IValue(c10::Device(at::kMeta)) : map_tensors(arg, [](const at::Tensor& one) {
      return one.is_privateuseone() || one.dim() > 0 ? twin(one, at::kMeta) : one;
    }));
  }
  const std::vector<IValue> meta_args(metas.begin(), metas.end());
  const bool is_known = find_shapes(op, metas);
  if (is_known) {
    for (size_t i = 0; i < num_args; ++i) {
      const auto* info = schema.arguments()[i].alias_info();
      if (!info || !info->isWrite() || !args[i].isTensor() || !args[i].toTensor().is_privateuseone()) continue;
      const auto wanted = meta_args[i].toTensor().sizes();
      if (args[i].toTensor().sizes() != wanted) args[i].toTensor().resize_(wanted);
    }
  }
  Footprint footprint(schema, args);
  Stack on_cpu;
  for (const auto& arg : args) {
    on_cpu.push_back(arg.isDevice() ? IValue(c10::Device(at::kCPU)) : map_tensors(arg, [](const at::Tensor& one) {
      return one.is_privateuseone() ? accessible(one) : one.clone();
    }));
  }
  auto results = std::make_shared<Stack>(std::move(metas));
  if (!is_known) {  // shapes that depend on values
    ++counts().synchronous;
    ++counts().launches;
    stream.push(name, [=](const Task& task) {
      footprint.note(task);
      *results = run_on_cpu(op, on_cpu);
    });
    stream.synchronize();
  }
  std::vector<std::pair<size_t, IValue>> fresh;
  for (size_t r = 0; r < results->size(); ++r) {
    if (const auto* info = schema.returns()[r].alias_info()) {
      stack->push_back(aliased(schema, *info, args));
      continue;
    }
    const IValue made = map_tensors((*results)[r], [&](const at::Tensor& one) { return twin(one, device); });
    stack->push_back(made);
    each_tensor(made, [&](const at::Tensor& one) { footprint.add_written(one); });
    fresh.emplace_back(r, map_tensors(made, accessible));
  }
  if (is_known) {
    ++counts().launches;
    stream.push(name, [=](const Task& task) {
      footprint.note(task);
      fill(fresh, run_on_cpu(op, on_cpu));
    });
  } else {
    stream.push(name, [=](const Task& task) {
      footprint.note(task);
      fill(fresh, *results);
    });
    stream.synchronize();
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("resize_", resize);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("record_stream", record_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace simulated_gpu
