"""The native C++ rules, under the names that this project and Bazel's own tools load from rules_cc."""

cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
fdo_prefetch_hints = native.fdo_prefetch_hints
fdo_profile = native.fdo_profile
objc_import = native.objc_import
objc_library = native.objc_library

def _compiler_flag_impl(_ctx):
    return [config_common.FeatureFlagInfo(value = "gcc")]

compiler_flag = rule(
    implementation = _compiler_flag_impl,
    attrs = {"_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain"))},
)

def _cc_flags_supplier_impl(_ctx):
    return [platform_common.TemplateVariableInfo({"CC_FLAGS": ""})]

cc_flags_supplier = rule(implementation = _cc_flags_supplier_impl)
