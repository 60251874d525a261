"""The extension module, without and with XLA: programs written by hand, partitions that are Python functions."""

import gc
import struct
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynaflow_jax import _dispatch

for name, platform, capsule in _dispatch.handlers():
    jax.ffi.register_ffi_target(name, capsule, platform=platform)

MEMORY, INPUT, OUTPUT = range(3)
LAUNCH, COPY, RECORD, WAIT = range(4)


def listing(entries):
    return struct.pack("<I", len(entries)) + b"".join(entries)


def string(text):
    return struct.pack("<I", len(text.encode())) + text.encode()


def span(space, index, offset, size):
    return struct.pack("<BIQQ", space, index, offset, size)


def command(kind, stream, name, target=0, reads=(), writes=()):
    return (
        struct.pack("<BI", kind, stream) + string(name) + struct.pack("<I", target) + listing(reads) + listing(writes)
    )


def program(*, streams=1, events=0, partitions=0, inputs=(), outputs=(), commands=()):
    return b"".join(
        (
            b"DYNAFLOW",
            struct.pack("<I", _dispatch.PROGRAM_VERSION),
            string("test"),
            struct.pack("<II", 1, events),
            listing([struct.pack("<IiI", 0, 0, 0)] * streams),
            listing([struct.pack("<q", k) for k in range(partitions)]),
            listing([struct.pack("<BQQ", *i) for i in inputs]),
            listing([struct.pack("<iQ", *o) for o in outputs]),
            listing(commands),
        )
    )


def address(array):
    return array.__array_interface__["data"][0]


def two_branches(pool, work):
    """Input 0 -> pool[0]; two branches side by side fill pool[1] and pool[2]; a third joins them into pool[3]."""
    size = pool[0].nbytes
    at = [span(MEMORY, 0, address(row), size) for row in pool]
    blob = program(
        streams=2,
        events=2,
        partitions=3,
        inputs=[(0, 0, size)],
        outputs=[(-1, size)],
        commands=[
            command(COPY, 0, "input", reads=[span(INPUT, 0, 0, size)], writes=[at[0]]),
            command(RECORD, 0, "input", 0),
            command(LAUNCH, 0, "left", 0, reads=[at[0]], writes=[at[1]]),
            command(WAIT, 1, "right", 0),
            command(LAUNCH, 1, "right", 1, reads=[at[0]], writes=[at[2]]),
            command(RECORD, 1, "right", 1),
            command(WAIT, 0, "join", 1),
            command(LAUNCH, 0, "join", 2, reads=[at[1], at[2]], writes=[at[3]]),
            command(COPY, 0, "output", reads=[at[3]], writes=[span(OUTPUT, 0, 0, size)]),
        ],
    )
    return blob, work or [
        lambda: np.copyto(pool[1], pool[0] + 1),
        lambda: np.copyto(pool[2], pool[0] * 2),
        lambda: np.copyto(pool[3], pool[1] + pool[2]),
    ]


@pytest.fixture
def plan():
    pool = np.zeros((4, 256), np.float32)
    plan = _dispatch.create_plan()
    blob, partitions = two_branches(pool, None)
    _dispatch.add_host_program(plan, 0, blob, partitions, keep_alive=pool)
    yield plan
    _dispatch.free_plan(plan)


def call(plan):
    shape = jax.ShapeDtypeStruct((256,), jnp.float32)
    return jax.jit(lambda x: jax.ffi.ffi_call("dynaflow_dispatch", shape)(x, plan=np.int64(plan)) + 1)


def test_runs_inside_jit(plan):
    f = call(plan)
    for i in range(100):
        x = jnp.arange(256, dtype=jnp.float32) + i
        np.testing.assert_array_equal(f(x), 3 * x + 2)
    assert _dispatch.plan_stats(plan) == {
        "programs": [(0, "threads")],
        "runs": 100,
        "misses": 0,
        "evictions": 0,
    }


def test_two_threads_share_a_plan(plan):
    f = call(plan)
    wrong = []

    def many(start):
        for i in range(50):
            x = jnp.full((256,), start + i, jnp.float32)
            if not np.array_equal(f(x), 3 * x + 2):
                wrong.append(start + i)

    threads = [threading.Thread(target=many, args=(s,)) for s in (0, 1000)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_an_exception_names_the_operator():
    def fail():
        raise ValueError("boom")

    pool = np.zeros((4, 256), np.float32)
    plan = _dispatch.create_plan()
    blob, _ = two_branches(pool, None)
    _dispatch.add_host_program(plan, 0, blob, [lambda: None, fail, lambda: None], keep_alive=pool)
    with pytest.raises(Exception, match=r"operator 'right' \(command 4\): ValueError: boom"):
        jax.block_until_ready(call(plan)(jnp.zeros(256)))
    x = np.zeros(256, np.float32)
    with pytest.raises(_dispatch.DispatchError, match="operator 'right'"):
        _dispatch.run_host(plan, 0, [address(x)], [address(x.copy())])
    _dispatch.free_plan(plan)


def test_a_miss_asks_for_a_program_once():
    pools = []

    def on_miss(device, inputs, outputs):
        assert len(inputs) == len(outputs) == 1
        pools.append(np.zeros((4, 256), np.float32))
        blob, partitions = two_branches(pools[-1], None)
        _dispatch.add_host_program(plan, device, blob, partitions)

    plan = _dispatch.create_plan(on_miss)
    for _ in range(3):
        np.testing.assert_array_equal(call(plan)(jnp.ones(256)), np.full(256, 5))
    assert len(pools) == 1
    assert _dispatch.plan_stats(plan)["misses"] == 1
    _dispatch.free_plan(plan)
    with pytest.raises(Exception, match=f"no plan {plan}"):
        jax.block_until_ready(call(plan)(jnp.ones(256)))


def test_a_failing_on_miss_is_the_error():
    def on_miss(device, inputs, outputs):
        raise MemoryError("no pool")

    plan = _dispatch.create_plan(on_miss)
    with pytest.raises(Exception, match="MemoryError: no pool"):
        jax.block_until_ready(call(plan)(jnp.ones(256)))
    _dispatch.free_plan(plan)


def test_freeing_drops_what_was_kept_alive():
    class Kept:
        pass

    kept = Kept()
    gone = weakref.ref(kept)
    plan = _dispatch.create_plan()
    _dispatch.add_host_program(plan, 0, program(), [], keep_alive=kept)
    del kept
    assert gone() is not None
    _dispatch.free_plan(plan)
    gc.collect()
    assert gone() is None


def test_overlaps_are_refused_or_ordered():
    at = span(MEMORY, 0, 4096, 64)
    blob = program(
        streams=2,
        partitions=2,
        commands=[command(LAUNCH, 0, "write", 0, writes=[at]), command(LAUNCH, 1, "read", 1, reads=[at])],
    )
    with pytest.raises(_dispatch.DispatchError, match=r"operator 'write'.*operator 'read'.*nothing orders them"):
        _dispatch.check_program(blob)
    _dispatch.check_program(_dispatch.order_overlaps(blob))
    with pytest.raises(_dispatch.DispatchError, match="truncated"):
        _dispatch.check_program(blob[:-1])


class Exported:
    """What NumPy wants around a capsule."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return 1, 0


def test_a_capsule_is_the_memory():
    x = np.arange(12, dtype=np.float32)
    y = np.from_dlpack(Exported(_dispatch.dlpack_capsule(address(x), [3, 4], 2, 32, 1, 0, owner=x)))
    np.testing.assert_array_equal(y, x.reshape(3, 4))
    assert np.shares_memory(x, y)


def test_cuda_is_asked_for_politely():
    why = _dispatch.cuda_unavailable_because()
    if why:
        with pytest.raises(_dispatch.DispatchError, match="CUDA"):
            _dispatch.cuda_sm_count(0)
    else:
        assert _dispatch.cuda_sm_count(0) > 0
    with pytest.raises(_dispatch.DispatchError, match="no capture 12345"):
        _dispatch.capture_info(12345)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
