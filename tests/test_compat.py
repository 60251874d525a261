"""Every corner of JAX that only `compat` knows, checked against the version that is installed."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dynaflow_jax import compat
from dynaflow_jax.errors import DynaFlowError


def trace(fun, *args):
    return jax.make_jaxpr(fun)(*args)


def mesh(size=4):
    return jax.make_mesh((size,), ("d",), axis_types=(AxisType.Auto,))


def test_this_version_of_jax_was_looked_at():
    minor = ".".join(jax.__version__.split(".")[:2])
    assert minor in compat.TESTED_VERSIONS, (
        f"Nobody has checked the private corners of JAX {jax.__version__} that dynaflow_jax/compat.py uses. Make the "
        "other tests of this file pass, read JAX's changelog, and add the version to TESTED_VERSIONS."
    )
    assert ".".join(map(str, compat.JAX_VERSION)) == minor


def test_atoms():
    (eqn,) = trace(lambda x: x + 1.0, 2.0).eqns
    assert [compat.is_literal(atom) for atom in eqn.invars] == [False, True]
    assert not compat.is_dropped(eqn.outvars[0])
    assert not compat.is_dropped(eqn.outvars[0])
    assert issubclass(compat.DropVar, compat.Var)
    a, b = compat.new_var(eqn.outvars[0].aval), compat.new_var(eqn.outvars[0].aval)
    assert a is not b
    assert len({a, b}) == 2
    assert a.aval == eqn.outvars[0].aval


def test_jaxprs_open_and_closed():
    table = jnp.arange(3.0)
    closed = trace(lambda x: x + table, jnp.ones(3))
    inner = compat.open_jaxpr(closed)
    assert compat.open_jaxpr(inner).eqns[0] is closed.eqns[0]
    assert compat.is_jaxpr(closed)
    assert compat.is_jaxpr(inner)
    assert not compat.is_jaxpr(table)
    (value,) = compat.consts_of(closed)
    assert value is table
    assert len(compat.all_invars(closed)) == 2
    assert compat.all_invars(closed)[1] is inner.invars[0]


def test_closed_jaxpr_runs():
    closed = trace(lambda x: jnp.sin(x) * 2, 2.0)
    made = compat.closed_jaxpr(closed.jaxpr.invars, closed.jaxpr.outvars, closed.eqns, "mine")
    np.testing.assert_allclose(jax.core.eval_jaxpr(made.jaxpr, (), 2.0)[0], np.sin(2.0) * 2)
    assert made.jaxpr.debug_info.traced_for == "mine"


def test_sub_jaxprs():
    (cond,) = trace(lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x), True, 1.0).eqns[-1:]
    assert [name for name, _ in compat.sub_jaxprs(cond)] == ["branches", "branches"]
    (call,) = trace(jax.jit(lambda x: x + 1), 1.0).eqns
    assert [name for name, _ in compat.sub_jaxprs(call)] == ["jaxpr"]


def test_name_stacks():
    def f(x):
        with jax.named_scope("outer"), jax.named_scope("a/b"):
            return jnp.sin(x)

    stacks = [compat.scopes(compat.name_stack(eqn)) for eqn in trace(jax.grad(f), 1.0).eqns]
    assert stacks[0] == (("jvp", True), ("outer", False), ("a/b", False))
    assert stacks[-1][:2] == (("transpose", True), ("jvp", True))
    (eqn,) = trace(lambda x: x + 1, 1.0).eqns
    moved = compat.replace_eqn(eqn, name_stack=compat.name_stack(trace(f, 1.0).eqns[0]))
    assert compat.scopes(compat.name_stack(moved)) == stacks[0][1:]
    assert "test_compat.py" in compat.source_line(eqn)
    assert "<lambda>" in compat.source_line(eqn)


def test_replace_eqn_keeps_the_rest():
    (eqn,) = trace(lambda x: x + 1.0, 1.0).eqns
    same = compat.replace_eqn(eqn)
    assert (same.primitive, same.params, same.invars, same.outvars) == (
        eqn.primitive,
        eqn.params,
        list(eqn.invars),
        list(eqn.outvars),
    )


def test_bind_keeps_the_name_stack():
    def f(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    (eqn,) = trace(f, 1.0).eqns

    def again(x):
        with jax.named_scope("outer"):
            return compat.bind(eqn, x)[0]

    (bound,) = trace(again, 1.0).eqns
    assert compat.scopes(compat.name_stack(bound)) == (("outer", False), ("inner", False))
    np.testing.assert_allclose(compat.bind(eqn, 2.0)[0], np.sin(2.0), rtol=1e-6)


def test_values():
    assert compat.is_array(jnp.ones(2))
    assert compat.is_array(np.ones(2))
    assert compat.is_array(np.float32(1))
    assert compat.is_array(jax.ShapeDtypeStruct((2,), jnp.float32))
    assert not compat.is_array(1.0)
    assert not compat.is_tracer(jnp.ones(2))
    seen = []
    jax.make_jaxpr(lambda x: (seen.append(compat.is_tracer(x)), x)[1])(1.0)
    assert seen == [True]
    struct = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    assert compat.aval_of(struct) == compat.aval_of(jnp.ones((2, 3), jnp.bfloat16))
    assert compat.resized(compat.aval_of(struct), 1, 5).shape == (2, 5)


def test_distinct_trace_separates_caches_of_this_thread():
    count = [0]

    @jax.jit
    def f(x):
        count[0] += 1
        return x

    def traced(key):
        with compat.distinct_trace(key):
            jax.make_jaxpr(lambda x: f(x))(1.0)
        return count[0]

    assert traced("a") == 1
    assert traced("a") == 1
    assert traced("b") == 2
    found = []
    with compat.distinct_trace("a"):
        thread = threading.Thread(target=lambda: (jax.make_jaxpr(lambda x: f(x))(1.0), found.append(count[0])))
        thread.start()
        thread.join()
    assert found == [3]


def test_trace_context_tells_configurations_apart():
    before = compat.trace_context()
    with jax.default_matmul_precision("highest"):
        assert compat.trace_context() != before
    assert compat.trace_context() == before
    assert hash(before) == hash(compat.trace_context())


def test_call_jaxpr_is_one_function():
    body = trace(lambda x: (jnp.sin(x), x * 2), jnp.ones(3))

    def f(x):
        y, z = compat.call_jaxpr(body, [x], "piece")
        return compat.call_jaxpr(body, [y + z], "piece")

    text = jax.jit(f).lower(jnp.ones(3)).as_text()
    assert text.count("func.func private @piece") == 1
    assert text.count("call @piece") == 2
    np.testing.assert_allclose(jax.jit(f)(jnp.ones(3))[1], 2 * (np.sin(1.0) + 2) * np.ones(3), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: f(x)[1].sum())(jnp.ones(3)), 2 * (np.cos(1.0) + 2), rtol=1e-6)


def test_function_names():
    def body(x):
        return x + 1

    assert compat.function_name(trace(body, 1.0)) == "body"


def scan_eqn():
    def f(w, c, xs):
        return jax.lax.scan(lambda c, x: (c * w + x, c), c, xs)

    return next(e for e in trace(f, 2.0, 1.0, jnp.ones(3)).eqns if e.primitive.name == "scan")


def test_scans():
    eqn = scan_eqn()
    assert compat.scan_partition(eqn) == (1, 1)
    body = compat.open_jaxpr(eqn.params["jaxpr"])
    extra = compat.new_var(body.invars[0].aval)
    from dynaflow_jax.program import Program

    wider = Program((extra, *body.invars), tuple(body.outvars), tuple(body.eqns))
    made = compat.replace_eqn(eqn, params=compat.region_params(eqn, wider, 1))
    assert compat.scan_partition(made) == (2, 1)
    want = compat.bind(eqn, 2.0, 1.0, jnp.ones(3))
    got = compat.bind(made, 9.0, 2.0, 1.0, jnp.ones(3))
    np.testing.assert_allclose(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1])


def test_shard_maps():
    def body(x):
        y = jax.lax.psum(x, "d")
        seen.append((compat.replicated(jax.typeof(x)), compat.replicated(jax.typeof(y))))
        return y

    seen = []
    fun = jax.shard_map(body, mesh=mesh(), in_specs=P("d"), out_specs=P())
    (eqn,) = trace(fun, jnp.ones(8)).eqns
    assert seen == [(False, True)]
    same = compat.shard_map_like(eqn, lambda x: jax.lax.psum(x, "d"), (P("d"),), P())
    np.testing.assert_allclose(same(jnp.arange(8.0)), fun(jnp.arange(8.0)))
    assert compat.input_shards(eqn, 0, 0) == 4


@pytest.mark.parametrize(("spec", "shards"), [(P("d"), 4), (P(None, "d"), 1), (P(), 1), (P(("d",)), 4)])
def test_shards(spec, shards):
    sharding = jax.sharding.NamedSharding(mesh(), spec)
    x = jax.device_put(jnp.ones((8, 8)), sharding)
    assert compat.shards_of(x, 0) == shards
    assert compat.spec_shards(sharding.mesh, spec, 0) == shards
    assert compat.explicit_sharding(x) is None  # the mesh axes are automatic


def test_explicit_shardings():
    explicit = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones((8, 8)), jax.sharding.NamedSharding(explicit, P("d")))
    assert compat.explicit_sharding(x) is not None
    assert compat.shards_of(x, 0) == 4


def test_device():
    assert compat.device()[0] == jax.devices()[0].platform


def test_effects():
    """Communicating is none."""
    fun = lambda x: jax.lax.psum(x, "d")  # noqa: E731
    mapped = jax.shard_map(fun, mesh=mesh(), in_specs=P("d"), out_specs=P())
    (eqn,) = (e for e in trace(mapped, jnp.ones(4)).eqns[0].params["jaxpr"].eqns if "psum" in e.primitive.name)
    assert eqn.effects
    assert not compat.has_effects(eqn)
    (eqn,) = trace(lambda x: jax.debug.callback(lambda _: None, x), 1.0).eqns
    assert compat.has_effects(eqn)


def test_shapes_of_a_function_that_communicates():
    fun = lambda x: (jax.lax.all_gather(x, "d"), jax.lax.axis_index("d"))  # noqa: E731
    found = compat.shapes_of(fun, [jax.typeof(jnp.ones(3))], {"d": 4})
    assert [(leaf.shape, leaf.dtype) for leaf in found] == [((4, 3), jnp.float32), ((), jnp.int32)]

    def inside(x):
        found.append(compat.shapes_of(lambda y: x @ jax.lax.ppermute(y, "d", [(0, 1)]), [jax.typeof(x)], {}))
        return x

    found = []
    jax.eval_shape(jax.shard_map(inside, mesh=mesh(), in_specs=P("d"), out_specs=P("d")), jnp.ones(4))
    assert found[0].shape == ()


def test_devices_that_a_program_may_run_on():
    with jax.sharding.use_abstract_mesh(mesh().abstract_mesh):
        assert compat.device_ordinals() == compat.local_ordinals() == list(range(jax.local_device_count()))
    assert len(compat.device_ordinals()) == 1


def test_processes_have_no_store_unless_they_were_introduced():
    for ask in (lambda: compat.tell_processes("key", "text"), lambda: compat.told_by_process("key", 0.1)):
        with pytest.raises(DynaFlowError, match=r"jax.distributed.initialize"):
            ask()


def test_mosaic_gpu_is_simulated():
    interpreter = compat.mosaic_interpreter()
    assert callable(interpreter.InterpretGPUParams)
    with interpreter.force_gpu_interpret_mode():
        pass


def test_executables_are_loaded_for_other_devices_and_clients():
    mine, others = compat.make_client("cpu", 0.1), compat.make_client("cpu", 0.1)
    lowered = jax.jit(lambda x: (x @ x, jnp.sin(x))).lower(jax.ShapeDtypeStruct((4, 4), jnp.float32))
    compiled = compat.compile_for(mine, mine.devices()[0], compat.module_bytecode(lowered))
    instructions = lambda executable: re.findall(r"%[\w.]+ = \S+ [\w\-]+", compat.scheduled_text(executable))  # noqa: E731
    assert instructions(compiled)
    for client, device in ((mine, mine.devices()[1]), (others, others.devices()[0]), (others, others.devices()[2])):
        loaded = compat.load_for(client, device, compiled)
        (used,) = loaded.local_devices()
        assert (used.client, used.id) == (client, device.id)
        assert instructions(loaded) == instructions(compiled)
