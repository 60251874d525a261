"""The native rule, under the name that Bazel's own tools load from rules_proto."""

proto_library = native.proto_library
