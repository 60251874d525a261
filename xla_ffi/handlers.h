// The custom calls, as XLA sees them. Nothing else of the executor knows XLA's headers.
#pragma once

#include <memory>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/registry.h"

namespace dynaflow {

// What XLA keeps with a compiled call of a plan: the plan, which lives as long as anything that may run it.
// XLA numbers types for each platform by itself, so each has its own.
struct CudaCallee {
  static xla::ffi::TypeId id;
  static const xla::ffi::TypeInfo info;
  std::shared_ptr<Plan> plan;
};
struct HostCallee {
  static xla::ffi::TypeId id;
  static const xla::ffi::TypeInfo info;
  std::shared_ptr<Plan> plan;
};

// dynaflow_dispatch(*inputs, plan=id) -> outputs: finds a plan when it is compiled, and runs it.
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowFindCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowFindHost);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowDispatchCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowDispatchHost);

// dynaflow_capture_begin(*inputs) and dynaflow_capture_end(*outputs), each -> a token of any type: between
// the two, what the module launches becomes the capture that expect_capture has announced.
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowCaptureBegin);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowCaptureEnd);

// dynaflow_copy(array, token) -> the same in memory of its own, made where the token is there. XLA drops or
// moves copies that it sees through.
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowCopyCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowCopyHost);

}  // namespace dynaflow
