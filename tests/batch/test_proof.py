"""Whole models, what `analyse` reports of them, and random programs that must do what the proof says."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from proving import BATCH, PART, check, factor, integers, joined, normal, prove, reasons, rows_of

from dynaflow_jax.annotate import Rules
from dynaflow_jax.batch.draws import locate
from dynaflow_jax.batch.proof import analyse
from dynaflow_jax.batch.state import Varies
from dynaflow_jax.errors import BatchMixingError
from dynaflow_jax.inline import inline
from dynaflow_jax.program import trace

ROW = "rows on axis 0"
SUM = "a sum over the batch"
MEAN = "a sum over the batch, scaled by 1/n"


# -- models -------------------------------------------------------------------------------------------------------


def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)


def transformer(ws, tokens):
    """Two layers under `scan` and `remat`, as large models are written."""
    embedding, layers = ws

    @jax.checkpoint
    def layer(x, w):
        batch, length, width = x.shape
        q, k, v = (
            jnp.einsum("bsd,de->bse", layer_norm(x), w[i]).reshape(batch, length, 2, width // 2) for i in range(3)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
        return x + (jax.nn.gelu(layer_norm(x).reshape(-1, width) @ w[3]) @ w[4]).reshape(x.shape), None

    x, _ = lax.scan(layer, embedding[tokens], layers)
    return layer_norm(x) @ embedding.T


def cross_entropy(ws, tokens, mask=None):
    logits = jax.nn.log_softmax(transformer(ws, tokens[:, :-1]))
    losses = -jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return losses.mean() if mask is None else (losses * mask).sum() / mask.sum()


WEIGHTS = normal(7, 4), normal(2, 5, 4, 4) / 2
TOKENS = integers(7, BATCH, 6)


def grouped(fun):
    return lambda e, w, *rest: fun((e, w), *rest)


def test_transformer():
    check(grouped(transformer), [*WEIGHTS, TOKENS], [None, None, 0], expect=[ROW])


def test_gradient_of_mean():
    fun = grouped(lambda ws, t: jax.value_and_grad(cross_entropy)(ws, t))
    check(fun, [*WEIGHTS, TOKENS], [None, None, 0], expect=[MEAN] * 3)


def test_gradient_of_masked_mean():
    fun = grouped(lambda ws, t, m: jax.value_and_grad(cross_entropy)(ws, t, m))
    mask = (normal(BATCH, 5) > 0).astype(jnp.float32)
    analysis = check(fun, [*WEIGHTS, TOKENS, mask], [None, None, 0, 0], expect=[f"{SUM}, scaled by 1/t"] * 3)
    (symbol,) = {symbol for state in analysis.outputs for symbol, _ in state.scale}
    # Each part weighs as much as its mask sums to.
    fun = jax.jit(fun)
    whole = jax.tree.leaves(fun(*WEIGHTS, TOKENS, mask))
    parts = [fun(*WEIGHTS, TOKENS[i : i + PART], mask[i : i + PART]) for i in range(0, BATCH, PART)]
    weights = [mask[i : i + PART].sum() for i in range(0, BATCH, PART)]
    for value, *pieces in zip(whole, *map(jax.tree.leaves, parts), strict=True):
        got = sum(w * piece for w, piece in zip(weights, pieces, strict=True)) / sum(weights)
        np.testing.assert_allclose(got, value, rtol=1e-3, atol=1e-5)
    assert symbol.var.aval.shape == ()


def linen(module, x, train=False, **rngs):
    variables = module.init({"params": jax.random.key(0), **rngs}, x)
    leaves, tree = jax.tree.flatten(variables)
    return leaves, lambda *args: module.apply(tree.unflatten(args[:-1]), args[-1], rngs=rngs or None)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential([nn.Dense(5), nn.LayerNorm(), nn.relu, nn.Dense(3)]),
        nn.MultiHeadDotProductAttention(num_heads=2),
        nn.Sequential([nn.Conv(4, (3,)), nn.GroupNorm(2), nn.gelu, nn.ConvTranspose(2, (3,))]),
        nn.RNN(nn.LSTMCell(3)),
        nn.BatchNorm(use_running_average=True),
        nn.Embed(5, 3),
    ],
    ids=lambda module: type(module).__name__,
)
def test_linen(module):
    x = integers(5, BATCH, 5) if isinstance(module, nn.Embed) else normal(BATCH, 5, 4)
    leaves, apply = linen(module, x)
    check(apply, [*leaves, x], [None] * len(leaves) + [0], expect=[ROW])


def test_batch_norm_mixes():
    leaves, tree = jax.tree.flatten(nn.BatchNorm(use_running_average=False).init(jax.random.key(0), normal(BATCH, 4)))

    def fun(*args):
        module = nn.BatchNorm(use_running_average=False)
        return module.apply(tree.unflatten(args[:-1]), args[-1], mutable=["batch_stats"])

    args, in_axes = [*leaves, normal(BATCH, 4)], [None] * len(leaves) + [0]
    sites = prove(fun, args, in_axes).mixing
    assert sites
    assert all("BatchNorm" in [name for name, _ in site.name_stack] for site in sites)
    allowed = prove(fun, args, in_axes, allow=lambda site: ("BatchNorm", False) in site.name_stack)
    assert allowed.mixing == ()
    assert str(allowed.outputs[0]) == ROW


def test_dropout_draws():
    x = normal(BATCH, 4)
    analysis = prove(lambda k, x: nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": k}),
                     [jax.random.key(0), x], [None, 0])  # fmt: skip
    assert not analysis.mixing
    assert [eqn.primitive.name for eqn in analysis.draws] == ["random_bits"]
    assert str(analysis.outputs[0]) == ROW


def test_draws_that_cannot_be_found_are_refused():
    """One that is not where it can be made once for all would be made by every micro-batch, alike."""
    program, _ = trace(lambda k: [jax.random.uniform(k, (4,))], [jax.ShapeDtypeStruct((), jax.random.key(0).dtype)])
    flat, _ = inline(program, (), Rules.of(()), draws=True)
    unopened, _ = inline(program, (), Rules.of(()), draws=False)
    (bits,) = (node.eqn for node in flat.nodes if node.eqn.primitive.name == "random_bits")
    assert locate(flat, [bits]) == {(flat.program.eqns.index(bits),)}
    with pytest.raises(BatchMixingError, match=r"random_bits at .* draws random numbers for the whole batch"):
        locate(unopened, [bits])


def test_mixture_of_experts():
    """Capacity counts the tokens of the whole batch: the reason why it must be asked for."""

    def route(x, w):
        tokens = x.reshape(-1, 4)
        chosen = jax.nn.one_hot(jnp.argmax(tokens @ w, -1), 3)
        place = jnp.cumsum(chosen, 0) * chosen
        dispatch = jax.nn.one_hot(place.max(-1).astype(jnp.int32), 8)[:, None] * chosen[..., None]
        experts = jnp.einsum("tec,td->ecd", dispatch, tokens)
        return jnp.einsum("tec,ecd->td", dispatch, jnp.tanh(experts)).reshape(x.shape)

    args = [normal(BATCH, 5, 4), normal(4, 3)]
    said = reasons(prove(route, args, [0, None]))
    assert "accumulates along the batch with cumsum" in said

    def dropless(x, w):
        gates = jax.nn.softmax(x @ w)
        return jnp.einsum("bse,bsd,edf->bsf", gates, x, normal(3, 4, 4))

    check(dropless, args, [0, None], expect=[ROW])


# -- devices ------------------------------------------------------------------------------------------------------

MESH = AbstractMesh((2, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)


def sharded(fun, in_specs, out_specs):
    return jax.shard_map(fun, mesh=MESH, in_specs=in_specs, out_specs=out_specs)


def test_tensor_parallel():
    def ffn(x, w, v):
        return lax.psum(jax.nn.gelu(x @ w) @ v, "m")

    fun = sharded(ffn, (P("d"), P(None, "m"), P("m")), P("d"))
    args = [normal(8, 4), normal(4, 6), normal(6, 4)]
    analysis = prove(fun, args, [0, None, None], 8, 4)
    assert (reasons(analysis), str(analysis.outputs[0])) == ("", ROW)
    grad = jax.grad(lambda w, v, x: fun(x, w, v).mean(), (0, 1))
    analysis = prove(grad, [args[1], args[2], args[0]], [None, None, 0], 8, 4)
    assert (reasons(analysis), [*map(str, analysis.outputs)]) == ("", [MEAN] * 2)


def test_sequence_parallel():
    def block(x, w):
        tokens = x.reshape(-1, 4)  # rows are blocks of neighbouring tokens on each device
        everything = lax.all_gather(tokens, "m", axis=0, tiled=True)
        return lax.psum_scatter(jnp.tanh(everything @ w), "m", scatter_dimension=0, tiled=True).reshape(x.shape)

    fun = sharded(block, (P("d", "m"), P(None, None)), P("d", "m"))
    analysis = prove(fun, [normal(8, 6, 4), normal(4, 4)], [0, None], 8, 4)
    assert (reasons(analysis), str(analysis.outputs[0])) == ("", ROW)


@pytest.mark.parametrize("axis", ["m", "d"])
def test_expert_parallel(axis):
    def experts(x, w):  # [rows, experts, capacity, width]
        x = lax.all_to_all(x, axis, 1, 2, tiled=True)
        x = jnp.einsum("becd,edf->becf", x, w)
        return lax.all_to_all(x, axis, 2, 1, tiled=True)

    fun = sharded(experts, (P("d"), P(axis)), P("d"))
    if axis == "m":
        fun = jax.shard_map(experts, mesh=MESH, in_specs=(P("d"), P(axis)), out_specs=P("d"), check_vma=False)
    analysis = prove(fun, [normal(8, 4, 2, 3), normal(4, 3, 3)], [0, None], 8, 4)
    assert (reasons(analysis), str(analysis.outputs[0])) == ("", ROW)


def test_data_parallel():
    def mean(w, x, m):
        loss, total = ((x @ w) ** 2 * m).sum(), m.sum()
        return lax.psum(loss, ("d", "m")) / lax.psum(total, ("d", "m")), lax.pmean(loss / x.shape[0], ("d", "m"))

    fun = sharded(mean, (P(), P(("d", "m")), P(("d", "m"))), P())
    analysis = prove(fun, [normal(3), normal(8, 3), normal(8)], [None, 0, 0], 8, 4)
    assert (reasons(analysis), [*map(str, analysis.outputs)]) == ("", [f"{SUM}, scaled by 1/t", MEAN])


def test_which_device_it_is():
    """Each device may do something of its own with its rows, as dropout that differs between devices."""

    def fun(key, x):
        index = lax.axis_index("d")
        bits = jax.random.bernoulli(jax.random.fold_in(key, index), 0.5, x.shape)
        return x * bits + index, lax.psum((x * index).sum(), "d")

    analysis = prove(sharded(fun, (P(), P("d")), (P("d"), P())), [jax.random.key(0), normal(8, 3)], [None, 0], 8, 4)
    assert (reasons(analysis), [*map(str, analysis.outputs)]) == ("", [ROW, SUM])
    assert [eqn.primitive.name for eqn in analysis.draws] == ["random_bits"]


def test_rows_of_other_devices():
    fun = sharded(lambda x: lax.psum(x, "d"), (P("d"),), P())
    assert "sums rows of the batch across the devices" in reasons(prove(fun, [normal(8, 3)], [0], 8, 4))
    fun = sharded(lambda x: lax.all_gather(x, "d", tiled=True), (P("d"),), P("d"))
    assert "gathers rows of the batch across the devices" in reasons(prove(fun, [normal(8, 3)], [0], 8, 4))


# -- what is reported ---------------------------------------------------------------------------------------------


def test_sites_are_independent_and_do_not_cascade():
    def fun(x):
        a = x - x.max(0)
        return jnp.exp(a) * 2, jnp.sort(x, 0).sum(), jnp.tanh(x)

    analysis = prove(fun, [normal(BATCH, 4)], [0])
    assert [site.primitive for site in analysis.mixing] == ["reduce_max", "sort"]
    assert all("test_proof.py" in site.source for site in analysis.mixing)
    assert [*map(str, analysis.outputs)][2] == ROW
    allowed = prove(fun, [normal(BATCH, 4)], [0], allow=lambda site: site.primitive == "sort")
    assert [site.primitive for site in allowed.mixing] == ["reduce_max"]


def test_scopes_of_enclosing_equations():
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return x.max(0)

    def fun(x):
        with jax.named_scope("outer"):
            return lax.scan(lambda c, _: (c, inner(x)), x, None, length=2)[1]

    (site,) = prove(fun, [normal(BATCH, 4)], [0]).mixing
    assert [name for name, transform in site.name_stack if not transform and name in ("inner", "outer")] == [
        "outer",
        "inner",
    ]
    assert "outer" in str(site)


def test_guarded_division():
    def fun(x, m):
        return (x * m).sum() / jnp.maximum(m.sum(), 1)

    args = [normal(BATCH), normal(BATCH)]
    (site,) = prove(fun, args, [0, 0]).mixing
    assert site.primitive == "max"
    allowed = prove(fun, args, [0, 0], allow=lambda site: site.primitive == "max")
    assert [*map(str, allowed.outputs)] == [f"{SUM}, scaled by 1/t"]


def test_two_sums_are_not_one():
    """A function called twice sums twice: the two sums must not cancel."""
    total = jax.jit(jnp.sum)
    analysis = prove(lambda x, y: x.sum(1) * total(x) / total(y), [normal(BATCH, 3), normal(BATCH, 3, seed=1)], [0, 0])
    assert [*map(str, analysis.outputs)] == [f"{ROW}, scaled by t/t"]


def test_states_inside_regions():
    analysis = prove(lambda x, w: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0],
                     [normal(BATCH, 4), normal(3, 4, 4)], [0, None])  # fmt: skip
    inside = [state for var, state in analysis.states.items() if var.aval.shape == (PART, 4)]
    assert inside
    assert set(map(str, inside)) == {ROW}


def test_constants():
    table = np.float32([1, 2, 3, 4])
    check(lambda x: x * table, [normal(BATCH, 4)], [0], expect=[ROW])
    check(lambda x: x * np.ones((x.shape[0], 1), np.float32), [normal(BATCH, 4)], [0], expect=[ROW])
    check(
        lambda x: x * np.full(4, 1 / x.shape[0], np.float32), [normal(BATCH, 4)], [0], expect=[f"{ROW}, scaled by 1/n"]
    )
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e5m2):
        table = lambda x, dtype=dtype: np.full(4, 1 / x.shape[0], np.float32).astype(dtype)  # noqa: E731
        check(lambda x, table=table: x.astype(jnp.bfloat16).sum() * table(x)[0].astype(jnp.bfloat16),
              [integers(4, 8, 4)], [0], 8, 4, expect=[MEAN])  # fmt: skip
        said = reasons(prove(lambda x, table=table: x * np.sqrt(table(x)).astype(x.dtype), [normal(8, 4)], [0], 8, 4))
        assert "not in proportion" in said
    check(lambda x: x * np.full(4, np.nan, jnp.bfloat16), [normal(BATCH, 4)], [0], expect=[ROW])
    said = reasons(prove(lambda x: x * np.random.default_rng(0).normal(size=x.shape), [normal(BATCH, 4)], [0]))
    assert "the constant float32[6,4] depends on the batch size" in said


def test_input_without_batch_axis():
    whole, part = (trace(lambda x: [x * 2], [jax.ShapeDtypeStruct((n, 4), jnp.float32)])[0] for n in (BATCH, PART))
    analysis = analyse(whole, part, [None], BATCH, PART)
    assert "input 0 changes its shape with the batch" in reasons(analysis)


def test_sizes_that_coincide():
    """Nothing is taken for the batch because of its size."""
    x = normal(4, 2, 4, 2)
    check(lambda x: (x.sum(2), jnp.einsum("bshd,bthd->bhst", x, x), x.swapaxes(0, 1)), [x], [0], 4, 2,
          expect=[ROW, ROW, "rows on axis 1"])  # fmt: skip


# -- random programs ----------------------------------------------------------------------------------------------

UNARY = [
    jnp.tanh, jnp.abs, jnp.sin, lambda x: -x, lambda x: x * 2, lambda x: x + 1, lambda x: jnp.maximum(x, 0),
    lambda x: x / x.shape[0], lambda x: x * x.shape[0], lambda x: x.sum(0), lambda x: x.mean(0), lambda x: x.sum(-1),
    lambda x: x.sum(), lambda x: x.max(-1), lambda x: x.max(0), lambda x: x.mean(), lambda x: jax.nn.softmax(x),
    lambda x: x.T, lambda x: x.reshape(-1), lambda x: x.reshape(-1, 2), lambda x: x.reshape(-1, 4),
    lambda x: x[..., None], lambda x: x[:, ::-1], lambda x: x[::-1], lambda x: jnp.cumsum(x, 0),
    lambda x: jnp.cumsum(x, -1),
    lambda x: jnp.sort(x),
    lambda x: x[:1], lambda x: x[..., :2], lambda x: x[jnp.arange(x.shape[0])], lambda x: x[jnp.arange(x.shape[0]), 0],
    lambda x: jnp.concatenate([x, x]), lambda x: jnp.split(x, 2)[1], lambda x: jnp.broadcast_to(x, (3, *x.shape)),
    lambda x: jnp.zeros_like(x), lambda x: jnp.pad(x, 1), lambda x: x.at[0].set(0), lambda x: x.at[..., 0].add(1),
    lambda x: lax.scan(lambda c, r: (c + r, c * 2), jnp.zeros_like(x[0]), x)[1],
    lambda x: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c) + x, x), lambda x: jnp.where(x > 0, x, 0), jnp.square,
    lambda x: jax.grad(lambda x: jnp.tanh(x).mean())(x), lambda x: jnp.tile(x, 2), lambda x: jnp.repeat(x, 2, 0),
    lambda x: jnp.roll(x, 1, 0), lambda x: jax.nn.one_hot(jnp.argmax(x, -1), 4), lambda x: x.swapaxes(0, 1),
]  # fmt: skip
BINARY = [
    jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, lambda x, y: x / (1 + jnp.abs(y)), lambda x, y: x / y, jnp.matmul,
    lambda x, y: jnp.einsum("bi,bj->ij", x, y), lambda x, y: jnp.einsum("bi,bj->bij", x, y), lambda x, y: x.T @ y,
    lambda x, y: jnp.concatenate([x, y]), lambda x, y: jnp.concatenate([x, y], -1), lambda x, y: jnp.where(x > 0, x, y),
    lambda x, y: jnp.take_along_axis(x, jnp.argsort(y), -1), lambda x, y: x[jnp.argmax(y, -1)],
    lambda x, y: jnp.stack([x, y]),
    lambda x, y: jnp.zeros(4).at[jnp.argmax(x, -1)].add(y[:, 0]), lambda x, y: lax.dynamic_update_slice(x, y, (0, 0)),
    lambda x, y: jnp.where(x.sum() > 0, x, y), lambda x, y: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ y)))(x),
]  # fmt: skip
FINAL = [lambda x: x, lambda x: x, lambda x: x.sum(0), jnp.mean, lambda x: x / x.shape[0]]
STEP = st.tuples(st.integers(0, len(UNARY) + 2 * len(BINARY) - 1), st.integers(0, 3), st.integers(0, 3))


def random_program(steps):
    def fun(*args):
        values = list(args)
        for op, i, j in steps:
            x, y = values[-1 - i % len(values)], values[-1 - j % len(values)]
            try:
                new = UNARY[op](x) if op < len(UNARY) else BINARY[(op - len(UNARY)) % len(BINARY)](x, y)
            except (TypeError, ValueError, IndexError, ZeroDivisionError, AssertionError):
                continue  # an operation that these shapes do not have
            if new.size < 2000:
                values.append(new.astype(jnp.float32))
        return values[-1]

    return fun


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(STEP, min_size=1, max_size=5), st.sampled_from(FINAL), st.sampled_from([1, 2, 3]))
def test_random_programs(steps, final, part):
    args, in_axes = (
        [normal(5, seed=3), normal(4, 4, seed=2), normal(BATCH, 4, seed=1), normal(BATCH, 4)],
        [None, None, 0, 0],
    )
    program = random_program(steps)

    def fun(*args):
        value = program(*args)
        return final(value) if value.ndim else value

    analysis = prove(fun, args, in_axes, BATCH, part)
    (state,) = analysis.outputs
    event(f"mixes: {bool(analysis.mixing)}")
    if analysis.mixing:
        return
    assert not isinstance(state, Varies)
    event(type(state).__name__)
    if factor(state, 2) is None:
        return
    whole = np.asarray(fun(*args), np.float64)
    parts = [
        fun(*(rows_of(a, axis, i, i + part) for a, axis in zip(args, in_axes, strict=True)))
        for i in range(0, BATCH, part)
    ]
    assume(np.isfinite(whole).all() and all(np.isfinite(p).all() for p in parts))
    size = max(1.0, float(np.abs(whole).max(initial=0)))
    np.testing.assert_allclose(
        joined(state, parts, BATCH, part) / size, whole / size, rtol=1e-3, atol=1e-4, err_msg=str(state)
    )
