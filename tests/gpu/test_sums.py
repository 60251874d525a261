"""The kernel that waits for flags, reads and adds: on one device, which sets the flags that it awaits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynaflow_jax.runtime import extension
from dynaflow_jax.runtime import program as wire


def memory(array):
    return wire.Range(wire.MEMORY, 0, array.unsafe_buffer_pointer(), array.nbytes)


def summed(parts, rounds=1, **options):
    """The sum of arrays by a program of one device; every round signals, awaits and adds."""
    extension.register("cuda")
    flags = jnp.zeros(len(parts), jnp.uint32).block_until_ready()
    total = jnp.zeros_like(parts[0]).block_until_ready()
    element = wire.ELEMENTS[total.dtype.name]
    each = [wire.Range(wire.MEMORY, 0, flags.unsafe_buffer_pointer() + 4 * i, 4) for i in range(len(parts))]
    commands = []
    for _ in range(rounds):
        commands += [wire.Command(wire.SIGNAL, 0, "tell", 0, (), (flag,)) for flag in each]
        commands += [wire.Command(wire.AWAIT, 0, "hear", 0, (), (flag,)) for flag in each]
        sources = tuple(map(memory, parts))
        commands.append(wire.Command(wire.SUM, 0, "add", 0, sources, (memory(total),), element=element))
    output = wire.Range(wire.OUTPUT, 0, 0, total.nbytes)
    commands.append(wire.Command(wire.COPY, 0, "output", 0, (memory(total),), (output,)))
    module = extension.module
    plan = module.create_plan()
    blob = wire.encode(module.PROGRAM_VERSION, "sums", [wire.Stream()], [], [], [wire.Output(total.nbytes)], commands)
    module.add_cuda_program(plan, [jax.devices()[0].local_hardware_id], blob, keep_alive=[parts, total], **options)
    call = jax.ffi.ffi_call("dynaflow_dispatch", jax.ShapeDtypeStruct(total.shape, total.dtype), has_side_effect=True)
    run = jax.jit(lambda: call(plan=np.int64(plan)))
    results = [run() for _ in range(3)]
    assert not np.asarray(flags).any(), "flags are clear behind a run"
    module.free_plan(plan)
    assert all((result.view(np.uint8) == results[0].view(np.uint8)).all() for result in results)
    return results[0]


def drawn(count, size, dtype):
    keys = jax.random.split(jax.random.key(size), count)
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
    got = summed(parts, rounds=3, one_graph=one_graph)
    np.testing.assert_array_equal(np.asarray(got), want.astype(dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_no_number_or_has_no_end(dtype):
    values = jnp.asarray([np.nan, np.inf, np.inf, -np.inf, 3e38, -0.0, 1.0, 1e-40], dtype)
    others = jnp.asarray([1.0, -np.inf, 1.0, -1.0, 3e38, -0.0, np.nan, 1e-40], dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        want = (np.asarray(values, np.float32) + np.asarray(others, np.float32)).astype(dtype)
    got = summed([values, others])
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
