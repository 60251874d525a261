"""For Bazels with modules."""

load(":python_env.bzl", _python_env = "python_env")

def _python_env_impl(_ctx):
    _python_env(name = "python_env")

python_env = module_extension(implementation = _python_env_impl)
