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

template <typename T>
float Rounded(float x) {
  T narrow;
  Narrow(x, narrow);
  return Widen(narrow);
}

template <typename T>
const T* At(const Range& range, const Call& call) {
  return reinterpret_cast<const T*>(Resolve(range, call));
}

// Normalizes a row. T: of the row; W: of the weights, if there are any.
template <typename T, typename W>
void NormalizeRow(const Norm& norm, const T* row, const W* weights, T* normed) {
  float squares = 0;
  for (size_t i = 0; i < norm.width; ++i) squares += Widen(row[i]) * Widen(row[i]);
  float scale = 1 / std::sqrt(squares / static_cast<float>(norm.width) + norm.epsilon);
  if (norm.rounds_scale) scale = Rounded<T>(scale);
  for (size_t i = 0; i < norm.width; ++i) {
    float x = Widen(row[i]) * scale;
    if (norm.rounds_normed) x = Rounded<T>(x);
    if (weights) x *= Widen(weights[i]);
    Narrow(x, normed[i]);
  }
}

// T: float, or the bits of a bfloat16.
template <typename T>
void Sum(const Command& c, const Call& call) {
  const T* parts[kMaxSummands];
  const size_t num_parts = NumSummands(c), count = c.writes[0].bytes / sizeof(T);
  for (size_t k = 0; k < num_parts; ++k) parts[k] = At<T>(c.reads[k], call);
  const T* residual = c.norm && c.norm->residual ? At<T>(c.reads[num_parts], call) : nullptr;
  T* total = reinterpret_cast<T*>(Resolve(c.writes[0], call));
  for (size_t i = 0; i < count; ++i) {
    float sum = Widen(parts[0][i]);
    for (size_t k = 1; k < num_parts; ++k) sum += Widen(parts[k][i]);
    if (residual) sum = Rounded<T>(sum) + Widen(residual[i]);
    Narrow(sum, total[i]);
  }
  if (!c.norm) return;
  T* normed = reinterpret_cast<T*>(Resolve(c.writes[1], call));
  for (size_t i = 0; i < count; i += c.norm->width) {
    if (c.norm->weight == Element::kFloat32) {
      NormalizeRow(*c.norm, total + i, At<float>(c.reads.back(), call), normed + i);
    } else {
      const auto* weights = c.norm->weight ? At<uint16_t>(c.reads.back(), call) : nullptr;
      NormalizeRow(*c.norm, total + i, weights, normed + i);
    }
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
