"""A batch that is sharded over devices is split within every shard: rows never move."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from models import normal, same
from scheduling import Do, Split, layer, loss, run_merged

import dynaflow_jax as df
from dynaflow_jax.runtime import extension

W, X = normal(4, 4, seed=1) / 2, normal(16, 4, seed=2)
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
MESHES = {"one axis": ((8,), ("data",)), "an unused axis": ((4, 2), ("data", "unused"))}
MOVES = re.compile(r"\b(?:all-to-all|collective-permute|all-gather|reduce-scatter|all-reduce)\b")

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")


@pytest.fixture(params=[(kind, mesh) for kind in KINDS for mesh in MESHES], ids=", ".join)
def mesh(request):
    kind, mesh = request.param
    shape, names = MESHES[mesh]
    made = jax.make_mesh(shape, names, axis_types=(KINDS[kind],) * len(names))
    with jax.set_mesh(made):
        yield made


def placed(mesh):
    return jax.device_put(W, NamedSharding(mesh, P())), jax.device_put(X, NamedSharding(mesh, P("data")))


def is_explicit(mesh):
    return AxisType.Explicit in mesh.axis_types


def moves(fun, *args):
    """The kinds of communication in the compiled program."""
    return set(MOVES.findall(jax.jit(fun).lower(*args).compile().as_text()))


def constrained(w, x):
    x = jax.lax.with_sharding_constraint(x, P("data"))
    return jax.lax.with_sharding_constraint(layer(w, x), P("data"))


def flow_of(fun=layer, scheduler=None, **options):
    return df.dynaflow(fun, scheduler=scheduler or Split(8, 8), **{"batch_axes": (None, 0), **options})


def test_rows_stay_where_they_are(mesh):
    w, x = placed(mesh)
    shards = mesh.shape["data"]
    flows = {"told": flow_of(batch_shards=shards)}
    if is_explicit(mesh):
        flows["by its type"] = flow_of()
    else:
        flows["by a constraint"] = flow_of(constrained)
    for flow in flows.values():
        assert moves(flow, w, x) == set()
        out = jax.jit(flow)(w, x)
        same(out, layer(W, X))
        assert out.sharding.spec[0] == "data"


def test_placed_arrays_tell(mesh):
    w, x = placed(mesh)
    out = flow_of()(w, x)
    same(out, layer(W, X))
    with pytest.raises(df.SplitError, match=f"sharded over {mesh.shape['data']} devices .* and 3 is not"):
        flow_of(scheduler=Split(3, 13))(w, x)


def test_every_micro_batch_has_its_share_of_every_shard(mesh):
    """Rows that know their number are seen by the operators as the first and second halves of the shards."""
    w, x = placed(mesh)
    shards = mesh.shape["data"]
    number = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("data")))

    def tagged(w, x, number):
        with df.mark("tag"):
            return x @ w * number[:, None]

    flow = flow_of(tagged, batch_axes=(None, 0, 0), out_axes=lambda parts: jnp.stack(parts), batch_shards=shards)
    got = np.asarray(jax.jit(flow)(w, x, number) if not is_explicit(mesh) else flow(w, x, number))
    blocks = np.arange(16).reshape(shards, 2, -1)
    want = np.asarray(X @ W) * np.arange(16.0)[:, None]
    for m in range(2):
        same(jnp.asarray(got[m]), jnp.asarray(want[blocks[:, m].ravel()]))


def test_gradients_are_summed_over_devices_once_per_micro_batch(mesh):
    w, x = placed(mesh)
    shards = mesh.shape["data"]
    step = jax.value_and_grad(loss)
    inside = flow_of(step, out_axes="mean", batch_shards=shards)
    assert moves(inside, w, x) <= {"all-reduce"}
    same(jax.jit(inside)(w, x), step(W, X))
    outside = jax.value_and_grad(flow_of(loss, out_axes="mean", batch_shards=shards))
    assert moves(outside, w, x) <= {"all-reduce"}
    same(jax.jit(outside)(w, x), step(W, X))


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_shard_map(mesh, where):
    w, x = placed(mesh)
    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P("data")}
    if where == "inside":
        fun = flow_of(jax.shard_map(layer, **specs))
        assert {op.name for op in fun.graph(w, x)} == {"shard_map"}
    else:
        fun = jax.shard_map(flow_of(scheduler=df.strategies.NanoFlow(2)), **specs)
    assert moves(fun, w, x) == set()
    same(jax.jit(fun)(w, x), layer(W, X))
    same(jax.jit(jax.grad(lambda w, x: fun(w, x).sum()))(w, x), jax.grad(lambda w, x: layer(w, x).sum())(W, X))


def test_collectives_inside_shard_map(mesh):
    w, x = placed(mesh)

    def fun(w, x):
        with df.mark("gemm"):
            y = x @ w
        with df.mark("reduce"):
            mean = jax.lax.pmean(y, "data")
        with df.mark("rest"):
            return jnp.tanh(y) - mean * 0

    mapped = jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    flow = flow_of(mapped, scheduler=df.strategies.NanoFlow(2), allow_batch_mixing="*")
    graph = flow.graph(w, x)
    body = graph.operators[0].body
    assert {op.name for op in body if "network" in op.tags} == {"reduce"}
    same(jax.jit(flow)(w, x), layer(W, X))


def test_shardings_given_to_jit(mesh):
    if is_explicit(mesh):
        pytest.skip("in_shardings are for axes that the compiler decides about")
    shard = NamedSharding(mesh, P("data"))
    flow = flow_of(batch_shards=mesh.shape["data"])
    step = jax.jit(flow, in_shardings=(NamedSharding(mesh, P()), shard), out_shardings=shard, donate_argnums=1)
    w, x = placed(mesh)
    compiled = step.lower(w, x).compile()
    assert not MOVES.search(compiled.as_text())
    assert re.search(r"input_output_alias={ {}: \(1,", compiled.as_text())
    out = compiled(w, x)
    assert out.sharding.is_equivalent_to(shard, 2)
    same(out, layer(W, X))
    assert x.is_deleted()


def test_constraints_inside_survive(mesh):
    if is_explicit(mesh):
        pytest.skip("with explicit axes the type says it")
    w, x = placed(mesh)
    text = jax.jit(flow_of(constrained, Split(8, 8))).lower(w, x).as_text()
    constraints = len(re.findall(r'sdy.sharding_constraint .*"data"', text))
    assert constraints == 2  # one function for each constraint, and both are called for every micro-batch
    assert len(re.findall(r"call @sharding_constraint", text)) == 4


def test_merged(mesh):
    w, x = placed(mesh)
    flow = flow_of(scheduler=Do(run_merged, 8, 8), batch_shards=mesh.shape["data"])
    same(jax.jit(flow)(w, x) if not is_explicit(mesh) else flow(w, x), layer(W, X))


def test_joins_are_not_doubled_on_an_unused_axis():
    """A value that each of two devices holds must not be counted twice."""
    mesh = jax.make_mesh((4, 2), ("data", "unused"), axis_types=(AxisType.Auto,) * 2)
    w, x = placed(mesh)
    total = jax.jit(flow_of(lambda w, x: layer(w, x).sum(), out_axes="sum", batch_shards=4))
    same(total(w, x), layer(W, X).sum())
    same(jax.jit(flow_of(batch_shards=4))(w, x), layer(W, X))


def test_a_batch_that_does_not_divide_is_split_by_rows():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        same(jax.jit(flow_of(constrained, scheduler=Split(3, 3)))(W, X[:6]), layer(W, X[:6]))


@pytest.mark.skipif(extension.module is None, reason="the extension was not built")
@pytest.mark.parametrize("spread", ["weights", "rows"])
def test_what_lies_on_several_devices_is_not_dispatched(spread):
    """XLA would gather all of it on every device for the one call."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    w = jax.device_put(normal(8, 8), NamedSharding(mesh, P("data") if spread == "weights" else P()))
    x = jax.device_put(normal(16, 8), NamedSharding(mesh, P("data") if spread == "rows" else P()))
    flow = df.dynaflow(layer, scheduler=df.strategies.Sequential(), backend="dispatch", batch_axes=(None, 0))
    with pytest.warns(df.DispatchWarning, match="XLA partitions"):
        same(flow(w, x), layer(w, x))
    single = jax.device_put(normal(8, 8), jax.devices()[0]), jax.device_put(normal(16, 8), jax.devices()[0])
    same(flow(*single), layer(*single))
    assert "dispatched, since" in flow.explain(*single)
