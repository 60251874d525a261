// The custom calls, as XLA sees them. Nothing else of the executor knows XLA's headers.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace dynaflow {

// dynaflow_dispatch(*inputs, plan=id) -> outputs: runs a plan.
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowDispatchCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowDispatchHost);

// dynaflow_capture_begin(*inputs, id=id) and dynaflow_capture_end(*outputs, id=id), each -> a token of any
// type: between the two, what the module launches becomes capture `id`.
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowCaptureBegin);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowCaptureEnd);

// dynaflow_copy(array, token) -> the same in memory of its own, made where the token is there. XLA drops or
// moves copies that it sees through.
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowCopyCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(DynaflowCopyHost);

}  // namespace dynaflow
