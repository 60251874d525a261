#!/bin/sh
# Builds and tests everything with Debian's bazel-bootstrap, without a network. With a current Bazel, from anywhere:
# `bazel test //...`. Needs: bazel-bootstrap bazel-platforms libgtest-dev libgmock-dev.
set -eu
cd "$(dirname "$0")/../.."
platforms=/usr/share/bazel/platforms  # Debian ships apart what other Bazels embed
[ ! -d "$platforms" ] || set -- --override_repository=platforms="$platforms" "$@"
exec bazel --batch test --test_output=errors "$@" //...
