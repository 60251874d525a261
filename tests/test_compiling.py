"""Partitions are compiled once, and kept where JAX keeps what it compiles."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import dynaflow_jax as df
from dynaflow_jax import compat
from dynaflow_jax.errors import DispatchWarning
from dynaflow_jax.runtime import extension

pytestmark = pytest.mark.skipif(extension.module is None, reason="the extension was not built")


class InTurns(df.OpScheduler):
    """Every operator on another stream than the one before, so that each is a partition."""

    def schedule(self, ctx):
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, stream=f"s{len(ctx.steps) % 2}")


def chain(x):
    for i in range(4):
        with df.mark(f"step {i}"):
            x = jnp.tanh(x @ x.T + i % 2) @ x
    return x


def dispatched(fun=chain):
    return jax.jit(df.dynaflow(fun, scheduler=InTurns(), backend="dispatch"))


def test_equal_modules_are_compiled_once(monkeypatch):
    compiled, real = [], compat.compile_for
    monkeypatch.setattr(compat, "compile_for", lambda *args: compiled.append(args) or real(*args))
    x = jnp.full((8, 8), 0.1)
    run = dispatched()
    assert jnp.allclose(run(x), chain(x), rtol=1e-5)
    assert len(compiled) == 2  # which differ in the number that they add; names do not count
    run(x + 1)
    assert len(compiled) == 2


def test_what_cannot_be_compiled_is_named(monkeypatch):
    real, count = compat.compile_for, iter(range(100))

    def compile_for(*args):
        if next(count):
            raise ValueError("no such instruction")
        return real(*args)

    monkeypatch.setattr(compat, "compile_for", compile_for)
    x = jnp.full((8, 8), 0.1)
    with pytest.warns(DispatchWarning, match=r"step 1.* could not be compiled: no such instruction"):
        got = dispatched()(x)
    assert jnp.allclose(got, chain(x), rtol=1e-5)


PROGRAM = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
sys.path.insert(0, sys.argv[2])
import test_compiling
from dynaflow_jax import compat
events, real = [], compat.compile_for
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
def compile_for(*args):
    events.clear()
    executable = real(*args)
    print("hit" if "/jax/compilation_cache/cache_hits" in events else "miss")
    return executable
compat.compile_for = compile_for
x = jnp.full((8, 8), 0.1)
assert jnp.allclose(test_compiling.dispatched()(x), test_compiling.chain(x), rtol=1e-5)
"""


def test_another_process_finds_them_in_the_cache(tmp_path, request):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(request.path.parent)]
    said = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(2)]
    assert said == [["miss"] * 2, ["hit"] * 2]
