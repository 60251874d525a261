"""The headers that the extension module needs, from the Python that the build finds.

@python_env//:ffi is XLA's FFI (from jaxlib), @python_env//:nanobind is nanobind with Python's own headers. The
Python is $PYTHON_BIN_PATH, or python3. Where it lacks one of the packages, HAS_MODULE_DEPS is False and the targets
that need them are left out of //...
"""

_LOCATE = """
import importlib.util, sysconfig
for package in "jaxlib", "nanobind":
    print(importlib.util.find_spec(package).submodule_search_locations[0])
print(sysconfig.get_path("include"))
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "ffi",
    hdrs = glob(["ffi/**/*.h"], allow_empty = True),
    includes = ["ffi"],
)

cc_library(
    name = "python",
    hdrs = glob(["python/**/*.h"], allow_empty = True),
    includes = ["python"],
)

cc_library(
    name = "nanobind",
    srcs = glob(["nanobind/src/nb_combined.cpp"], allow_empty = True),
    hdrs = glob(["nanobind/include/**/*.h", "robin_map/**/*.h"], allow_empty = True),
    copts = ["-std=c++20", "-fvisibility=hidden", "-fno-strict-aliasing", "-w"],
    defines = ["NB_COMPACT_ASSERTIONS"],
    includes = ["nanobind/include", "robin_map"],
    linkstatic = True,
    textual_hdrs = glob(["nanobind/src/*.h", "nanobind/src/*.cpp"], allow_empty = True),
    deps = [":python"],
)
"""

def _python_env_impl(ctx):
    python = ctx.os.environ.get("PYTHON_BIN_PATH") or ctx.which("python3")
    found = ctx.execute([python, "-c", _LOCATE]) if python else None
    complete = bool(found) and found.return_code == 0
    if complete:
        jaxlib, nanobind, include = found.stdout.strip().split("\n")
        ctx.symlink(jaxlib + "/include", "ffi")
        ctx.symlink(nanobind + "/include", "nanobind/include")
        ctx.symlink(nanobind + "/src", "nanobind/src")
        ctx.symlink(nanobind + "/ext/robin_map/include", "robin_map")
        ctx.symlink(include, "python")
    ctx.file("BUILD", _BUILD)
    ctx.file("found.bzl", "HAS_MODULE_DEPS = %s\n" % complete)

python_env = repository_rule(
    implementation = _python_env_impl,
    environ = ["PATH", "PYTHON_BIN_PATH"],
    local = True,
)
