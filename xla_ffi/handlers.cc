#include "xla_ffi/handlers.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "xla_ffi/capture.h"
#include "xla_ffi/cuda_driver.h"
#include "xla_ffi/registry.h"

namespace dynaflow {
namespace {

namespace ffi = xla::ffi;

ffi::Error ToFfi(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  ffi::ErrorCode code = ffi::ErrorCode::kInternal;
  switch (status.code()) {
    case Code::kInvalidArgument:
      code = ffi::ErrorCode::kInvalidArgument;
      break;
    case Code::kNotFound:
      code = ffi::ErrorCode::kNotFound;
      break;
    case Code::kFailedPrecondition:
      code = ffi::ErrorCode::kFailedPrecondition;
      break;
    case Code::kUnimplemented:
      code = ffi::ErrorCode::kUnimplemented;
      break;
    case Code::kOk:
    case Code::kInternal:
      break;
  }
  return ffi::Error(code, "dynaflow: " + status.message());
}

Result<std::vector<void*>> Pointers(const ffi::RemainingArgs& args) {
  std::vector<void*> pointers;
  pointers.reserve(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return InvalidArgument("input ", i, " is no array");
    pointers.push_back(buffer->untyped_data());
  }
  return pointers;
}

Result<std::vector<void*>> Pointers(const ffi::RemainingRets& rets) {
  std::vector<void*> pointers;
  pointers.reserve(rets.size());
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return InvalidArgument("output ", i, " is no array");
    pointers.push_back((*buffer)->untyped_data());
  }
  return pointers;
}

template <typename Callee>
ffi::ErrorOr<std::unique_ptr<Callee>> FindPlan(int64_t id) {
  auto plan = Registry::Global().Find(id);
  if (!plan.ok()) return ffi::Unexpected(ToFfi(plan.status()));
  return std::make_unique<Callee>(Callee{std::move(*plan)});
}

// Completes the call with its buffers, and runs it.
Status Dispatch(Plan& plan, Call call, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
  DYNAFLOW_ASSIGN(const auto inputs, Pointers(args));
  DYNAFLOW_ASSIGN(const auto outputs, Pointers(rets));
  call.inputs = inputs;
  call.outputs = outputs;
  return plan.Run(call);
}

// The stream may belong to another device than the thread that waits here works for.
Status SynchronizeCuda(void* stream) {
  DYNAFLOW_ASSIGN(const cuda::Driver* driver, cuda::Driver::Get());
  return cuda::Synchronize(*driver, static_cast<cuda::Stream>(stream));
}

Status DispatchCuda(cuda::Stream stream, ffi::RunId run, Plan& plan, const ffi::RemainingArgs& args,
                    const ffi::RemainingRets& rets) {
  DYNAFLOW_ASSIGN(const cuda::Driver* driver, cuda::Driver::Get());
  DYNAFLOW_ASSIGN(const int device, cuda::DeviceOf(*driver, stream));
  const Call call{.device = device, .stream = stream, .run_id = run.run_id, .synchronize = &SynchronizeCuda};
  return Dispatch(plan, call, args, rets);
}

Status CaptureBegin(cuda::Stream stream, const ffi::RemainingArgs& args) {
  DYNAFLOW_ASSIGN(const cuda::Driver* driver, cuda::Driver::Get());
  DYNAFLOW_ASSIGN(const auto inputs, Pointers(args));
  return Captures::Global().Begin(*driver, stream, inputs);
}

Status CaptureEnd(cuda::Stream stream, const ffi::RemainingArgs& args) {
  DYNAFLOW_ASSIGN(const cuda::Driver* driver, cuda::Driver::Get());
  DYNAFLOW_ASSIGN(const auto outputs, Pointers(args));
  return Captures::Global().End(*driver, stream, outputs);
}

Status CopyCuda(cuda::Stream stream, ffi::AnyBuffer from, ffi::AnyBuffer to) {
  if (from.size_bytes() == 0) return {};
  DYNAFLOW_ASSIGN(const cuda::Driver* driver, cuda::Driver::Get());
  const auto address = [](ffi::AnyBuffer x) { return reinterpret_cast<cuda::DevicePtr>(x.untyped_data()); };
  DYNAFLOW_CUDA(*driver, MemcpyAsync, address(to), address(from), from.size_bytes(), stream);
  return {};
}

}  // namespace

ffi::TypeId CudaCallee::id = {};
ffi::TypeId HostCallee::id = {};
const ffi::TypeInfo CudaCallee::info = ffi::MakeTypeInfo<CudaCallee>();
const ffi::TypeInfo HostCallee::info = ffi::MakeTypeInfo<HostCallee>();

XLA_FFI_DEFINE_HANDLER_SYMBOL(DynaflowFindCuda, FindPlan<CudaCallee>,
                              ffi::Ffi::BindInstantiate().Attr<int64_t>("plan"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(DynaflowFindHost, FindPlan<HostCallee>,
                              ffi::Ffi::BindInstantiate().Attr<int64_t>("plan"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    DynaflowDispatchCuda,
    [](cuda::Stream stream, ffi::RunId run, CudaCallee* callee, ffi::RemainingArgs args,
       ffi::RemainingRets rets) { return ToFfi(DispatchCuda(stream, run, *callee->plan, args, rets)); },
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cuda::Stream>>()
        .Ctx<ffi::RunId>()
        .Ctx<ffi::State<CudaCallee>>()
        .RemainingArgs()
        .RemainingRets());

// On the host XLA's thread waits: its buffers live as long as this call.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    DynaflowDispatchHost,
    [](int32_t device, ffi::RunId run, HostCallee* callee, ffi::RemainingArgs args, ffi::RemainingRets rets) {
      return ToFfi(Dispatch(*callee->plan, {.device = device, .run_id = run.run_id}, args, rets));
    },
    ffi::Ffi::Bind()
        .Ctx<ffi::DeviceOrdinal>()
        .Ctx<ffi::RunId>()
        .Ctx<ffi::State<HostCallee>>()
        .RemainingArgs()
        .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    DynaflowCaptureBegin,
    [](cuda::Stream stream, ffi::RemainingArgs args, ffi::RemainingRets) {
      return ToFfi(CaptureBegin(stream, args));
    },
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    DynaflowCaptureEnd,
    [](cuda::Stream stream, ffi::RemainingArgs args, ffi::RemainingRets) {
      return ToFfi(CaptureEnd(stream, args));
    },
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    DynaflowCopyCuda,
    [](cuda::Stream stream, ffi::AnyBuffer from, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer> to) {
      return ToFfi(CopyCuda(stream, from, *to));
    },
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cuda::Stream>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    DynaflowCopyHost,
    [](ffi::AnyBuffer from, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer> to) {
      if (from.size_bytes()) std::memcpy(to->untyped_data(), from.untyped_data(), from.size_bytes());
      return ffi::Error::Success();
    },
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

}  // namespace dynaflow
