// A device "sim" in the host's memory, on torch's key PrivateUse1. Shapes of results come from meta kernels and memory
// at once; the work is queued to the current stream (queues.h) and done later by the CPU's kernels. Nothing here knows
// the package under test.
#include "queues.h"

#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "group.h"

namespace sim {

// ---- what the host waits for

py::object* watcher = nullptr;  // is called with the name of each operation that makes the host wait

void host_waits(const std::string& name) {
  if (!watcher) return;
  py::gil_scoped_acquire gil;
  (*watcher)(name);
}

void wait_for_current(const std::string& name) {
  queues().refuse_in_capture(current_stream, name);
  host_waits(name);
  queues().drain(current_stream);
}

// ---- streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
  static MomentPtr& moment(void* event) { return *static_cast<MomentPtr*>(event); }

  c10::DeviceType type() const override { return SIM; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(COMPUTATION); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return getNewStream(DEVICE, 0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(queues().new_stream()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = current_stream;
    current_stream = next.id();
    return stream(before);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MomentPtr*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MomentPtr;
    moment(*event) = queues().record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) queues().wait(stream.id(), moment(event));
  }
  bool queryEvent(void* event) const override {
    if (event) queues().refuse_in_capture(moment(event), "a query of an event");
    return !event || queues().query([&] { return moment(event)->over.load(); });
  }
  bool queryStream(const c10::Stream& stream) const override {
    queues().refuse_in_capture(stream.id(), "a query of a stream");
    return queues().is_empty(stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queues().refuse_in_capture(stream.id(), "a stream's synchronize");
    host_waits("a stream's synchronize");
    queues().drain(stream.id());
  }
  void synchronizeEvent(void* event) const override {
    if (event) queues().refuse_in_capture(moment(event), "an event's synchronize");
    host_waits("an event's synchronize");
    if (event) queues().reach(moment(event));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    queues().refuse_in_capture(current_stream, "the device's synchronize");
    host_waits("the device's synchronize");
    queues().drain_all();
  }
  // Of the interface from torch 2.13.
  bool isStreamCapturing(const c10::Stream& stream) const { return queues().graph_of(stream.id()) != nullptr; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().record(data, stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

void add(std::string name, std::function<void()> run) {
  queues().add(current_stream, {std::move(name), std::move(run)});
}

struct Hooks final : at::PrivateUse1HooksInterface {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  bool isPinnedPtr(const void* data) const override { return pinned().has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
    c10::DataPtr memory = n ? allocator().allocate(n) : c10::DataPtr(nullptr, DEVICE);
    if (size_t both = std::min(n, impl->nbytes()); both && impl->data())
      add("resize", [to = memory.get(), from = impl->data(), both] { std::memcpy(to, from, both); });
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(n);
  }
};
Hooks& hooks() {
  static auto* made = new Hooks;
  return *made;
}

// ---- tensors of the CPU or of the meta device over the memory of others

bool is_sim(const at::Tensor& t) { return t.defined() && t.device().type() == SIM; }

at::Tensor over(const at::Tensor& t, c10::DataPtr data, c10::DispatchKey key) {
  auto* allocator = key == c10::DispatchKey::Meta ? c10::GetAllocator(c10::DeviceType::Meta) : nullptr;
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), allocator, !!allocator);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), t.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}
// It does not keep the memory alive: as on a device, whoever frees it sees to the order.
at::Tensor bare(const at::Tensor& t) {
  if (!is_sim(t)) return t;
  auto* data = const_cast<void*>(t.storage().data());
  TORCH_CHECK(data || !t.numel(), "sim: memory that was released is used by a tensor of shape ", t.sizes());
  return over(t, c10::DataPtr(data, c10::Device(c10::kCPU)), c10::DispatchKey::CPU);
}
at::Tensor shape_of(const at::Tensor& t) {
  return is_sim(t) ? over(t, c10::DataPtr(nullptr, c10::Device(c10::kMeta)), c10::DispatchKey::Meta) : t;
}
at::Tensor new_like(const at::Tensor& t) {
  return at::Tensor(at::detail::empty_strided_generic(
      t.sizes(), t.strides(), &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.scalar_type()));
}

// Kernels run as if nobody had modes, autocast or autograd around them: it may be long after the call.
struct Alone {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset | c10::python_ks};
};

// ---- operations

std::map<std::string, int64_t> drained;  // operations without shapes from meta kernels: how often they made streams empty

using Map = std::function<at::Tensor(const at::Tensor&)>;
c10::IValue mapped(const c10::IValue& value, const Map& map, c10::DeviceType device) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorList()) list.push_back(map(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> t : value.toOptionalTensorList())
      list.push_back(t.has_value() ? std::optional(map(*t)) : t);
    return list;
  }
  return value.isDevice() ? c10::IValue(c10::Device(device)) : value;
}
torch::jit::Stack mapped(const torch::jit::Stack& values, const Map& map, c10::DeviceType device) {
  torch::jit::Stack made;
  for (auto& value : values) made.push_back(mapped(value, map, device));
  return made;
}
std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  std::vector<at::Tensor> found;
  mapped(value, [&](const at::Tensor& t) { return found.push_back(t), t; }, SIM);
  return found;
}

// The arguments that an operation returns, by result; -1: a new tensor or list.
std::vector<int> written_results(const c10::FunctionSchema& schema) {
  std::vector<int> found;
  for (auto& result : schema.returns()) {
    found.push_back(-1);
    if (const auto* alias = result.alias_info()) {
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto* argument = schema.arguments()[i].alias_info();
        if (argument && argument->isWrite() && *argument == *alias) found.back() = static_cast<int>(i);
      }
      TORCH_CHECK(found.back() >= 0, "sim: a view that is not known: ", schema.name());
    }
  }
  return found;
}

bool starts(const std::string& text, const char* word) { return text.rfind(word, 0) == 0; }

// Arguments as the work will use them later. Numbers of the host are part of the call.
torch::jit::Stack arguments_of(const c10::FunctionSchema& schema, const torch::jit::Stack& given) {
  const auto& name = schema.name();
  bool any = false, indexes = starts(name, "aten::index") || starts(name, "aten::_index");
  const at::Tensor* other = nullptr;
  for (auto& value : given)
    for (auto& t : tensors_of(value)) any |= is_sim(t);
  for (size_t i = 0; any && i < given.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    for (auto& t : tensors_of(given[i])) {
      if (!t.defined() || is_sim(t)) continue;
      TORCH_CHECK((t.dim() == 0 || (indexes && i)) && !(alias && alias->isWrite()),
                  "Expected all tensors to be on the same device, but found at least two devices, sim:0 and ",
                  t.device(), ", in ", name);
      if (t.dim()) wait_for_current(name + " with an index on the host");
    }
  }
  return mapped(given, [](const at::Tensor& t) { return is_sim(t) ? bare(t) : t.defined() ? t.clone() : t; }, c10::kCPU);
}

void run(const c10::OperatorHandle& op, torch::jit::Stack stack, const std::vector<std::vector<at::Tensor>>& outputs) {
  Alone alone;
  if (op.schema().name() == "aten::native_layer_norm_backward" && stack[5].isTensor()) {
    // Statistics have the weight's dtype on the CPU, and float32 by the meta kernel.
    for (size_t i : {3, 4}) stack[i] = stack[i].toTensor().to(stack[5].toTensor().scalar_type());
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto results = tensors_of(stack[i]);
    for (size_t k = 0; k < outputs[i].size(); ++k)
      if (outputs[i][k].defined() && results[k].defined() && outputs[i][k].numel()) outputs[i][k].copy_(results[k]);
  }
}

// After everything in the stream, with results that give the shapes.
void run_now(const c10::OperatorHandle& op, const torch::jit::Stack& given, torch::jit::Stack* stack) {
  queues().refuse_in_capture(current_stream, op.schema().name());
  queues().drain(current_stream);
  auto copies = arguments_of(op.schema(), given);
  {
    Lock lock(queues().mutex);
    Alone alone;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &copies);
    auto written = written_results(op.schema());
    for (size_t i = 0; i < written.size(); ++i) {
      if (written[i] >= 0) {
        stack->push_back(given[written[i]]);
        continue;
      }
      stack->push_back(mapped(copies[i], [](const at::Tensor& t) {
        if (!t.defined()) return t;
        auto made = new_like(t);
        if (t.numel()) add("result", [to = bare(made), t] { Alone alone; to.copy_(t); });
        return made;
      }, SIM));
    }
  }
  queues().drain(current_stream);
}

const std::set<std::string> DRAWS{"aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_",
                                  "aten::exponential_", "aten::log_normal_", "aten::cauchy_", "aten::geometric_"};

// What a meta kernel says of a call.
struct Shapes {
  torch::jit::Stack results;
  std::vector<std::pair<size_t, std::vector<int64_t>>> resized;  // arguments, with their new sizes
};

// Calls with this text have results of the same shapes. Empty: this is not known.
std::string key_of(const c10::OperatorHandle& op, const torch::jit::Stack& given) {
  std::ostringstream key;
  key << op.schema().name() << '.' << op.schema().overload_name() << c10::get_default_dtype();
  for (auto& value : given) {
    key << '|';
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      for (auto& t : tensors_of(value)) {
        if (!t.defined()) key << "none;";
        else key << is_sim(t) << t.scalar_type() << t.sizes() << t.strides() << t.storage_offset() << t.is_conj() << ';';
      }
    } else if (value.isDouble()) {
      key << "double";  // no shape depends on it
    } else if (value.isNone() || value.isInt() || value.isBool() || value.isIntList() || value.isBoolList()) {
      key << value.tagKind() << value;
    } else {
      return "";
    }
  }
  return key.str();
}

std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle& op, const torch::jit::Stack& given) {
  static std::mutex mutex;
  static auto* known = new std::map<std::string, std::shared_ptr<const Shapes>>;
  auto key = key_of(op, given);
  if (!key.empty()) {
    std::lock_guard lock(mutex);
    if (auto found = known->find(key); found != known->end()) return found->second;
  }
  auto made = std::make_shared<Shapes>();
  made->results = mapped(given, shape_of, c10::kMeta);
  auto arguments = made->results;
  try {
    Alone alone;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &made->results);
  } catch (const c10::NotImplementedError&) {
    return nullptr;
  }
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i].isTensor() || !is_sim(given[i].toTensor())) continue;
    auto sizes = arguments[i].toTensor().sizes();
    if (given[i].toTensor().sizes() != sizes) made->resized.emplace_back(i, sizes.vec());
  }
  if (!key.empty()) {
    std::lock_guard lock(mutex);
    (*known)[key] = made;
  }
  return made;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size();
  torch::jit::Stack given(stack->end() - n, stack->end());
  stack->erase(stack->end() - n, stack->end());
  const auto& name = schema.name();

  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    queues().refuse_in_capture(current_stream, name + ", whose numbers no replay would draw again");
    for (size_t i = 0; i < n; ++i)
      if (given[i].isNone() && schema.arguments()[i].type()->str() == "Generator?") given[i] = hooks().generator;
    bool reads = !DRAWS.count(name);
    for (size_t i = 1; i < n; ++i) reads |= given[i].isTensor();
    if (reads) {
      ++drained[name];
      return run_now(op, given, stack);
    }
    auto target = given[0].toTensor();  // the numbers are drawn now, and come into the tensor later
    auto copies = given;
    auto drawn = at::empty_strided(target.sizes(), target.strides(), target.options().device(c10::kCPU));
    copies[0] = drawn;
    {
      Alone alone;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &copies);
    }
    add(name, [to = bare(target), drawn] { Alone alone; to.copy_(drawn); });
    stack->push_back(target);
    return;
  }
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) {
    bool sized = name == "aten::repeat_interleave" && !given.back().isNone();  // the host gives the size of the result
    if (!sized) host_waits(name);
    return run_now(op, given, stack);
  }

  auto shapes = shapes_of(op, given);
  if (!shapes) {
    ++drained[name];
    return run_now(op, given, stack);
  }
  for (auto& [i, size] : shapes->resized) at::native::resize_output(given[i].toTensor(), size);
  auto arguments = arguments_of(schema, given);
  auto written = written_results(schema);
  std::vector<std::vector<at::Tensor>> outputs(written.size());
  for (size_t i = 0; i < written.size(); ++i) {
    if (written[i] >= 0) {
      stack->push_back(given[written[i]]);
      continue;
    }
    stack->push_back(mapped(shapes->results[i], [&](const at::Tensor& t) {
      auto made = t.defined() ? new_like(t) : t;
      outputs[i].push_back(t.defined() ? bare(made) : t);
      return made;
    }, SIM));
  }
  add(name, [op, arguments = std::move(arguments), outputs = std::move(outputs)] { run(op, arguments, outputs); });
}

// ---- operations of its own

using Size = c10::SymIntArrayRef;
using Dtype = std::optional<at::ScalarType>;

at::Tensor empty(Size size, Dtype dtype, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::Tensor(at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator(),
                                              c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                              c10::dtype_or_default(dtype), format));
}
at::Tensor empty_strided(Size size, Size stride, Dtype dtype, std::optional<at::Layout>, std::optional<at::Device>,
                         std::optional<bool>) {
  return at::Tensor(at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype)));
}
at::Tensor as_strided(const at::Tensor& self, Size size, Size stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}
at::Tensor view(const at::Tensor& self, Size size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor reshape_alias(const at::Tensor& self, Size size, Size stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
const at::Tensor& resize_(const at::Tensor& self, Size size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, Size size, Size stride) {
  return at::cpu::set_(self, storage, offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size),
                       C10_AS_INTARRAYREF_SLOW(stride));
}
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& self, double p, std::optional<bool> train) {
  auto mask = at::empty_like(self, self.options().dtype(at::kBool)).bernoulli_(train.value_or(true) ? 1 - p : 1.0);
  auto scale = !train.value_or(true) ? 1.0 : p == 1.0 ? 0.0 : 1 / (1 - p);
  return {self * mask * scale, mask};
}
void record_stream(at::Tensor& self, c10::Stream stream) { allocator().record(self.storage().data_ptr(), stream.id()); }

void transfer(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return;
  bool down = !is_sim(to), up = !is_sim(from);
  const auto& host = down ? to : from;
  bool waits = (down || up) && (!non_blocking || (down && !pinned().has(host.storage().data())));
  if (up && !pinned().has(host.storage().data()))
    queues().refuse_in_capture(current_stream, "a copy from memory of the host that is not pinned");
  auto source = up && !waits && !pinned().has(host.storage().data()) ? from.clone() : bare(from);
  add("copy_", [source, target = bare(to)] { Alone alone; target.copy_(source); });
  if (waits) wait_for_current(down ? "a copy to the host" : "a copy from the host");
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  transfer(self, to, non_blocking);
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  transfer(self, to, false);
  return to;
}
at::Scalar local_scalar(const at::Tensor& self) {
  wait_for_current("item");
  Lock lock(queues().mutex);
  Alone alone;
  return at::_local_scalar_dense(bare(self));
}

}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", sim::empty);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("as_strided", sim::as_strided);
  m.impl("view", sim::view);
  m.impl("_reshape_alias", sim::reshape_alias);
  m.impl("unfold", sim::unfold);
  m.impl("resize_", sim::resize_);
  m.impl("set_.source_Storage_storage_offset", sim::set_storage);
  m.impl("record_stream", sim::record_stream);
  m.impl("native_dropout", sim::native_dropout);
  m.impl("_copy_from", sim::copy_from);
  m.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", sim::local_scalar);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(sim::SIM, &sim::allocator());
  at::RegisterPrivateUse1HooksInterface(&sim::hooks());
  module.def("begin", [](uint64_t seed) { sim::queues().begin(seed); sim::allocator().restart(); }, py::arg("seed"));
  module.def("forget", [] { sim::queues().forget(); });
  module.def("set_patience", [](int seconds) { sim::queues().patience = seconds; });
  module.def("stop", [] { sim::queues().stop(); });
  module.def("queued", [] { return sim::queues().added(); });
  py::class_<sim::Graph, sim::GraphPtr>(module, "Graph");
  module.def("begin_capture", [] { return sim::queues().begin_capture(sim::current_stream); });
  module.def("end_capture", [](const sim::GraphPtr& graph) { sim::queues().end_capture(graph); });
  module.def("replay", [](const sim::GraphPtr& graph) { sim::queues().replay(graph, sim::current_stream); });
  module.def("is_capturing", [] { return sim::queues().graph_of(sim::current_stream) != nullptr; });
  module.def("synchronize", [] { sim::Guard().synchronizeDevice(0); });
  module.def("lock_pages", [](size_t address, size_t n) {
    std::lock_guard lock(sim::pinned().mutex);
    sim::pinned().blocks[reinterpret_cast<const char*>(address)] = n;
  });
  module.def("unlock_pages", [](size_t address) {
    std::lock_guard lock(sim::pinned().mutex);
    sim::pinned().blocks.erase(reinterpret_cast<const char*>(address));
  });
  module.def("drained", [] { return sim::drained; });
  module.def("memory_allocated", [] { return sim::allocator().allocated.load(); });
  module.def("max_memory_allocated", [] { return sim::allocator().peak.load(); });
  module.def("reset_peak_memory_stats", [] { sim::allocator().peak = sim::allocator().allocated.load(); });
  module.def("generator", [] { return sim::hooks().generator; });
  module.def("watch", [](py::object watcher) {
    delete sim::watcher;
    sim::watcher = watcher.is_none() ? nullptr : new py::object(watcher);
  });
  module.def("group", [](c10::intrusive_ptr<c10d::Backend> host) {
    return c10::static_intrusive_pointer_cast<c10d::Backend>(c10::make_intrusive<sim::Group>(host));
  });
}
