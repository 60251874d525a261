#include "xla_ffi/host_sum.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace dynaflow {
namespace {

float Widen(float x) { return x; }
float Widen(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

void Narrow(float x, float& into) { into = x; }
void Narrow(float x, uint16_t& into) {  // to the nearest, of two the even one
  const auto bits = std::bit_cast<uint32_t>(x);
  into = std::isnan(x) ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// T: float, or the bits of a bfloat16.
template <typename T>
void Sum(const Command& c, const Call& call) {
  const T* parts[kMaxSummands];
  for (size_t k = 0; k < c.reads.size(); ++k) {
    parts[k] = reinterpret_cast<const T*>(Resolve(c.reads[k], call));
  }
  T* total = reinterpret_cast<T*>(Resolve(c.writes[0], call));
  for (size_t i = 0; i < c.writes[0].bytes / sizeof(T); ++i) {
    float sum = Widen(parts[0][i]);
    for (size_t k = 1; k < c.reads.size(); ++k) sum += Widen(parts[k][i]);
    Narrow(sum, total[i]);
  }
}

}  // namespace

void HostSum(const Command& sum, const Call& call) {
  switch (sum.element) {
    case Element::kFloat32:
      return Sum<float>(sum, call);
    case Element::kBFloat16:
      return Sum<uint16_t>(sum, call);
  }
}

}  // namespace dynaflow
