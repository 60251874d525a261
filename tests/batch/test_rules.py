"""One example per rule at least: what is proven is also run, what mixes must say so."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from proving import BATCH, check, integers, normal, prove, reasons

from dynaflow_jax.batch.state import ONE, N, Symbol, describe, power, scale, times

X = normal(BATCH, 4)
X3 = normal(BATCH, 4, 3)
W = normal(4, 5, seed=1)
ROW = "rows on axis 0"
SUM = "a sum over the batch"
MEAN = "a sum over the batch, scaled by 1/n"


def arange(x):
    return jnp.arange(x.shape[0])


def grad_of_conv(w, x, groups=1):
    def f(w, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)
        return jnp.mean(y**2)

    return jax.value_and_grad(f, (0, 1))(w, x)


@jax.custom_vjp
def scaled_gradient(x):
    return jnp.tanh(x)


scaled_gradient.defvjp(lambda x: (scaled_gradient(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


def looked_up(x, **how):
    """Two elements along the last axis, one of which is not there."""
    return x.at[..., jnp.array([0, 9])].get(**how)


def keys(impl):
    return jax.random.split(jax.random.key(0, impl=impl), BATCH)


def drop(key, x):
    return x * jax.random.bernoulli(key, 0.5, x.shape)


def row_keys(derive):
    """Keys that every row's key gives, as numbers."""
    return lambda key: jax.random.key_data(jax.vmap(derive)(key))


def positive(x):
    return 9 * jnp.eye(4) + x[:, :, None] * x[:, None]


PROVEN = {
    # element by element
    "tanh": (lambda x: jnp.tanh(x) + 1, [X], [0], [ROW]),
    "scaled by the size": (lambda x: x / x.shape[0], [X], [0], [f"{ROW}, scaled by 1/n"]),
    "scale cancels": (lambda x: (x / x.shape[0]) * x.shape[0], [X], [0], [ROW]),
    "relu of scaled rows": (lambda x: jnp.maximum(x / x.shape[0], 0), [X], [0], [f"{ROW}, scaled by 1/n"]),
    "sign of scaled rows": (lambda x: (x / x.shape[0] > 0) & (x > 0), [X], [0], [ROW]),
    "square": (lambda x: (x / x.shape[0]) ** 2, [X], [0], [f"{ROW}, scaled by 1/n^2"]),
    "where": (lambda x: jnp.where(x > 0, x, -1e9), [X], [0], [ROW]),
    "where of scaled rows": (lambda x: jnp.where(x > 0, x / x.shape[0], 0), [X], [0], [f"{ROW}, scaled by 1/n"]),
    "clip, cast": (lambda x: jnp.clip(x, -1, 1).astype(jnp.int32), [X], [0], [ROW]),
    "constant rows": (lambda x: jnp.ones(x.shape[0]) * 2, [X], [0], [ROW]),
    "independent": (lambda x, w: w.sum() * 2, [X, W], [0, None], ["independent of the batch"]),
    "conjugate of scaled rows": (lambda x: jnp.abs(jnp.conj((x + 1j * x) / x.shape[0])), [X], [0],
                                 [f"{ROW}, scaled by 1/n"]),
    "real part of rows over a real sum": (lambda x: jnp.real((x + 1j * x) / jnp.abs(x).sum()), [X], [0],
                                          [f"{ROW}, scaled by 1/t"]),
    "conjugate of a sum": (lambda x: jnp.real(jnp.conj((x + 1j * x).sum())), [X], [0], [SUM]),
    "size as a number": (lambda x: jnp.float32(x.shape[0]) * 2, [X], [0], ["independent of the batch, scaled by n"]),
    # shapes
    "merge and part": (lambda x: jnp.sin(x.reshape(-1, 3)).reshape(x.shape), [X3], [0], [ROW]),
    "merge": (lambda x: x.reshape(-1), [X3], [0], [f"{ROW} in blocks of 12"]),
    "merge with leading": (lambda x: x.swapaxes(0, 1).reshape(-1, 3), [X3], [0], [f"{ROW}, 4 times over"]),
    "merge constant": (lambda x: jnp.broadcast_to(arange(x)[:, None], x.shape).reshape(-1), [normal(4, BATCH)], [1],
                       [f"{ROW}, 4 times over"]),
    "transpose": (lambda x: x.transpose(2, 0, 1), [X3], [0], ["rows on axis 1"]),
    "expand, squeeze": (lambda x: jnp.squeeze(x[:, None, :, None] * 2, (1, 3)), [X], [0], [ROW]),
    "flip": (lambda x: x[:, ::-1], [X], [0], [ROW]),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2))), [X], [0], [ROW]),
    "concatenate": (lambda x: jnp.concatenate([x, jnp.zeros_like(x), x * 2], 1), [X], [0], [ROW]),
    "guidance": (lambda x: jnp.split(jnp.tanh(jnp.concatenate([x, 2 * x])), 2), [X], [0], [ROW, ROW]),
    "guidance, by slices": (lambda x: jnp.concatenate([x, 2 * x])[x.shape[0] :], [X], [0], [ROW]),
    "guidance with constants": (lambda x: jnp.concatenate([x, jnp.ones_like(x)]), [X], [0], [f"{ROW}, 2 times over"]),
    "split, stack": (lambda x: jnp.stack(jnp.split(x, 2, 1)), [X], [0], ["rows on axis 1"]),
    "tile": (lambda x: jnp.tile(x, (2, 3)), [X], [0], [f"{ROW}, 2 times over"]),
    "repeat": (lambda x: jnp.repeat(x, 2, axis=0), [X], [0], [f"{ROW} in blocks of 2"]),
    "roll": (lambda x: jnp.roll(x, 1, axis=1), [X], [0], [ROW]),
    "mask over positions": (lambda x: jnp.where(jnp.tril(jnp.ones((4, 4), bool)), x[..., None], 0), [X], [0], [ROW]),
    # reductions
    "sum": (lambda x: (x.sum(), x.sum(0), x.sum(1)), [X], [0], [SUM, SUM, ROW]),
    "mean": (lambda x: (x.mean(), x.mean(0), x.mean(1)), [X], [0], [MEAN, MEAN, ROW]),
    "sum of sums": (lambda x: x.sum() + 2 * x.mean(1).sum() - jnp.tanh(x).sum(), [X], [0], [SUM]),
    "max, argmax": (lambda x: (x.max(1), x.argmax(1), jnp.any(x > 0, 1), x.prod(1)), [X], [0], [ROW] * 4),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, 1), [X], [0], [ROW]),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x, 1), *lax.top_k(x, 2)), [X], [0], [ROW] * 4),
    "cumsum": (lambda x: (jnp.cumsum(x, 1), lax.cummax(x, 1), lax.cumlogsumexp(x, 1)), [X], [0], [ROW] * 3),
    "pool": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"), [X3], [0], [ROW]),
    "gradient of pool": (
        jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID").mean()), [X3], [0],
        [f"{ROW}, scaled by 1/n"]),
    "var": (lambda x: jnp.var(x, 1), [X], [0], [ROW]),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), [X], [0], [ROW]),
    "masked mean": (lambda x, m: (x * m).sum() / m.sum(), [X, X], [0, 0], [f"{SUM}, scaled by 1/t"]),
    # contractions
    "matmul": (lambda x, w: x @ w, [X, W], [0, None], [ROW]),
    "matmul from the left": (lambda w, x: w @ x, [normal(5, 4), normal(4, BATCH)], [None, 1], ["rows on axis 1"]),
    "outer product": (lambda x: jnp.einsum("bi,bj->bij", x, x), [X], [0], [ROW]),
    "gram": (lambda x: x.T @ x, [X], [0], [SUM]),
    "mean of gram": (lambda x: x.T @ (x / x.shape[0]), [X], [0], [MEAN]),
    "contract merged": (lambda x: x.reshape(-1, 3).T @ x.reshape(-1, 3), [X3], [0], [SUM]),
    "conv": (grad_of_conv, [normal(3, 3, 2, 4), normal(BATCH, 5, 5, 2)], [None, 0],
             [MEAN, MEAN, f"{ROW}, scaled by 1/n"]),
    "grouped conv": (lambda w, x: grad_of_conv(w, x, 2), [normal(3, 3, 2, 4), normal(BATCH, 5, 5, 4)], [None, 0],
                     [MEAN, MEAN, f"{ROW}, scaled by 1/n"]),
    "solve": (lambda x: jnp.linalg.solve(positive(x), x[..., None])[..., 0], [X], [0], [ROW]),
    "solve, with a gradient": (jax.grad(lambda x: jnp.linalg.inv(positive(x)).sum()), [X], [0], [ROW]),
    "cholesky": (lambda x: jnp.linalg.cholesky(x[:, :, None] * x[:, None] + 9 * jnp.eye(4)), [X], [0], [ROW]),
    # indexing
    "embedding": (lambda t, i: t[i], [W, integers(4, BATCH, 3)], [None, 0], [ROW]),
    "gradient of embedding": (jax.grad(lambda t, i: jnp.sin(t[i]).sum()), [W, integers(4, BATCH, 3)], [None, 0], [SUM]),
    "own row": (lambda x, i: x[arange(x), i], [X, integers(4, BATCH)], [0, 0], [ROW]),
    "own row, many": (lambda x, i: x[arange(x)[:, None], i], [X, integers(4, BATCH, 2)], [0, 0], [ROW]),
    "gradient of own row": (jax.grad(lambda x, i: jnp.sin(x[arange(x), i]).sum()),
                            [X, integers(4, BATCH)], [0, 0], [ROW]),
    "write to own row": (lambda x, i: x.at[arange(x), i].set(1.0), [X, integers(4, BATCH)], [0, 0], [ROW]),
    "own token": (lambda x, i: x.reshape(-1, 3)[jnp.arange(x.shape[0] * 4), i.reshape(-1)],
                  [X3, integers(3, BATCH, 4)], [0, 0], [f"{ROW} in blocks of 4"]),
    "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i, 1), [X, integers(4, BATCH, 2)], [0, 0], [ROW]),
    "out of bounds": (lambda x: looked_up(x.sum(0), mode="fill"), [X], [0], [SUM]),
    "out of bounds, zero": (lambda x: looked_up(x.sum(0), mode="fill", fill_value=0), [X], [0], [SUM]),
    "out of bounds, the last": (lambda i: looked_up(i.sum(0), mode="clip"), [integers(4, BATCH, 3)], [0], [SUM]),
    "out of bounds, in rows": (lambda x: looked_up(x, mode="fill", fill_value=1), [X], [0], [ROW]),
    "columns": (lambda x: x[:, jnp.array([2, 0])], [X], [0], [ROW]),
    "slice": (lambda x: x[:, 1:3], [X], [0], [ROW]),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice_in_dim(x, i[0], 2, 1), [X, integers(2, 1)], [0, None], [ROW]),
    "cache": (lambda c, x, i: lax.dynamic_update_slice_in_dim(c, x[:, None], i[0], 1),
              [X3, normal(BATCH, 3), integers(3, 1)],
              [0, 0, None], [ROW]),
    "cache, by row": (
        lambda c, x, i: jax.vmap(lambda c, x, i: lax.dynamic_update_slice_in_dim(c, x[None], i, 0))(c, x, i),
        [X3, normal(BATCH, 3), integers(4, BATCH)], [0, 0, 0], [ROW]),
    "write to columns": (lambda x: x.at[:, 1].add(x[:, 0]), [X], [0], [ROW]),
    "one_hot": (lambda i: jax.nn.one_hot(i, 3), [integers(3, BATCH)], [0], [ROW]),
    "histogram": (lambda i: jnp.zeros(4).at[i].add(1.0), [integers(4, BATCH)], [0], [SUM]),
    # random numbers
    "keys of rows": (lambda k: jax.vmap(lambda k: jax.random.normal(jax.random.fold_in(k, 1), (3,)))(k),
                     [jax.random.split(jax.random.key(0), BATCH)], [0], [ROW]),
    "keys from keys of rows": (row_keys(lambda k: jax.random.fold_in(jax.random.split(k)[0], 1)), [keys("rbg")], [0],
                               [ROW]),
    "a number for all keys of rows": (row_keys(lambda k: jax.random.fold_in(k, 1)), [keys("unsafe_rbg")], [0], [ROW]),
    "draw for tokens": (lambda k, x: drop(k, x.reshape(-1, 3)), [jax.random.key(0), X3], [None, 0],
                        [f"{ROW} in blocks of 4"]),
    "draw for tokens of rows": (lambda k, x: drop(k, x.reshape(-1, 3)).reshape(x.shape), [jax.random.key(0), X3],
                                [None, 0], [ROW]),
    "draw": (lambda k, x: x + jax.random.normal(k, x.shape), [jax.random.key(0), X], [None, 0], [ROW]),
    "draw keys": (lambda k, x: x[:, 0] + jax.vmap(jax.random.uniform)(jax.random.split(k, x.shape[0])),
                  [jax.random.key(0), X], [None, 0], [ROW]),
    "draw for all": (lambda k, x: x + jax.random.normal(k, (4,)), [jax.random.key(0), X], [None, 0], [ROW]),
    # loops, branches and calls
    "scan": (lambda x, w: lax.scan(lambda c, w: (jnp.tanh(c * w), c.sum(1)), x, w), [X, normal(3, 4)], [0, None],
             [ROW, "rows on axis 1"]),
    "scan sums": (lambda x, w: lax.scan(lambda c, w: (c + (x * w).sum(), (x * w).sum(0)), 0.0, w), [X, normal(3, 4)],
                  [0, None], [SUM, SUM]),
    "gradient of scan": (
        jax.grad(lambda w, x: jnp.mean(lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, w)[0])),
        [normal(3, 4, 4), X], [None, 0], [MEAN]),
    "scan over time": (lambda x: lax.scan(lambda c, x: (c + x, c), jnp.zeros(x.shape[::2]), x.swapaxes(0, 1)),
                       [X3], [0],
                       [ROW, "rows on axis 1"]),
    "fori_loop": (lambda x, n: lax.fori_loop(0, n[0], lambda i, x: x * 2, x), [X, integers(5, 1)], [0, None], [ROW]),
    "cond": (lambda x, p: lax.cond(p[0] > 0, lambda x: x * 2, jnp.tanh, x), [X, normal(1)], [0, None], [ROW]),
    "custom rules": (lambda x: jax.nn.relu(x) + jax.nn.gelu(x) + jax.nn.silu(x), [X], [0], [ROW]),
    "custom_vjp": (jax.grad(lambda w, x: scaled_gradient(x @ w).sum()), [W, X], [None, 0], [SUM]),
    "vmap": (jax.vmap(lambda x: jnp.where(x.sum() > 0, x, x[::-1])), [X], [0], [ROW]),
    "batch on another axis": (lambda x: jax.nn.softmax(x, 0), [normal(4, BATCH)], [1], ["rows on axis 1"]),
    "checkpoint": (jax.value_and_grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())), [X], [0], [SUM, ROW]),
    "dead mixing": (lambda x: (x.max(0), x)[1], [X], [0], [ROW]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVEN)
def test_proven(name):
    fun, args, in_axes, expect = PROVEN[name]
    check(fun, args, in_axes, expect=expect)


MIXING = {
    "conjugate of rows over a sum": (lambda z: jnp.conj(z / z.sum()) * z.sum(), [X + 1j * X[::-1]], [0],
                                     "the conjugate of values scaled by a complex sum"),
    "real part of rows over a sum": (lambda z: jnp.real(z / z.sum()), [X + 1j * X[::-1]], [0],
                                     "the real part of values scaled by a complex sum"),
    "cast of rows over a sum": (lambda z: lax.convert_element_type_p.bind(
        z / z.sum(), new_dtype=jnp.dtype("float32"), weak_type=False, sharding=None), [X + 1j * X[::-1]], [0],
        "the real part of values scaled by a complex sum"),
    "real transform of rows over a sum": (lambda z: jnp.fft.irfft(z / z.sum()), [X + 1j * X[::-1]], [0],
                                          "to real numbers values scaled by a complex sum"),
    "sum out of bounds": (lambda x: looked_up(x.sum(0), mode="fill", fill_value=1), [X], [0], "with a constant where"),
    "counts out of bounds": (lambda i: looked_up(i.sum(0), mode="fill"), [integers(4, BATCH, 3)], [0],
                             "with a constant where"),
    "scaled rows out of bounds": (lambda x: looked_up(x / x.shape[0], mode="fill", fill_value=1), [X], [0],
                                  "with a constant where"),
    "zeros out of bounds": (lambda x: x.sum(0)[:2] + looked_up(jnp.zeros(4), mode="fill", fill_value=1), [X], [0],
                            "contribute again"),
    "draw with keys of rows": (jax.vmap(drop), [keys("rbg"), X], [0, 0], "with a key per row"),
    "split keys of rows": (row_keys(lambda k: jax.random.split(k)[0]), [keys("unsafe_rbg")], [0], "with a key per row"),
    "keys from rows": (lambda k, i: row_keys(lambda i: jax.random.fold_in(k, i))(i),
                       [jax.random.key(0, impl="unsafe_rbg"), integers(9, BATCH)], [None, 0], "with a key per row"),
    "draw in a call that is mapped its own way": (jax.custom_batching.sequential_vmap(drop), [jax.random.key(0), X],
                                                  [None, 0], "not opened to draw once"),
    "draw in a composite": (lambda k, x: lax.composite(drop, "my.dropout")(k, x), [jax.random.key(0), X], [None, 0],
                            "not opened to draw once"),
    "draw in a linear call": (lambda k, x: jax.custom_derivatives.linear_call(drop, drop, k, x),
                              [jax.random.key(0), X], [None, 0], "not opened to draw once"),
    "solve for the rows": (lambda x: jnp.linalg.solve(9 * jnp.eye(x.shape[0]), x), [X], [0], "batch"),
    "centre": (lambda x: x - x.mean(0), [X], [0], "rows of the batch and a sum over the batch"),
    "centre by a number": (lambda x: x - x.mean(), [X], [0], "a sum over the batch"),
    "max": (lambda x: x.max(0), [X], [0], "reduces over the batch with max"),
    "max of merged": (lambda x: x.reshape(-1).max(), [X], [0], "reduces over the batch with max"),
    "flip": (lambda x: x[::-1], [X], [0], "reverses the batch"),
    "roll": (lambda x: jnp.roll(x, 1, 0), [X], [0], "takes some rows out of the batch"),
    "first": (lambda x: x[0], [X], [0], "takes some rows out of the batch"),
    "pad": (lambda x: jnp.pad(x, ((0, 1), (0, 0))), [X], [0], "pads the batch"),
    "more rows": (lambda x: jnp.concatenate([x, jnp.ones((1, 4))]), [X], [0], "joins rows of the batch and other rows"),
    "sort": (lambda x: jnp.sort(x, 0), [X], [0], "sorts the batch"),
    "cumsum": (lambda x: jnp.cumsum(x, 0), [X], [0], "accumulates along the batch with cumsum"),
    "pairs": (lambda x: x @ x.T, [X], [0], "each row of the batch with every other"),
    "differences": (lambda x: x[:, None] - x[None], [X], [0], "each row of the batch with every other"),
    "contract with index": (lambda x: x.sum(1) @ jnp.arange(x.shape[0], dtype=x.dtype), [X], [0], "position of a row"),
    "position": (lambda x: x * arange(x)[:, None], [X], [0], "position of a row"),
    "moved position": (lambda i, x: jnp.where((arange(x) + i < 0)[:, None], x, 0), [jnp.int32(-4), X], [None, 0],
                       "compares the position of a row"),
    "next row": (lambda x: x[arange(x) + 1], [X], [0], "position of a row"),
    "diagonal": (lambda x: x[arange(x) // 2, arange(x) // 2], [X], [0], "position of a row"),
    "rows by data": (lambda x, i: x[i], [X, integers(2, BATCH)], [0, 0], "picks rows of the batch by data"),
    "write by data": (lambda x, i: jnp.zeros(4).at[i].set(x[:, 0]),
                      [X, integers(4, BATCH)], [0, 0], "places that data decides"),
    "add to constant": (lambda x, i: jnp.ones(4).at[i].add(x[:, 0]),
                        [X, integers(4, BATCH)], [0, 0], "contribute again"),
    "sum plus one": (lambda x: x.sum() + 1, [X], [0], "contribute again"),
    "exp of sum": (lambda x: jnp.exp(x.sum()), [X], [0], "applies exp to a sum over the batch"),
    "norm": (lambda x: x.sum(0) ** 2, [X], [0], "raises a sum over the batch to a power"),
    "product of sums": (lambda x: x.sum() * jnp.tanh(x).sum(), [X], [0], "multiplies two sums over the batch"),
    "scales differ": (lambda x: x / x.shape[0] + x, [X], [0], "scale differently"),
    "sum and mean": (lambda x: x.mean() + x.sum(), [X], [0], "scale differently"),
    "exp of scaled rows": (lambda x: jnp.exp(x / x.shape[0]), [X], [0], "scales with the batch"),
    "root of the size": (lambda x: x / x.shape[0] ** 0.5, [X], [0], "not in proportion"),
    "fold rows": (lambda x: x.reshape(-1, 2, 4), [X], [0], "takes the axis of the batch apart"),
    "fold rows, leading": (lambda x: x.reshape(2, -1, 4), [X], [0], "takes the axis of the batch apart"),
    "wrong interleaving": (lambda x: x.swapaxes(0, 1).reshape(-1) + x.reshape(-1), [X], [0], "laid out differently"),
    "scan over rows": (lambda x: lax.scan(lambda c, x: (c + x, c), jnp.zeros(4), x), [X], [0], "loops over the rows"),
    "loop of sums": (lambda x: lax.fori_loop(0, 3, lambda i, c: c + x.sum(), 1.0), [X], [0], "contribute again"),
    "growing scale": (lambda x: lax.fori_loop(0, 3, lambda i, c: c / x.shape[0], x), [X], [0], "scale differently"),
    "while by data": (lambda x: lax.while_loop(lambda c: c.max() < 9, lambda c: c * 2, jnp.abs(x)),
                      [X], [0], "over the batch with"),
    "cond by data": (lambda x: lax.cond(x.sum() > 0, jnp.tanh, jnp.sin, x), [X], [0], "compares sums over the batch"),
    "draw in a branch": (lambda k, x, p: lax.cond(p[0] > 0, lambda x: x + jax.random.normal(k, x.shape), jnp.sin, x),
                         [jax.random.key(0), X, normal(1)], [None, 0, None], "inside a branch"),
    "program by size": (lambda x: x * 2 if x.shape[0] == BATCH else x + 2, [X], [0], "the program itself depends"),
    "wiring by size": (lambda x: (jnp.sin(x), jnp.cos(x))[x.shape[0] == BATCH] * 2,
                       [X], [0], "the program itself depends"),
    "parameter by size": (lambda x: x ** (2 if x.shape[0] == BATCH else 3), [X], [0], "batch size"),
    "callback": (lambda x: jax.pure_callback(lambda x: x, x, x), [X], [0], "calls back to the host"),
    "conv over rows": (lambda x: lax.conv_general_dilated(x.reshape(1, 1, *x.shape), jnp.ones((1, 1, 3, 1)), (1, 1),
                       "SAME"),
                       [X], [0], "convolves over the batch"),
    "pool over rows": (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME"),
                       [X], [0], "pools over the batch"),
    "fft over rows": (lambda x: jnp.abs(jnp.fft.fft(x, axis=0)), [X], [0], "over the batch|along the batch"),
    "shuffle": (lambda k, x: jax.random.permutation(k, x), [jax.random.key(0), X], [None, 0], "batch"),
    "ragged": (lambda x, i: lax.ragged_dot(x, normal(3, 4, 2), jnp.bincount(i, length=3)),
               [X, integers(3, BATCH)], [0, 0],
               "MoE"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_mixing(name):
    fun, args, in_axes, reason = MIXING[name]
    said = reasons(prove(fun, args, in_axes))
    assert any(part in said for part in reason.split("|")), said


def test_scales():
    t = Symbol(None)
    mean = times(scale(N, -1), scale(t))
    assert describe(mean) == "t/n"
    assert times(mean, power(mean, -1)) == ONE
    assert scale(t) != scale(Symbol(None))
    assert describe(power(scale(N), -2)) == "1/n^2"
    assert describe(ONE) == "1"
