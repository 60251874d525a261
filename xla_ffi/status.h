// Errors as values. A message names the operator at fault; nothing here throws.
#pragma once

#include <charconv>
#include <exception>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

namespace dynaflow {

// Not with an ostream: where libstdc++ is linked into the extension as well as into its host process, the
// locales of the second copy may never have been set up, and printing a number crashes.
inline void Append(std::string& out, std::string_view text) { out += text; }
template <typename Number>
  requires std::is_arithmetic_v<Number>
void Append(std::string& out, Number number) {
  if constexpr (std::is_same_v<Number, char>) {
    out += number;
  } else if constexpr (std::is_floating_point_v<Number>) {
    char digits[32];  // the shortest form that reads back as the same number
    out.append(digits, std::to_chars(std::begin(digits), std::end(digits), number).ptr);
  } else {
    out += std::to_string(number);
  }
}

// Joins text and numbers.
template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::string out;
  (Append(out, parts), ...);
  return out;
}

enum class Code {
  kOk,
  kInvalidArgument,     // the caller's bytes, sizes or indices are wrong
  kNotFound,            // no such plan, program or capture
  kFailedPrecondition,  // right call, wrong moment: an address moved, a capture is open
  kUnimplemented,       // this device, driver or graph cannot do it
  kInternal,            // an operator or the device failed
};

// Success costs one null pointer.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message)
      : error_(std::make_shared<const Error>(Error{code, std::move(message)})) {}

  bool ok() const { return error_ == nullptr; }
  Code code() const { return error_ ? error_->code : Code::kOk; }
  const std::string& message() const {
    static const std::string kNone;
    return error_ ? error_->message : kNone;
  }

  // The same error, told from further out: "where: message". `where` is called only for an error, since the
  // text costs more than the calls it is about.
  template <typename Where>
  Status Within(const Where& where) const {
    return ok() ? Status() : Status(code(), where() + ": " + message());
  }

 private:
  struct Error {
    Code code;
    std::string message;
  };
  std::shared_ptr<const Error> error_;
};

template <typename... Parts>
Status InvalidArgument(const Parts&... parts) {
  return Status(Code::kInvalidArgument, StrCat(parts...));
}
template <typename... Parts>
Status NotFound(const Parts&... parts) {
  return Status(Code::kNotFound, StrCat(parts...));
}
template <typename... Parts>
Status FailedPrecondition(const Parts&... parts) {
  return Status(Code::kFailedPrecondition, StrCat(parts...));
}
template <typename... Parts>
Status Unimplemented(const Parts&... parts) {
  return Status(Code::kUnimplemented, StrCat(parts...));
}
template <typename... Parts>
Status Internal(const Parts&... parts) {
  return Status(Code::kInternal, StrCat(parts...));
}

// What a function returns, or what it throws, as an error. For where others wait for what comes after it: an
// exception that got past there would leave them waiting.
template <typename Function>
Status Caught(const Function& function) {
  try {
    return function();
  } catch (const std::exception& e) {
    return Internal(e.what());
  }
}

// A value, or why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}         // NOLINT: converts like a return value
  Result(Status status) : state_(std::move(status)) {}  // NOLINT

  bool ok() const { return std::holds_alternative<T>(state_); }
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }
  T& value() { return std::get<T>(state_); }
  const T& value() const { return std::get<T>(state_); }
  T& operator*() { return value(); }
  T* operator->() { return &value(); }

 private:
  std::variant<Status, T> state_;
};

#define DYNAFLOW_RETURN_IF_ERROR(expr)                                      \
  do {                                                                      \
    if (::dynaflow::Status status_ = (expr); !status_.ok()) return status_; \
  } while (false)

// DYNAFLOW_ASSIGN(auto x, MakeX()): x, or out of the function with the error.
#define DYNAFLOW_ASSIGN(lhs, expr) DYNAFLOW_ASSIGN_(lhs, expr, DYNAFLOW_CONCAT_(result_, __LINE__))
#define DYNAFLOW_ASSIGN_(lhs, expr, result) \
  auto result = (expr);                     \
  if (!result.ok()) return result.status(); \
  lhs = std::move(*result)
#define DYNAFLOW_CONCAT_(a, b) DYNAFLOW_CONCAT2_(a, b)
#define DYNAFLOW_CONCAT2_(a, b) a##b

}  // namespace dynaflow
