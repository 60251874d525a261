#include "xla_ffi/executor.h"

namespace dynaflow {

bool Executor::Matches(const Call& call) const {
  if (call.inputs.size() != program_.inputs.size() || call.outputs.size() != program_.outputs.size()) {
    return false;
  }
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const Input& in = program_.inputs[i];
    if (in.kind == InputKind::kPinned && reinterpret_cast<uint64_t>(call.inputs[i]) != in.address)
      return false;
  }
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    const uint64_t address = program_.outputs[i].address;
    if (address && reinterpret_cast<uint64_t>(call.outputs[i]) != address) return false;
  }
  return true;
}

Status Executor::Check(const Call& call) const {
  const auto where = [&] { return StrCat("program '", program_.name, "'"); };
  if (call.inputs.size() != program_.inputs.size()) {
    return InvalidArgument(where(), " takes ", program_.inputs.size(), " inputs, not ", call.inputs.size());
  }
  if (call.outputs.size() != program_.outputs.size()) {
    return InvalidArgument(where(), " gives ", program_.outputs.size(), " outputs, not ",
                           call.outputs.size());
  }
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const Input& in = program_.inputs[i];
    if (in.kind == InputKind::kPinned && reinterpret_cast<uint64_t>(call.inputs[i]) != in.address) {
      return FailedPrecondition(where(), ": pinned input ", i, " has moved since it was captured");
    }
  }
  // The overlap check took a donor and its output for one memory; here XLA says whether they are.
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    const uint64_t address = program_.outputs[i].address;
    if (address && reinterpret_cast<uint64_t>(call.outputs[i]) != address) {
      return FailedPrecondition(where(), ": pinned output ", i, " has moved since it was captured");
    }
    const int32_t donor = program_.outputs[i].donor;
    if (donor >= 0 && call.outputs[i] != call.inputs[donor]) {
      return FailedPrecondition(where(), ": output ", i, " does not lie in its donor, input ", donor);
    }
  }
  return {};
}

Status Executor::Run(const Call& call) {
  DYNAFLOW_RETURN_IF_ERROR(Check(call));
  std::lock_guard lock(running_);
  return device_->Run(program_, call);
}

Result<std::vector<CommandTime>> Executor::Times() {
  std::lock_guard lock(running_);
  return device_->Times(program_);
}

std::string Executor::Mode() const {
  std::lock_guard lock(running_);
  return device_->Mode();
}

}  // namespace dynaflow
