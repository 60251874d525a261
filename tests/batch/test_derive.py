"""Micro-batches' programs that are derived: what is, what is not, and that nobody can tell from the results."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from models import same
from proving import BATCH, derive, integers, normal
from scheduling import Split

import dynaflow_jax as df

X, W = normal(BATCH, 4), normal(4, 4)


class Counted:
    """A function that counts how often it is traced."""

    def __init__(self, fun):
        self.fun, self.traces = fun, 0

    def __call__(self, *args):
        self.traces += 1
        return self.fun(*args)


def traces(fun, *args, axes, sizes=(2, 4), **options):
    """How often a function is traced to be scheduled, with what the result is checked on the way."""
    counted = Counted(fun)
    flow = df.dynaflow(counted, scheduler=Split(*sizes), batch_axes=axes, **options)
    got = flow(*args)
    count = counted.traces
    same(got, fun(*args), 1e-4)
    return count


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1, 1) + jnp.zeros(x.shape[0])[:, None]


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 9, 3 * g, jnp.zeros(x.shape)),))


@jax.custom_jvp
def doubled(x):
    return 2 * x


@doubled.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return doubled(x), 5 * t + jnp.zeros(x.shape)


def loop(x):
    def body(state):
        i, x = state
        return i + 1, lax.cond(i % 2 == 0, lambda x: x + jnp.ones(x.shape), lambda x: jnp.tanh(x), x)

    return lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]


def heads(x):
    """Six heads beside six rows, a mask and positions of the batch's size among those that are not the batch's."""
    tokens = jnp.broadcast_to(x[:, None, :], (x.shape[0], 6, 4)) + jnp.arange(6)[:, None]
    scores = jnp.einsum("bqd,bkd->bqk", tokens, tokens)
    return jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, 0) @ tokens


DERIVED = {
    "a literal that knows the batch size": lambda x: x / x.shape[0],
    "a program that depends on the batch size": lambda x: jnp.sin(x) if x.shape[0] > 4 else jnp.cos(x),
    "rows made of nothing": lambda x: jnp.zeros((x.shape[0], 4)).at[:, 1].set(2) + x,
    "merged and taken apart": lambda x: jnp.tanh(x[:, None] * jnp.ones((3, 1))).reshape(-1, 4).reshape(-1, 3, 4).sum(1),
    "merged behind": lambda x: (x.T[:, :, None] * jnp.ones(3)).reshape(4, -1).reshape(4, -1, 3)[..., 0].T,
    "merged constants": lambda x: x[:, :2].reshape(-1) * jnp.arange(2).repeat(1)[None].repeat(BATCH, 0).reshape(-1),
    "its own row": lambda x: x[jnp.arange(x.shape[0]), jnp.argmax(x, 1)],
    "its own row, by NumPy": lambda x: x[np.arange(BATCH), jnp.argmax(x, 1)],
    "its own rows, by NumPy": lambda x: x.at[np.arange(BATCH), jnp.argmin(x, 1)].add(x[np.arange(BATCH), 1]),
    "heads": heads,
    "scan": lambda x: lax.scan(lambda c, _: (jnp.tanh(c + x), c.sum(1)), jnp.zeros(x.shape), length=3)[0],
    "while and cond": loop,
    "remat": jax.checkpoint(lambda x: jax.nn.softmax(x)),
    "rows of a gradient": lambda x: jax.grad(lambda x: jnp.tanh(x).mean())(x),
    "top k": lambda x: lax.top_k(jnp.sort(x, 1), 2)[0],
    "convolution": lambda x: lax.conv(x[:, None], jnp.ones((2, 1, 2)), (1,), "SAME"),
    "padding": lambda x: jnp.pad(x, ((0, 0), (1, 1))),
    "linear algebra": lambda x: jnp.linalg.cholesky(jnp.eye(4) + x[:, :, None] * x[:, None, :]),
    "fft": lambda x: jnp.fft.rfft(x),
}


@pytest.mark.parametrize("name", DERIVED)
def test_functions_that_are_traced_once(name):
    options = {"sizes": (3, 3)} if name == "merged constants" else {}
    assert traces(DERIVED[name], X, axes=0, **options) == 1


@pytest.mark.parametrize(
    "model", [nn.MultiHeadDotProductAttention(num_heads=2), nn.LayerNorm(), nn.RNN(nn.LSTMCell(3)), nn.Conv(4, (3,))]
)
def test_models_that_are_traced_once(model):
    x = normal(BATCH, 5, 4)
    params = model.init(jax.random.key(0), x)
    assert traces(model.apply, params, x, axes=(None, 0)) == 1


def test_dropout_is_drawn_once_for_the_whole_batch():
    model = nn.Sequential([nn.Dense(4), nn.Dropout(0.5, deterministic=False)])
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    apply = lambda params, key, x: model.apply(params, x, rngs={"dropout": key})  # noqa: E731
    assert traces(apply, params, jax.random.key(2), X, axes=(None, None, 0)) == 1


def test_training_steps_are_traced_once():
    """A mean's divisor stays the whole batch's, so what the micro-batches give is added up."""
    step = jax.value_and_grad(lambda w, x: jnp.tanh(x @ w).mean())
    assert traces(step, W, X, axes=(None, 0), out_axes="mean") == 1
    assert traces(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), W, X, axes=(None, 0), out_axes="sum") == 1


def test_masked_means_are_weighted():
    mask = jnp.asarray([1, 0, 1, 1, 0, 1.0])
    loss = lambda w, x, mask: (jnp.tanh(x @ w).mean(1) * mask).sum() / mask.sum()  # noqa: E731
    options = {"out_axes": "mean", "weights": lambda w, x, mask: mask.sum()}
    assert traces(jax.value_and_grad(loss), W, X, mask, axes=(None, 0, 0), **options) == 1


TRACED = {
    "an output that may be a sum or a mean": (jnp.sum, {"out_axes": "sum"}, 1),
    "a mean of small numbers": (lambda x: x.sum() / 7, {"out_axes": "sum"}, 1),
    "batches end to end": (lambda x: jnp.split(jnp.concatenate([x, 2 * x]), 2)[1], {}, 2),
    "a number that divides twice": (lambda x: x.sum() / 6, {"out_axes": "mean"}, 1),
    "a count of rows that is added up": (lambda x: jnp.ones(x.shape[0]).sum() + 0 * x.sum(), {"out_axes": "sum"}, None),
}


@pytest.mark.parametrize("name", TRACED)
def test_functions_that_may_be_traced_for_micro_batches(name):
    fun, options, count = TRACED[name]
    found = traces(fun, X, axes=0, sizes=(3, 3), **options)
    assert count in (found, None)


def test_derivatives_of_whole_numbers():
    """They have a type of their own, whose values are compared with nothing."""
    count = integers(4, BATCH)
    fun = jax.value_and_grad(lambda x, i: (x * i[:, None]).sum(), (0, 1), allow_int=True)
    options = {"batch_axes": 0, "out_axes": ("sum", None)}
    value, (gradient, nothing) = jax.jit(df.dynaflow(fun, scheduler=Split(2, 4), **options))(X, count)
    same((value, gradient), (fun(X, count)[0], fun(X, count)[1][0]))
    assert (nothing.shape, nothing.dtype) == (count.shape, jax.dtypes.float0)


def test_functions_of_the_parts_are_about_what_the_function_returns():
    counted = Counted(lambda x: x.mean())
    flow = df.dynaflow(counted, scheduler=Split(3, 3), batch_axes=0, out_axes=lambda parts: jnp.stack(parts))
    same(flow(X), jnp.stack([X[:3].mean(), X[3:].mean()]))
    assert counted.traces == 2


def test_what_mixes_is_traced_and_refused_in_the_words_for_that():
    counted = Counted(lambda x: x - x.mean(0))
    with pytest.raises(
        df.BatchMixingError, match=r"micro-batches of 3 .*\n  - sub combines rows of the batch and a sum"
    ):
        df.dynaflow(counted, scheduler=Split(3, 3), batch_axes=0).plan(X)
    assert counted.traces == 2


@pytest.mark.parametrize("fun", [clipped, doubled, lambda x: doubled(clipped(x)), jax.jit(clipped)])
def test_derivative_rules_are_kept(fun):
    """Rules that were bound when the whole batch was traced are not those of a micro-batch."""
    counted = Counted(lambda w, x: fun(x @ w))
    flow = df.dynaflow(counted, scheduler=Split(2, 4), batch_axes=(None, 0))
    same(flow(W, X), counted.fun(W, X))
    assert counted.traces == (1 if fun is doubled else 3)  # JAX cannot map over what hides a custom_vjp
    scalar = lambda fun: lambda w, x: (fun(w, x) ** 2).sum()  # noqa: E731
    for transform, w in (
        (jax.grad, W),
        (lambda f: jax.jit(jax.grad(f)), W),
        (lambda f: jax.vmap(jax.grad(f), (0, None)), jnp.stack([W, 2 * W])),
        (lambda f: jax.grad(lambda *args: jax.vmap(f, (0, None))(*args).sum()), jnp.stack([W, 2 * W])),
    ):
        same(transform(scalar(flow))(w, X), transform(scalar(counted.fun))(w, X))


def test_derivatives_of_what_the_function_closes_over():
    def outer(w):
        return df.dynaflow(lambda x: doubled(x @ w), scheduler=Split(2, 4), batch_axes=0)(X).sum()

    same(jax.grad(outer)(W), jax.grad(lambda w: doubled(X @ w).sum())(W))


def test_jitted_functions_stay_shared():
    """A jaxpr that is called alike in several places is written once, so that XLA sees one function."""
    layer = jax.jit(lambda x: jnp.tanh(x @ W))
    text = (
        jax.jit(df.dynaflow(lambda x: layer(layer(layer(x))), scheduler=Split(3, 3), batch_axes=0)).lower(X).as_text()
    )
    assert text.count("stablehlo.tanh") == 1


def test_rows_that_meet_each_other_are_not_derived():
    assert derive(lambda x, i: x[i], [X, integers(4, BATCH)], [0, 0]) is None
    assert derive(lambda x: x @ x.T, [X], [0]) is None


def test_a_counter_that_all_rows_share_needs_no_rows():
    """A cache that keeps its length once for every row, and reads the first: as gemma's does."""

    def decode(cache, x):
        at = cache["end"][0]
        keys = lax.dynamic_update_slice(cache["keys"], x[:, None], (0, at, 0))
        return jnp.einsum("btd,bd->bt", keys, x), {"keys": keys, "end": cache["end"] + 1}

    cache = {"keys": normal(BATCH, 5, 4), "end": jnp.full(BATCH, 2)}
    assert traces(decode, cache, X, axes=({"keys": 0, "end": None}, 0)) == 1
    with pytest.raises(df.BatchMixingError, match="takes some rows out of the batch"):
        df.dynaflow(decode, scheduler=Split(2, 4), batch_axes=0)(cache, X)
    flow = df.dynaflow(decode, scheduler=Split(2, 4), batch_axes=0, allow_batch_mixing="*")
    same(flow(cache, X), decode(cache, X))
