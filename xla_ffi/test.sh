#!/bin/sh
# Builds and runs the C++ tests: plain, with Address- and UndefinedBehaviorSanitizer, with ThreadSanitizer.
# Needs CMake, a C++20 compiler and GoogleTest with GoogleMock (Debian: libgtest-dev libgmock-dev).
# Arguments: the configurations to run; default: plain asan tsan.
set -eu
cd "$(dirname "$0")"
[ $# -gt 0 ] || set -- plain asan tsan
jobs=$(nproc 2>/dev/null || echo 2)
command -v ninja >/dev/null && export CMAKE_GENERATOR="${CMAKE_GENERATOR:-Ninja}"
for config; do
  echo "== $config"
  cmake --preset "$config" >/dev/null
  cmake --build "../build/cpp-$config" -j "$jobs" >"../build/cpp-$config/build.log" 2>&1 || { cat "../build/cpp-$config/build.log"; exit 1; }
  ctest --preset "$config" -j "$jobs" >"../build/cpp-$config/test.log" || { cat "../build/cpp-$config/test.log"; exit 1; }
  tail -n 3 "../build/cpp-$config/test.log" | head -n 1
done
