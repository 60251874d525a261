#include "xla_ffi/stopwatch.h"

namespace dynaflow::cuda {

Result<Stopwatch> Stopwatch::Create(const Driver& driver, const Program& program) {
  Stopwatch result(driver);
  DYNAFLOW_ASSIGN(result.start_, MakeEvent(driver, kEventDefault));
  const size_t count = program.commands.size();
  result.before_.resize(count);
  result.after_.resize(count);
  result.spans_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    if (!Times(program.commands[i])) continue;
    DYNAFLOW_ASSIGN(result.before_[i], MakeEvent(driver, kEventDefault));
    DYNAFLOW_ASSIGN(result.after_[i], MakeEvent(driver, kEventDefault));
  }
  return result;
}

Result<std::vector<CommandTime>> Stopwatch::Read() const {
  std::vector<CommandTime> times;
  for (size_t i = 0; i < spans_.size(); ++i) {
    const auto& [begin, end] = spans_[i];
    if (begin == nullptr) continue;
    float begin_ms = 0, end_ms = 0;
    DYNAFLOW_CUDA(*driver_, EventElapsedTime, &begin_ms, start_.get(), begin);
    DYNAFLOW_CUDA(*driver_, EventElapsedTime, &end_ms, start_.get(), end);
    times.push_back({i, 1e3 * begin_ms, 1e3 * end_ms});
  }
  return times;
}

}  // namespace dynaflow::cuda
