"""The extension module, without and with XLA: programs written by hand, partitions that are Python functions."""

import functools
import gc
import os
import pathlib
import re
import struct
import sys
import threading
import weakref

# Before jax is imported.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynaflow_jax import _dispatch

jax.devices()  # JAX tells XLA of types after handlers, unless the platform is there already
jax.ffi.register_ffi_type(*_dispatch.callee_type("cpu"), platform="cpu")
for name, stages in _dispatch.handlers("cpu"):
    jax.ffi.register_ffi_target(name, stages, platform="cpu")

MEMORY, INPUT, OUTPUT = range(3)
LAUNCH, COPY, RECORD, WAIT, SIGNAL, AWAIT, SUM = range(7)
FLOAT32, BFLOAT16 = range(2)


def listing(entries):
    return struct.pack("<I", len(entries)) + b"".join(entries)


def string(text):
    return struct.pack("<I", len(text.encode())) + text.encode()


def span(space, index, offset, size):
    return struct.pack("<BIQQ", space, index, offset, size)


def command(kind, stream, name, target=0, reads=(), writes=(), element=FLOAT32):
    rows = struct.pack("<IQQ", 1, 0, 0) if kind == COPY else b""
    summed = struct.pack("<BI", element, 0) if kind == SUM else b""
    head = struct.pack("<BI", kind, stream) + string(name) + struct.pack("<I", target)
    return head + listing(reads) + listing(writes) + rows + summed


def program(*, devices=1, streams=1, events=0, partitions=0, inputs=(), outputs=(), commands=()):
    return b"".join(
        (
            b"DYNAFLOW",
            struct.pack("<I", _dispatch.PROGRAM_VERSION),
            string("test"),
            struct.pack("<II", devices, events),
            listing([struct.pack("<IiI", 0, 0, 0)] * streams),
            listing([struct.pack("<q", k) for k in range(partitions)]),
            listing([struct.pack("<BQQ", *i) for i in inputs]),
            listing([struct.pack("<iQQ", *o) for o in outputs]),
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
        outputs=[(-1, size, 0)],
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


def test_takes_times():
    pool = np.zeros((4, 256), np.float32)
    plan = _dispatch.create_plan()
    both = threading.Barrier(2)  # the branches run at once, or never get through

    def branch(row, value):
        both.wait(timeout=60)
        np.copyto(pool[row], value())

    blob, partitions = two_branches(
        pool,
        [
            lambda: branch(1, lambda: pool[0] + 1),
            lambda: branch(2, lambda: pool[0] * 2),
            lambda: np.copyto(pool[3], pool[1] + pool[2]),
        ],
    )
    with pytest.raises(_dispatch.DispatchError, match="the plan has no program for device 0"):
        _dispatch.run_times(plan, 0)
    _dispatch.add_host_program(plan, 0, blob, partitions, timed=True, keep_alive=pool)
    with pytest.raises(_dispatch.DispatchError, match="has not run yet"):
        _dispatch.run_times(plan, 0)
    x, y = np.arange(256, dtype=np.float32), np.empty(256, np.float32)
    for _ in range(3):
        _dispatch.run_host(plan, 0, [address(x)], [address(y)])
        times = _dispatch.run_times(plan, 0)
        keys = ("operator", "kind", "stream", "device", "bytes")
        assert [tuple(t[key] for key in keys) for t in times] == [
            ("input", "copy", 0, 0, 1024),
            ("left", "launch", 0, 0, 2048),
            ("right", "launch", 1, 0, 2048),
            ("join", "launch", 0, 0, 3072),
            ("output", "copy", 0, 0, 1024),
        ]
        assert all(0 <= t["begin_us"] <= t["end_us"] for t in times)
        before = {"left": ["input"], "right": ["input"], "join": ["left", "right"], "output": ["join"]}
        by_name = {t["operator"]: t for t in times}
        for name, others in before.items():
            assert all(by_name[other]["end_us"] <= by_name[name]["begin_us"] for other in others)
        assert by_name["left"]["begin_us"] < by_name["right"]["end_us"]
        assert by_name["right"]["begin_us"] < by_name["left"]["end_us"]
    _dispatch.free_plan(plan)


@pytest.mark.parametrize(("element", "dtype"), [(FLOAT32, jnp.float32), (BFLOAT16, jnp.bfloat16)])
def test_adds_and_takes_the_time_of_it(element, dtype):
    pool = np.arange(4 * 256).reshape(4, 256).astype(dtype)
    at = [span(MEMORY, 0, address(row), row.nbytes) for row in pool]
    blob = program(commands=[command(SUM, 0, "sum", reads=at[:3], writes=at[3:], element=element)])
    plan = _dispatch.create_plan()
    _dispatch.add_host_program(plan, 0, blob, [], timed=True, keep_alive=pool)
    _dispatch.run_host(plan, 0, [], [])
    np.testing.assert_array_equal(pool[3], pool[:3].astype(np.float32).sum(axis=0).astype(dtype))
    [ran] = _dispatch.run_times(plan, 0)
    assert (ran["operator"], ran["kind"], ran["device"], ran["bytes"]) == ("sum", "sum", 0, pool.nbytes)
    assert 0 <= ran["begin_us"] <= ran["end_us"]
    _dispatch.free_plan(plan)


def test_the_readmes_example_runs():
    readme = pathlib.Path(__file__).parent.parent / "README.md"
    [example] = [code for code in re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL) if "struct" in code]
    exec(compile(example, str(readme), "exec"), {})


def test_times_are_taken_where_that_was_asked_for(plan):
    call(plan)(jnp.zeros(256)).block_until_ready()
    with pytest.raises(_dispatch.DispatchError, match="'test' was not added with timed=True"):
        _dispatch.run_times(plan, 0)


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
        "participants": 1,
        "broken": "",
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

    def on_miss(calls):
        [(device, inputs, outputs)] = calls
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
    def on_miss(calls):
        raise MemoryError("no pool")

    plan = _dispatch.create_plan(on_miss)
    with pytest.raises(Exception, match="MemoryError: no pool"):
        jax.block_until_ready(call(plan)(jnp.ones(256)))
    _dispatch.free_plan(plan)


class Mute(Exception):
    def __str__(self):
        raise ValueError("not now")


class Anonymous(type):
    @property
    def __name__(cls):
        raise ValueError("not now")


class Nameless(Exception, metaclass=Anonymous):
    pass


# What os.fsdecode makes of a name that is no UTF-8 has surrogates.
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError("cannot open 'a\udcff'"), r"OSError: cannot open 'a\\udcff'"),
        (Mute(), "Mute, which has no text"),
        (Nameless(), "an exception, which has no text"),
    ],
)
@pytest.mark.parametrize("participants", [1, 2])
def test_any_exception_is_the_error_of_all(participants, error, says):
    def on_miss(calls):
        raise error

    plan = _dispatch.create_plan(on_miss, participants=participants, timeout_s=60)
    for _ in range(2):  # the first one leaves nothing behind that the second would wait for
        runs = [lambda d=d: _dispatch.run_host(plan, d, [], []) for d in range(participants)]
        assert all(re.fullmatch(says, text) for text in in_threads(runs))
    _dispatch.free_plan(plan)


class Ring:
    """A plan of devices that each send their input to the next one and give the sum of their own and what came."""

    def __init__(self, devices, **options):
        self.x = np.zeros((devices, 256), np.float32)
        self.came = np.zeros_like(self.x)
        self.total = np.zeros_like(self.x)
        self.room = np.zeros(devices, np.uint32)
        self.arrived = np.zeros(devices, np.uint32)
        self.bound = []
        self.work = [lambda d=d: np.add(self.x[d], self.came[d], out=self.total[d]) for d in range(devices)]
        self.plan = _dispatch.create_plan(self.bind, participants=devices, **options)

    def bind(self, calls):
        self.bound.append(sorted(device for device, _, _ in calls))
        for device, inputs, outputs in calls:
            assert len(inputs) == len(outputs) == 1
            _dispatch.add_host_program(self.plan, device, self.program(device), [self.work[device]], keep_alive=self)

    def program(self, device):
        devices, size = len(self.x), self.x[0].nbytes
        after, before = (device + 1) % devices, (device - 1) % devices
        x, came, total = (span(MEMORY, 0, address(a[device]), size) for a in (self.x, self.came, self.total))

        def flag(flags, index):
            return span(MEMORY, 0, address(flags[index:]), 4)

        there = span(MEMORY, 0, address(self.came[after]), size)
        return program(
            devices=devices,
            streams=2,
            events=1,
            partitions=1,
            inputs=[(0, 0, size)],
            outputs=[(-1, size, 0)],
            commands=[
                command(COPY, 0, "input", reads=[span(INPUT, 0, 0, size)], writes=[x]),
                command(RECORD, 0, "input", 0),
                command(SIGNAL, 1, "room", before, writes=[flag(self.room, before)]),
                command(AWAIT, 0, "room", after, writes=[flag(self.room, device)]),
                command(COPY, 0, "send", after, reads=[x], writes=[there]),
                command(SIGNAL, 0, "sent", after, writes=[flag(self.arrived, after)]),
                command(AWAIT, 1, "receive", before, writes=[flag(self.arrived, device), came]),
                command(WAIT, 1, "sum", 0),
                command(LAUNCH, 1, "sum", 0, reads=[x, came], writes=[total]),
                command(COPY, 1, "output", reads=[total], writes=[span(OUTPUT, 0, 0, size)]),
            ],
        )

    def run(self, device, run):
        x, y = np.full(256, 10 * run + device, np.float32), np.empty(256, np.float32)
        _dispatch.run_host(self.plan, device, [address(x)], [address(y)], run_id=run)
        return y


def in_threads(functions):
    """What the functions return or raise, run all at once."""
    results = [None] * len(functions)

    def call(i):
        try:
            results[i] = functions[i]()
        except _dispatch.DispatchError as error:
            results[i] = str(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


@pytest.mark.parametrize("devices", [2, 4])
def test_devices_exchange(devices):
    ring = Ring(devices)

    def many(device):
        for run in range(50):
            np.testing.assert_array_equal(ring.run(device, run), 20 * run + device + (device - 1) % devices)

    assert in_threads([lambda d=d: many(d) for d in range(devices)]) == [None] * devices
    assert ring.bound == [list(range(devices))]
    stats = _dispatch.plan_stats(ring.plan)
    assert (stats["participants"], stats["broken"], stats["runs"]) == (devices, "", 50 * devices)
    _dispatch.free_plan(ring.plan)


def test_devices_exchange_under_xla():
    ring = Ring(2)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), "d")
    spec = jax.sharding.PartitionSpec("d")
    shape = jax.ShapeDtypeStruct((256,), jnp.float32)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def f(x):
        return jax.ffi.ffi_call("dynaflow_dispatch", shape)(x, plan=np.int64(ring.plan))

    for i in range(50):
        x = np.concatenate([np.full(256, i), np.full(256, 7)]).astype(np.float32)
        np.testing.assert_array_equal(f(x), np.full(512, i + 7))
    _dispatch.free_plan(ring.plan)


def test_whoever_does_not_come_is_missed_and_the_plan_is_broken():
    ring = Ring(2, timeout_s=0.05)
    with pytest.raises(_dispatch.DispatchError, match=r"only 1 has come \(device 1\).*timeout_s") as first:
        ring.run(1, 0)
    with pytest.raises(_dispatch.DispatchError) as second:
        ring.run(0, 0)
    assert str(second.value) == str(first.value) == _dispatch.plan_stats(ring.plan)["broken"]
    _dispatch.free_plan(ring.plan)


def test_an_exception_on_one_device_is_the_error_of_all():
    ring = Ring(3)
    ring.work[1] = lambda: 1 / 0
    errors = in_threads([lambda d=d: ring.run(d, 0) for d in range(3)])
    assert errors == ["device 1: operator 'sum' (command 8): ZeroDivisionError: division by zero"] * 3
    _dispatch.free_plan(ring.plan)


def test_a_plan_wants_participants_and_time():
    with pytest.raises(_dispatch.DispatchError, match="at least one participant"):
        _dispatch.create_plan(participants=0)
    plan = _dispatch.create_plan()
    notice = np.zeros(256, np.uint32)
    for seconds in (-1, 0, float("nan")):
        with pytest.raises(_dispatch.DispatchError, match=r"timeout_s is .*, not above 0"):
            _dispatch.create_plan(timeout_s=seconds)
        with pytest.raises(_dispatch.DispatchError, match=r"timeout_s is .*, not above 0"):
            _dispatch.set_peers(plan, address(notice), [], seconds, keep_alive=notice)
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
    y = np.from_dlpack(Exported(_dispatch.dlpack_capsule(address(x), [3, 4], 2, 32, 1, 0)))
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
