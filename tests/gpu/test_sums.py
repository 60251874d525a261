"""The kernel that waits for flags, reads, adds and normalizes: on one device, which sets the flags that it awaits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynaflow_jax.runtime import extension
from dynaflow_jax.runtime import program as wire


def memory(array):
    return wire.Range(wire.MEMORY, 0, array.unsafe_buffer_pointer(), array.nbytes)


def summed(parts, rounds=1, norm=None, more=(), **options):
    """What a program of one device adds; every round signals, awaits and adds. With a norm, that too."""
    extension.register("cuda")
    flags = jnp.zeros(len(parts), jnp.uint32).block_until_ready()
    results = [jnp.zeros_like(parts[0]).block_until_ready() for _ in range(1 if norm is None else 2)]
    element = wire.ELEMENTS[parts[0].dtype.name]
    each = [wire.Range(wire.MEMORY, 0, flags.unsafe_buffer_pointer() + 4 * i, 4) for i in range(len(parts))]
    commands = []
    for _ in range(rounds):
        commands += [wire.Command(wire.SIGNAL, 0, "tell", 0, (), (flag,)) for flag in each]
        commands += [wire.Command(wire.AWAIT, 0, "hear", 0, (), (flag,)) for flag in each]
        reads, writes = tuple(map(memory, [*parts, *more])), tuple(map(memory, results))
        commands.append(wire.Command(wire.SUM, 0, "add", 0, reads, writes, element=element, norm=norm))
    for i, result in enumerate(results):
        output = wire.Range(wire.OUTPUT, i, 0, result.nbytes)
        commands.append(wire.Command(wire.COPY, 0, "output", 0, (memory(result),), (output,)))
    module = extension.module
    plan = module.create_plan()
    outputs = [wire.Output(result.nbytes) for result in results]
    blob = wire.encode(module.PROGRAM_VERSION, "sums", [wire.Stream()], [], [], outputs, commands)
    keep = [parts, more, results]
    module.add_cuda_program(plan, [jax.devices()[0].local_hardware_id], blob, keep_alive=keep, **options)
    avals = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    call = jax.ffi.ffi_call("dynaflow_dispatch", avals, has_side_effect=True)
    run = jax.jit(lambda: call(plan=np.int64(plan)))
    runs = [run() for _ in range(3)]
    assert not np.asarray(flags).any(), "flags are clear behind a run"
    module.free_plan(plan)
    for found in runs:
        for one, first in zip(found, runs[0], strict=True):
            assert (one.view(np.uint8) == first.view(np.uint8)).all()
    return runs[0]


def drawn(count, size, dtype, seed=0):
    keys = jax.random.split(jax.random.key(size + seed), count)
    return [jax.random.normal(key, (size,)).astype(dtype).block_until_ready() for key in keys]


@pytest.mark.parametrize("one_graph", [True, False])
@pytest.mark.parametrize("size", [8, 4096, 3 * 512 * 8, 1 << 20, 5 << 20])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_sums_are_of_float32_and_rounded_once(count, dtype, size, one_graph):
    parts = drawn(count, size, dtype)
    want = np.asarray(parts[0], np.float32)
    for part in parts[1:]:
        want = want + np.asarray(part, np.float32)
    (got,) = summed(parts, rounds=3, one_graph=one_graph)
    np.testing.assert_array_equal(np.asarray(got), want.astype(dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_no_number_or_has_no_end(dtype):
    values = jnp.asarray([np.nan, np.inf, np.inf, -np.inf, 3e38, -0.0, 1.0, 1e-40], dtype)
    others = jnp.asarray([1.0, -np.inf, 1.0, -1.0, 3e38, -0.0, np.nan, 1e-40], dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        want = (np.asarray(values, np.float32) + np.asarray(others, np.float32)).astype(dtype)
    (got,) = summed([values, others])
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def reference(total, weight, norm):
    """The norm in float64, and what roundings may make of it."""
    dtype = total.dtype
    x = np.asarray(total, np.float64).reshape(-1, norm.width)
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps)
    normed = x * scale * (1 if weight is None else np.asarray(weight, np.float64))
    unit = 2.0 ** (-8 if dtype == jnp.bfloat16 else -23)  # half of it is one rounding
    roundings = 1 + (norm.rounds_scale + norm.rounds_normed if dtype == jnp.bfloat16 else 8)
    return normed.reshape(-1), np.abs(normed).reshape(-1) * unit * roundings


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("weights", [None, "float32", "its own"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 520), (7, 2048), (256, 4096), (1500, 4096), (5, 8192)])
def test_norms(rows, width, dtype, weights, residual):
    parts = drawn(2, rows * width, dtype)
    (added,) = drawn(1, rows * width, dtype, seed=1)
    kind = None if weights is None else jnp.float32 if weights == "float32" else dtype
    weight = None if kind is None else jax.random.normal(jax.random.key(3), (width,)).astype(kind)
    more = [*([added] if residual else []), *([] if weight is None else [weight])]
    norm = wire.Norm(width, 1e-5, residual, None if kind is None else jnp.dtype(kind).name)
    total, normed = summed(parts, rounds=2, norm=norm, more=more)
    want = (np.asarray(parts[0], np.float32) + np.asarray(parts[1], np.float32)).astype(dtype)
    if residual:
        want = (want.astype(np.float32) + np.asarray(added, np.float32)).astype(dtype)
    np.testing.assert_array_equal(np.asarray(total), want)
    exact, bound = reference(total, weight, norm)
    assert (np.abs(np.asarray(normed, np.float64) - exact) <= bound).all()


@pytest.mark.parametrize("rounds", [(True, False), (False, True), (True, True)])
def test_norms_round_where_they_say(rounds):
    """Once more than they must: what differs by more than that rounding would is wrong."""
    width = 4096
    parts, weight = drawn(3, 64 * width, jnp.bfloat16), drawn(1, width, jnp.bfloat16)[0]
    norm = wire.Norm(width, 1e-5, False, "bfloat16", *rounds)
    total, normed = summed(parts, norm=norm, more=[weight])
    x = np.asarray(total, np.float32).reshape(-1, width)
    scale = (1 / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps)).astype(np.float32)
    near = lambda value: np.asarray(jnp.asarray(value).astype(jnp.bfloat16), np.float32)  # noqa: E731
    scaled = x * (near(scale) if rounds[0] else scale)
    scaled = near(scaled) if rounds[1] else scaled
    want = near(scaled * np.asarray(weight, np.float32)).reshape(-1)
    same = np.asarray(normed, np.float32) == want
    assert same.mean() > 0.99, "all but those beside which a sum of squares in another order comes to lie"
