// A simulated accelerator: a torch backend whose memory is the host's, behind a wall.
//
//   - its own allocator counts the bytes that are in use, and their largest number
//   - an operator runs on the CPU, on the same bytes with the same strides, so that its
//     bits are those of the CPU; a result is a new tensor of the device
//   - operands on two devices are refused as CUDA refuses them: a CPU tensor may only be
//     a number (no axes), or an index
//   - copies between the host and the device, and values read by the host, are counted
//
// Next: simulated_device.py

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_set>

using at::Tensor;
using c10::IValue;

namespace {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
enum Counter { TO_HOST, TO_HOST_BYTES, TO_DEVICE, READS, IN_USE, PEAK, SIZE };
std::atomic<int64_t> counters[SIZE];
std::atomic<int64_t> kernel{4};  // what SDPA chooses: the values of SDPBackend

// ---- memory

struct Block {
  void* data;
  int64_t size;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  counters[IN_USE] -= block->size;
  c10::free_cpu(block->data);
  delete block;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    auto* block = new Block{c10::alloc_cpu(n), static_cast<int64_t>(n)};
    int64_t now = counters[IN_USE] += block->size;
    int64_t peak = counters[PEAK];
    while (now > peak && !counters[PEAK].compare_exchange_weak(peak, now)) {
    }
    return {block->data, block, &release, c10::Device(DEVICE, 0)};
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }
};

DeviceMemory memory;
REGISTER_ALLOCATOR(DEVICE, &memory);

std::mutex guard;
std::unordered_set<const void*> pinned;

struct PinnedMemory final : c10::Allocator {
  static void unpin(void* data) {
    std::lock_guard<std::mutex> lock(guard);
    pinned.erase(data);
    c10::free_cpu(data);
  }
  c10::DataPtr allocate(size_t n) override {
    void* data = c10::alloc_cpu(n);
    std::lock_guard<std::mutex> lock(guard);
    pinned.insert(data);
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }
};

PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(guard);
    return pinned.count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};

// the autograd engine records events; everything here is done when a call returns
const c10::Device FIRST(DEVICE, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DEVICE> {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, FIRST); }
  c10::Device exchangeDevice(c10::Device) const override { return FIRST; }
  c10::Device getDevice() const override { return FIRST; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- the same bytes as a tensor of the other device

bool is_ours(const Tensor& x) { return x.defined() && x.device().type() == DEVICE; }

Tensor see_from_host(const Tensor& x) {
  const auto& storage = x.storage();
  c10::DataPtr data(storage.mutable_data(), c10::Device(c10::kCPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
                    c10::GetCPUAllocator(), true);
  auto seen = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), x.dtype());
  auto* impl = seen.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return seen;
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType type) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

Tensor put_on_device(const Tensor& x) {
  auto placed = empty_strided(x.sizes(), x.strides(), x.scalar_type());
  std::memcpy(placed.storage().mutable_data(), x.storage().data(),
              std::min(placed.storage().nbytes(), x.storage().nbytes()));
  return placed;
}

const Tensor& resize(const Tensor& x, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t bytes = (impl->numel() + impl->storage_offset()) * x.element_size();
  auto* storage = x.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    auto data = memory.allocate(bytes);
    std::memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr(std::move(data));
    storage->set_nbytes(bytes);
  }
  return x;
}

// ---- operators

struct Seen {
  Tensor ours;
  Tensor host;
  void* data;
};

Tensor take(const Tensor& x, std::vector<Seen>& seen) {
  if (!is_ours(x)) return x;
  for (auto& other : seen)
    if (other.ours.is_same(x)) return other.host;
  auto host = see_from_host(x);
  seen.push_back({x, host, host.storage().mutable_data()});
  return host;
}

void refuse(const Tensor& x, const std::string& name) {
  TORCH_CHECK(!x.defined() || is_ours(x) || x.dim() == 0,
              "Expected all tensors to be on the same device, but found at least two "
              "devices, sim:0 and ", x.device(), "! (in ", name, ")");
}

Tensor give_back(const Tensor& x, std::vector<Seen>& seen) {
  if (!x.defined()) return x;
  for (auto& other : seen) {
    if (other.host.is_same(x)) return other.ours;
    if (x.has_storage() && x.storage().data() == other.data && x.storage().nbytes() &&
        other.data != nullptr) {
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(other.ours.storage()), other.ours.key_set(),
          x.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(),
                                                         x.storage_offset());
      return view;
    }
  }
  return put_on_device(x);
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const bool indexes = name.find("index") != std::string::npos;
  const size_t n = schema.arguments().size(), first = stack->size() - n;
  std::vector<Seen> seen;
  if (name == "aten::_local_scalar_dense" || name == "aten::equal") counters[READS]++;
  for (size_t i = 0; i < n; i++) {
    IValue& given = (*stack)[first + i];
    if (given.isTensor()) {
      refuse(given.toTensor(), name);
      given = take(given.toTensor(), seen);
    } else if (given.isTensorList()) {
      std::vector<Tensor> hosts;
      for (const Tensor& x : given.toTensorVector()) {
        refuse(x, name);
        hosts.push_back(take(x, seen));
      }
      given = c10::List<Tensor>(hosts);
    } else if (given.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> hosts;
      for (const std::optional<Tensor>& x : given.toOptionalTensorList()) {
        if (x && !indexes) refuse(*x, name);
        hosts.push_back(x ? std::optional<Tensor>(take(*x, seen)) : std::nullopt);
      }
      given = hosts;
    } else if (given.isDevice()) {
      given = c10::Device(c10::kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& x : seen) {  // an output that the operator has resized
    const auto& host = x.host;
    if (host.storage().data() == x.data) {
      if (host.sizes() != x.ours.sizes() || host.strides() != x.ours.strides())
        x.ours.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                            host.storage_offset());
      continue;
    }
    auto placed = put_on_device(host);
    auto* storage = x.ours.storage().unsafeGetStorageImpl();
    storage->set_data_ptr(std::move(placed.storage().unsafeGetStorageImpl()->mutable_data_ptr()));
    storage->set_nbytes(host.storage().nbytes());
    x.ours.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    x.data = const_cast<void*>(host.storage().data());
  }
  const size_t results = schema.returns().size(), start = stack->size() - results;
  for (size_t i = 0; i < results; i++) {
    IValue& made = (*stack)[start + i];
    if (made.isTensor()) {
      made = give_back(made.toTensor(), seen);
    } else if (made.isTensorList()) {
      std::vector<Tensor> placed;
      for (const Tensor& x : made.toTensorVector()) placed.push_back(give_back(x, seen));
      made = c10::List<Tensor>(placed);
    }
  }
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type,
             std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(type), format);
}

Tensor empty_strided_op(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                        std::optional<at::ScalarType> type, std::optional<at::Layout>,
                        std::optional<at::Device>, std::optional<bool>) {
  return empty_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                       c10::dtype_or_default(type));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (is_ours(from) && !is_ours(to)) {
    counters[TO_HOST]++;
    counters[TO_HOST_BYTES] += from.numel() * from.element_size();
  }
  if (!is_ours(from) && is_ours(to)) counters[TO_DEVICE]++;
  auto source = is_ours(from) ? see_from_host(from) : from;
  auto target = is_ours(to) ? see_from_host(to) : to;
  target.copy_(source);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor as_strided(const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset) at = offset->expect_int();
  return at::native::as_strided_tensorimpl(x, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), at);
}

const Tensor& resize_op(const Tensor& x, c10::SymIntArrayRef size,
                        std::optional<at::MemoryFormat> format) {
  return resize(x, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_storage(Tensor& x, at::Storage source, c10::SymInt offset,
                    c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty())
    impl->set_sizes_contiguous(sizes);
  else
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  impl->set_storage_offset(offset.expect_int());
  return x;
}

Tensor& set_whole_storage(Tensor& x, at::Storage source) {
  auto n = static_cast<int64_t>(source.nbytes() / x.element_size());
  return set_storage(x, std::move(source), 0, c10::SymInt(n), {});
}

Tensor& set_tensor(Tensor& x, const Tensor& source) {
  return set_storage(x, source.storage(), source.storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

// where the CPU takes its fused kernel, the device takes the one that was chosen
int64_t choose(const Tensor& q, const Tensor& k, const Tensor& v,
               const std::optional<Tensor>& mask, double dropout, bool causal,
               std::optional<double> scale, bool grouped) {
  auto host = [](const Tensor& x) {
    return see_from_host(x).set_requires_grad(x.requires_grad());
  };
  std::optional<Tensor> seen;
  if (mask) seen = is_ours(*mask) ? host(*mask) : *mask;
  auto fused = at::_fused_sdp_choice(host(q), host(k), host(v), seen, dropout, causal,
                                     scale, grouped);
  if (!fused) return 0;
  return mask && kernel == 1 ? 2 : kernel.load();  // flash attention takes no mask
}

Tensor convolve(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                c10::SymIntArrayRef dilation, bool transposed,
                c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  std::optional<Tensor> seen;
  if (bias && bias->defined()) seen = see_from_host(*bias);
  return put_on_device(at::convolution_symint(see_from_host(x), see_from_host(weight), seen,
                                              stride, padding, dilation, transposed,
                                              output_padding, groups));
}

int64_t read_counter(int64_t which) { return counters[which]; }
void write_counter(int64_t which, int64_t value) { counters[which] = value; }
void choose_kernel(int64_t which) { kernel = which; }

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided_op);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_op);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_fused_sdp_choice", choose);
  m.impl("convolution_overrideable", convolve);
  // torch would write them as a formula for devices that lack them, with other bits
  for (const char* name : {"native_layer_norm", "native_group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY(simulated, m) {
  m.def("read_counter(int which) -> int", read_counter);
  m.def("write_counter(int which, int value) -> ()", write_counter);
  m.def("choose_kernel(int which) -> ()", choose_kernel);
}

static bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();
