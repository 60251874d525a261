"""What reaches XLA: order within a stream, donation, shardings, and no copies beyond slices and joins."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import same
from scheduling import Do, Split, W, X, chains, layer, run_merged

import dynaflow_jax as df
from dynaflow_jax.lowering.order import can_wait, hold

of_xla = pytest.mark.xla_lowering

CHAINS = chains("a1", "a2", "a3", "b1", "b2", "b3")
COMPILER_KEEPS_ORDER = jax.__version_info__[:2] >= (0, 11)


def in_order(order, streams=None):
    """Executes operators by name."""

    def do(ctx):
        ops = {op.name: op for op in ctx.all_ops()}
        for name in order:
            ctx.execute(ops[name], stream=(streams or {}).get(name[0], "compute"))

    return df.dynaflow(CHAINS, scheduler=Do(do))


def random_orders():
    """Ways to interleave two chains of three."""
    for seed in range(4):
        rng, left = np.random.default_rng(seed), {"a": ["a1", "a2", "a3"], "b": ["b1", "b2", "b3"]}
        order = []
        while any(left.values()):
            chain = "ab"[rng.integers(2)]
            if left[chain]:
                order.append(left[chain].pop(0))
        yield order


def dependences(flow, *args):
    """For each named operator of the StableHLO's main function, those it depends on, by following data only."""
    text = jax.jit(flow).lower(*args).as_text()
    main = text[text.index("@main") :].split("func.func")[0]
    reach, found = {}, {}
    for line in main.splitlines():
        match = re.match(r"\s*(%\w+)(?::\d+)? = (.*)", line)
        if match is None:
            continue
        name, rest = match.groups()
        operands = re.findall(r"%\w+", rest)
        before = frozenset().union(*(reach.get(operand, frozenset()) for operand in operands))
        called = re.search(r"call @(\w+?)(?:_\d+)?\(", rest)
        if called:
            found.setdefault(called[1], before)
            before |= {called[1]}
        reach[name] = before
    return found


@of_xla
@pytest.mark.parametrize("order", list(random_orders()), ids="".join)
def test_order_within_a_stream_in_the_program_handed_to_xla(order):
    """On every version of JAX: each operator depends, through barriers, on all before it in its stream."""
    found = dependences(in_order(order), X)
    assert set(found) == set(order)
    for i, name in enumerate(order):
        assert found[name] == set(order[:i]), name


@of_xla
def test_streams_are_independent_of_each_other():
    found = dependences(in_order(["a1", "b1", "b2", "a2", "a3", "b3"], {"a": "one", "b": "two"}), X)
    assert found["a3"] == {"a1", "a2"}
    assert found["b3"] == {"b1", "b2"}


@of_xla
def test_after_orders_across_streams():
    def do(ctx):
        ops = {op.name: op for op in ctx.all_ops()}
        for name in ("a1", "a2", "b1", "b2", "b3", "a3"):
            after = [ops["a2"]] if name == "b2" else ()
            ctx.execute(ops[name], stream=name[0], after=after)

    found = dependences(df.dynaflow(CHAINS, scheduler=Do(do)), X)
    assert found["b1"] == set()
    assert found["b2"] == {"b1", "a1", "a2"}
    assert found["b3"] == {"b1", "b2", "a1", "a2"}
    assert found["a3"] == {"a1", "a2"}


@of_xla
@pytest.mark.skipif(
    not COMPILER_KEEPS_ORDER,
    reason="XLA's CPU compiler in JAX 0.10 drops optimization barriers before it schedules (lowering/order.py): there "
    "the order is only in the program that it is given, which the tests above check.",
)
@pytest.mark.parametrize("order", list(random_orders()), ids="".join)
def test_order_within_a_stream_in_the_compiled_module(order):
    """The instructions of the scheduled module come in the order of the plan."""
    text = jax.jit(in_order(order)).lower(X).compile().as_text()
    assert "is_scheduled=true" in text
    entry = text[text.index("\nENTRY ") :]
    dots = re.findall(r'= \S+ (?:dot|fusion|custom-call|call)\(.*op_name="[^"]*jit\((\w\d)\)/[^"]*dot_general', entry)
    assert list(dict.fromkeys(dots)) == order


def test_merged_operators_and_loops_keep_order_too():
    def fun(x):
        return jax.lax.fori_loop(0, 3, lambda _, xs: CHAINS(xs[0] + xs[1]), (x, x))

    def do(ctx):
        by_chain = sorted(ctx.all_ops(), key=lambda op: (op.name[0] != "b", op.index, op.micro_batch))
        pending = dict.fromkeys(by_chain)
        while pending:
            ready = set(ctx.get_ready_ops())
            op = next(op for op in pending if op in ready)
            ctx.execute(op)
            del pending[op]

    same(df.dynaflow(fun, scheduler=Do(do, 4, 4), batch_axes=0)(X), fun(X))


def test_what_cannot_wait_passes_through():
    key, number = jax.random.key(0), jnp.ones(2)
    assert not can_wait(key)
    assert not can_wait(np.zeros(2, jax.dtypes.float0))
    held = hold([key, number], [key])
    assert held[0] is key
    assert held[1] is number
    assert hold([key, number], [number])[0] is key


# -- copies --------------------------------------------------------------------------------------------------------


def counts(fun, *args, **options):
    text = jax.jit(fun, **options).lower(*args).compile().as_text()
    kinds = ("copy", "concatenate", "slice", "dynamic-slice", "dynamic-update-slice", "dot", "transpose", "pad")
    return {kind: len(re.findall(rf" {kind}\(", text)) for kind in kinds}


def by_hand(w, x):
    return jnp.concatenate([layer(w, x[:3]), layer(w, x[3:])])


def by_hand_gradient(w, x):
    parts = [jax.grad(lambda w, x: layer(w, x).mean())(w, part) for part in (x[:3], x[3:])]
    return parts[0] * (3 / 8) + parts[1] * (5 / 8)


@of_xla
def test_no_copies_beyond_slices_and_joins():
    flow = df.dynaflow(layer, scheduler=Split(3, 5), batch_axes=(None, 0))
    assert counts(flow, W, X) == counts(by_hand, W, X)
    inside = jax.grad(lambda w, x: layer(w, x).mean())
    flow = df.dynaflow(inside, scheduler=Split(3, 5), batch_axes=(None, 0), out_axes="mean")
    assert counts(flow, W, X) == counts(by_hand_gradient, W, X)


@of_xla
def test_one_micro_batch_costs_nothing():
    assert counts(df.dynaflow(layer, scheduler=Split(8), batch_axes=(None, 0)), W, X) == counts(layer, W, X)
    merged = df.dynaflow(layer, scheduler=Do(run_merged, 3, 5), batch_axes=(None, 0))
    assert counts(merged, W, X)["dot"] == 1


@of_xla
def test_equal_micro_batches_share_their_functions():
    text = jax.jit(df.dynaflow(layer, scheduler=Split(2, 2, 2, 2), batch_axes=(None, 0))).lower(W, X).as_text()
    assert len(re.findall(r"func.func private @a", text)) == 1
    assert len(re.findall(r"call @a\(", text)) == 4


# -- donation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(8,), (3, 5)], ids=str)
def test_donated_buffers_are_used(sizes):
    flow = df.dynaflow(layer, scheduler=Split(*sizes), batch_axes=(None, 0))
    step = jax.jit(flow, donate_argnums=1)
    x = X + 0
    assert re.search(r"input_output_alias={ {}: \(1,", step.lower(W, x).compile().as_text())
    same(step(W, x), layer(W, X))
    assert x.is_deleted()


def test_donated_weights_of_a_training_step():
    gradient = jax.grad(lambda w, x: layer(w, x).mean())
    flow = df.dynaflow(gradient, scheduler=Split(3, 5), batch_axes=(None, 0), out_axes="mean")
    compiled = jax.jit(lambda w, x: w - 0.1 * flow(w, x), donate_argnums=0).lower(w := W + 0, X).compile()
    assert re.search(r"input_output_alias={ {}: \(0,", compiled.as_text())
    same(compiled(w, X), W - 0.1 * gradient(W, X))
    assert w.is_deleted()
