"""Comet: experts between two all-to-alls in pieces, cut along an axis that the strategy finds by itself."""

import jax
import jax.numpy as jnp
import models_parallel as models
import pytest
from jax.sharding import PartitionSpec as P
from models import normal

import dynaflow_jax as df
from dynaflow_jax.expert_pipeline import _sizes, pipelined
from dynaflow_jax.runtime import extension
from dynaflow_jax.runtime.work import Exchange
from dynaflow_jax.strategies import Comet

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs several (virtual) devices")
DEVICES = [count for count in (2, 4) if count <= jax.device_count()]
BACKENDS = ["xla", "dispatch"] if extension.module is not None else ["xla"]
AXIS, WIDTH, HIDDEN = models.AXIS, models.WIDTH, models.HIDDEN
EXPERTS, ROWS, GROUPS = 16, 8, 3


def pieces_of(plan):
    return [step for step in plan.steps if step.fn is not None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("pieces", [2, 3, 5, 64])
def test_experts_in_pieces(devices, pieces, backend):
    plan = models.expert_parallel().check(devices, Comet(pieces), backend)
    groups = [[ref.key for ref in step.operators] for step in pieces_of(plan)]
    assert groups == [["all_to_all", "experts", "all_to_all:2"], ["all_to_all:3", "experts:2", "all_to_all:4"]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_training(backend):
    """The backward pass reads what lies between the exchanges, so they stay whole."""
    plan = models.expert_parallel().gradient().check(2, Comet(), backend)
    assert not pieces_of(plan)
    assert {step.stream for step in plan.steps} == {"compute", "network"}


def test_differentiated_from_outside():
    model = models.expert_parallel()
    flow = model.mapped(2, df.dynaflow(model.fun, scheduler=Comet(), backend="xla"))

    def loss(fun):
        return jax.jit(jax.value_and_grad(lambda ws, x: jnp.mean(fun(ws, x) ** 2)))(*model.args)

    models.close(loss(flow), loss(model.mapped(2)))


def there(y, split, concat, tiled=True):
    return jax.lax.all_to_all(y, AXIS, split, concat, tiled=tiled)


def ways(name):
    """What one device computes of its tokens, and where the experts and the tokens are: in the model's own form."""

    def product(y, w):
        return jax.nn.silu(jnp.einsum("ecd,edf->ecf", y, w))

    def experts_first(w, x):  # experts, tokens, width
        y = there(x, 0, 1)
        with df.mark("experts"):
            y = product(y, w)
        return there(y, 1, 0)

    def devices_apart(w, x):  # devices and their experts are axes of their own
        n = jax.lax.axis_size(AXIS)
        y = there(x.reshape(n, -1, *x.shape[1:]), 0, 0, tiled=False)
        with df.mark("experts"):
            y = jax.nn.silu(jnp.einsum("necd,edf->necf", y, w))
        return there(y, 0, 0, tiled=False).reshape(x.shape)

    def experts_behind(w, x):  # tokens, experts, width
        y = there(jnp.swapaxes(x, 0, 1), 1, 0)
        with df.mark("experts"):
            y = jnp.swapaxes(product(jnp.swapaxes(y, 0, 1), w), 0, 1)
        return jnp.swapaxes(there(y, 0, 1), 0, 1)

    def turned_between(w, x):
        y = there(x, 0, 1)
        with df.mark("experts"):
            y = jnp.swapaxes(product(y, w), 0, 1)
        return jnp.swapaxes(there(y, 0, 1), 0, 1)

    def several_operators(w, x):
        y = there(x, 0, 1)
        with df.mark("first"):
            y = product(y, w)
        with df.mark("second"):
            y = jnp.tanh(y) + y
        with df.mark("third"):
            y = y * w[:, :1]
        return there(y, 1, 0)

    def an_operator_around(w, x):
        with df.mark("all"):
            y = there(x + 1, 0, 1)
            return x + there(product(y, w), 1, 0) * 2

    def a_group_axis(w, x):  # as GShard has it: experts, groups, tokens, width
        y = there(x.reshape(x.shape[0], 2, -1, x.shape[-1]), 0, 2)
        with df.mark("experts"):
            y = jax.nn.gelu(jnp.einsum("egcd,edf->egcf", y, w))
        return there(y, 2, 0).reshape(x.shape)

    return locals()[name]


WAYS = ["experts_first", "devices_apart", "experts_behind", "turned_between", "several_operators"]
WAYS += ["an_operator_around", "a_group_axis"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", WAYS)
def test_ways_to_write_it(name, devices, backend):
    args = (normal(EXPERTS, WIDTH, WIDTH), normal(EXPERTS, ROWS, WIDTH, seed=1))
    model = models.Model(ways(name), args, (P(AXIS), P(None, AXIS)), P(None, AXIS))
    plan = model.check(devices, Comet(3), backend)
    if name == "an_operator_around":  # an operator is never cut up by itself
        assert not pieces_of(plan)
        return
    (step,) = pieces_of(plan)
    assert len(step.operators) == (5 if name == "several_operators" else 3)


@pytest.mark.parametrize(
    "name",
    ["mixed experts", "one expert", "no weights", "a sum", "one exchange", "read twice", "relu", "no such axis"],
)
def test_what_is_not_taken_apart(name):
    """Runs as it is, and is right."""

    def fun(w, x):
        y = there(x, 0, 0 if name == "no such axis" else 1)
        with df.mark("experts"):
            z = y
            if name != "no weights":
                z = jnp.einsum("ecd,edf->ecf", y.reshape(w.shape[0], -1, WIDTH), w).reshape(y.shape)
            if name == "mixed experts":
                z = z + z.sum(0)
            if name == "relu":
                z = jax.nn.relu(z)
        if name == "one exchange":
            return z.sum(1) + x[: len(z)].sum(1)
        z = (
            jax.lax.psum(z, AXIS)[:, : x.shape[1]]
            if name == "a sum"
            else there(z, 0 if name == "no such axis" else 1, 0)
        )
        return (z, y.sum(1)) if name == "read twice" else z

    experts = 2 if name == "one expert" else EXPERTS
    model = models.Model(
        fun,
        (normal(experts, WIDTH, WIDTH), normal(experts, ROWS, WIDTH, seed=1)),
        (P(AXIS), P(None, AXIS)),
        (P(None, AXIS), P(AXIS))
        if name == "read twice"
        else P(AXIS)
        if name in ("one exchange", "a sum")
        else P(None, AXIS),
    )
    assert not pieces_of(model.check(2, Comet(), "xla"))


@pytest.mark.skipif(extension.module is None, reason="the extension was not built")
def test_what_is_dispatched():
    """Weights are read where they are, equal pieces are compiled once, and exchanges run beside the experts."""
    work = models.expert_parallel(1, 32).work(2, Comet(3))
    exchanges = [op for op in work.operations if isinstance(op, Exchange)]
    launches = [op for op in work.operations if not isinstance(op, Exchange)]
    assert len(exchanges) == 6
    assert {op.where.stream for op in exchanges} == {"network"}
    assert {op.where.stream for op in launches} == {"compute"}
    arrived = [op.writes[0] for op in exchanges[:3]]
    experts = [op for op in launches if {work.base(value)[0] for value in op.reads} & set(arrived)]
    assert [{work.base(value)[0] for value in op.reads} & set(arrived) for op in experts] == [{v} for v in arrived]
    assert experts[0].key == experts[2].key != experts[1].key
    for op in experts:
        given = [value for value in op.reads if work.base(value)[0] not in arrived]
        assert len(given) == 3
        assert all(work.values[work.base(value)[0]].input is not None for value in given)
    assert len(launches) == 5  # those, and what lies before and behind


def test_the_pieces_at_the_ends_are_half_as_large():
    assert _sizes(16, 2) == (8, 8)
    assert _sizes(16, 3) == (4, 8, 4)
    assert _sizes(16, 5) == (2, 4, 4, 4, 2)
    assert _sizes(2, 3) == (1, 1)
    assert _sizes(7, 1) == (7,)
    for experts in range(1, 33):
        for pieces in range(1, 9):
            sizes = _sizes(experts, pieces)
            assert sum(sizes) == experts
            assert all(sizes)
            assert len(sizes) == min(experts, pieces)


def test_nothing_to_overlap():
    assert pipelined(jax.make_jaxpr(lambda x: x @ x)(jnp.ones((2, 2))), 2) is None
    plan = models.expert_parallel().check(2, Comet(1), "xla")
    assert not pieces_of(plan)


@pytest.mark.parametrize("pieces", [0, -1, 1.0, "1", True], ids=repr)
def test_wrong_arguments(pieces):
    with pytest.raises(ValueError, match="Comet needs a whole number of pieces, at least 1, not pieces="):
        Comet(pieces)


def test_predicted_as_a_pipeline():
    """What nothing hides are the first piece's way there and the last one's back; every byte is counted once."""
    plan = models.expert_parallel(1, 16).scheduled(2, Comet(), "xla")[1]
    whole = models.expert_parallel(1, 16).scheduled(2, Comet(1), "xla")[1]
    (step,) = (what for what in plan.details if what.name.startswith("expert_pipeline"))
    exchanges = [kernel for kernel in step.kernels if kernel.sent]
    alone = [kernel for kernel in exchanges if not kernel.flops]
    sent = [what.sent for what in whole.details if what.bound == "network"]
    assert [kernel.sent for kernel in alone] == [sent[0] / 2, sent[1] / 2]
    assert sum(kernel.sent for kernel in exchanges) == sum(sent)
    flops = sum(kernel.flops * kernel.count for what in whole.details for kernel in what.kernels)
    assert sum(kernel.flops * kernel.count for what in plan.details for kernel in what.kernels) == flops
