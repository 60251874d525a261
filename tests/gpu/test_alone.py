"""Plans of two devices on one, which stands for both: it signals itself, and reads and adds its own memory.

So an all-reduce doubles. What the link adds is missing; flags, sums, norms, copies and their order are there.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from dynaflow_jax.errors import DispatchWarning
from dynaflow_jax.lowering.builder import Builder
from dynaflow_jax.runtime import program as wire
from dynaflow_jax.runtime.binding import Binding
from dynaflow_jax.runtime.work import Work
from examples.benchmarks.overlap import layers, mesh_of, normal
from examples.benchmarks.parallel import tensor_parallel

WIDTH, HIDDEN, HEAD, DEPTH = 1024, 2048, 128, 3


@pytest.fixture
def kinds(monkeypatch):
    """The commands of the programs that are bound, of a device whose groups have it twice."""
    monkeypatch.setattr(Builder, "group_size", lambda self, axes: 2)
    monkeypatch.setattr(Work, "group_size", lambda self, axes: 2)
    monkeypatch.setattr(Work, "group", lambda self, rank, axes: [0, 0])
    wait, encode, found = Binding._await, wire.encode, []

    def await_own(self, stream, name, rank, number, *arrived):
        # Flags of an exchange are numbered by their senders: the first, which it is, sets the first.
        return wait(self, stream, name, rank, number - (name not in ("start", "end")), *arrived)

    def keeping(version, name, streams, partitions, inputs, outputs, commands, devices):
        found.extend((command.kind, command.norm is not None) for command in commands)
        return encode(version, name, streams, partitions, inputs, outputs, commands, devices)

    monkeypatch.setattr(Binding, "_await", await_own)
    monkeypatch.setattr(wire, "encode", keeping)
    return found


STRATEGIES = {
    "in turns": (df.strategies.Sequential(), {(wire.SUM, True): 2 * DEPTH - 1, (wire.SUM, False): 1}),
    "halves": (df.strategies.NanoFlow(2), {}),
    "halves at once": (df.strategies.NanoFlow(2, concurrent=True), {}),
    "uneven": (df.strategies.TokenWeave(tile=1, min_rows=1), {}),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("batch", [2, 5])
def test_tensor_parallel_layers(name, batch, kinds):
    scheduler, expected = STRATEGIES[name]
    mesh = mesh_of("tp", 1)
    shapes = ((WIDTH, 3 * WIDTH // 2), (WIDTH // 2, WIDTH), (WIDTH, 2 * HIDDEN), (HIDDEN, WIDTH))
    spec = (P(None, "tp"), P("tp", None), P(None, "tp"), P("tp", None))
    ws, x = layers(mesh, shapes, spec, DEPTH), normal(mesh, (batch, 128, WIDTH), P(), 99, 1.0)

    def mapped(fun):
        return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=([spec] * DEPTH, P()), out_specs=P(), check_vma=False))

    model = functools.partial(tensor_parallel, reduce=lambda y: lax.psum(y, "tp"), head=HEAD)
    ours = mapped(df.dynaflow(model, scheduler=scheduler, batch_axes=(None, 0), backend="dispatch"))
    want = mapped(functools.partial(tensor_parallel, reduce=lambda y: y + y, head=HEAD))(ws, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DispatchWarning)
        first = ours(ws, x)
    for kind, count in expected.items():
        assert kinds.count(kind) == count
    difference = jnp.linalg.norm((first - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32))
    assert difference < 2e-2, "halves are other products, which round otherwise"
    for seed in range(20):
        fresh = normal(mesh, x.shape, P(), seed, 1.0)
        once, again = ours(ws, fresh), ours(ws, fresh)
        np.testing.assert_array_equal(once, again)
    np.testing.assert_array_equal(ours(ws, x), first)
