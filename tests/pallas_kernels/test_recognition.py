"""Norms and grouped matmuls are recognized however they are written, and nothing else is."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernel_checks import assert_within_rounding

import dynaflow_jax as df
from dynaflow_jax import recognition
from dynaflow_jax.substitution import substituted
from pallas_kernels import Kernels, add_rms_norm, rms_norm

WIDTH, EPS = 256, 1e-5
KEYS = jax.random.split(jax.random.key(0), 3)


def rows(key, dtype):
    return jax.random.normal(key, (2, 3, WIDTH), dtype)


def linen(dtype):
    norm = nn.RMSNorm(epsilon=EPS, dtype=dtype)
    return lambda weight, total: norm.apply({"params": {"scale": weight}}, total)


def of_nnx(dtype):
    graph, state = nnx.split(nnx.RMSNorm(WIDTH, epsilon=EPS, dtype=dtype, rngs=nnx.Rngs(0)))

    def norm(weight, total):
        return nnx.merge(graph, jax.tree.map(lambda _: weight, state))(total)

    return norm


def with_rsqrt(dtype):
    def norm(weight, total):
        h = total.astype(jnp.float32)
        return (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + EPS) * weight).astype(dtype)

    return norm


def divided(dtype):
    def norm(weight, total):
        h = total.astype(jnp.float32)
        return (weight * (h / jnp.sqrt((h**2).mean(-1, keepdims=True) + EPS))).astype(dtype)

    return norm


def with_one_added(dtype):
    """As Gemma's weights, which are stored less one."""

    def norm(weight, total):
        h = total.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + EPS)
        return ((h * scale) * (1 + (weight - 1))).astype(dtype)

    return norm


def mapped(dtype):
    """As Equinox's: of one row, over all of them."""

    def norm(weight, row):
        h = row.astype(jnp.float32)
        return (h * jax.lax.rsqrt(jnp.mean(h**2) + EPS) * weight).astype(dtype)

    return lambda weight, total: jax.vmap(jax.vmap(lambda row: norm(weight, row)))(total)


NORMS = (linen, of_nnx, with_rsqrt, divided, with_one_added, mapped)


def layer(norm):
    def fun(weight, x, residual):
        total = x + residual
        return norm(weight, total), total

    return fun


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_norms_of_sums(norm, dtype):
    weight = 1 + 0.1 * jax.random.normal(KEYS[2], (WIDTH,))
    args = weight, rows(KEYS[0], dtype), rows(KEYS[1], dtype)
    jaxpr = jax.make_jaxpr(layer(norm(dtype)))(*args)
    (found,) = recognition.norms(jaxpr.jaxpr)
    assert found.eps == pytest.approx(EPS)
    assert set(found.terms) == set(jaxpr.jaxpr.invars[1:])
    fun = substituted(jaxpr, [Kernels(interpret=True)])
    assert fun.__name__ == "add_rms_norm"
    assert not {eqn.primitive.name for eqn in fun.eqns} & {"rsqrt", "sqrt", "reduce_sum", "square", "integer_pow"}
    normed, total = fun(*args)
    want_normed, want_total = layer(norm(dtype))(*args)
    np.testing.assert_array_equal(total, want_total)
    assert_within_rounding(normed, want_normed, ulps=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_norms_of_something_else(norm, dtype):
    weight = 1 + 0.1 * jax.random.normal(KEYS[2], (WIDTH,))
    args = weight, rows(KEYS[0], dtype)
    fun = substituted(jax.make_jaxpr(norm(dtype))(*args), [Kernels(interpret=True)])
    assert fun.__name__ == "rms_norm"
    assert_within_rounding(fun(*args)[0], norm(dtype)(*args), ulps=4)


def test_a_sum_of_other_shapes_is_normalized_alone():
    args = jnp.ones(WIDTH), rows(KEYS[0], "bfloat16"), rows(KEYS[1], "bfloat16")
    jaxpr = jax.make_jaxpr(lambda w, x, r: with_rsqrt("bfloat16")(w, x + r[0]))(*args)
    assert substituted(jaxpr, [Kernels(interpret=True)]).__name__ == "rms_norm"


def h_of(total):
    return total.astype(jnp.float32)


OTHERS = {
    "with a mean": lambda w, x, r: nn.LayerNorm(dtype="bfloat16").apply({"params": {"scale": w, "bias": w}}, x + r),
    "of another axis": lambda w, x, r: (
        h_of(x + r) * jax.lax.rsqrt(jnp.mean(h_of(x + r) ** 2, 0, keepdims=True) + EPS) * w
    ).astype(x.dtype),
    "summed, not averaged": lambda w, x, r: (
        (h := h_of(x + r)) * jax.lax.rsqrt(jnp.sum(h * h, -1, keepdims=True) + EPS) * w
    ).astype(x.dtype),
    "cubed": lambda w, x, r: ((h := h_of(x + r)) * jax.lax.rsqrt(jnp.mean(h**3, -1, keepdims=True) + EPS) * w).astype(
        x.dtype
    ),
    "of another value": lambda w, x, r: (
        h_of(x) * jax.lax.rsqrt(jnp.mean(h_of(x + r) ** 2, -1, keepdims=True) + EPS) * w
    ).astype(x.dtype),
    "in bfloat16": lambda w, x, r: (
        ((h := x + r) * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True, dtype=jnp.bfloat16) + jnp.bfloat16(EPS)))
        * w.astype(x.dtype)
    ),
    "with a scale for each row": lambda w, x, r: (
        (h := h_of(x + r)) * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + EPS) * w[:3, None]
    ).astype(x.dtype),
    "whose scale is read elsewhere": lambda w, x, r: (
        ((h := h_of(x + r)) * (s := jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + EPS)) * w).astype(x.dtype),
        s,
    ),
    "that stays in float32": lambda w, x, r: with_rsqrt("float32")(w, x + r),
    "without an epsilon": lambda w, x, r: (
        (h := h_of(x + r)) * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True)) * w
    ).astype(x.dtype),
    "multiplied by the root": lambda w, x, r: (
        (h := h_of(x + r)) * jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + EPS) * w
    ).astype(x.dtype),
}


@pytest.mark.parametrize("what", OTHERS)
def test_others_are_left_alone(what):
    args = jnp.ones(WIDTH), rows(KEYS[0], "bfloat16"), rows(KEYS[1], "bfloat16")
    assert list(recognition.norms(jax.make_jaxpr(OTHERS[what])(*args).jaxpr)) == []


SQUARE = {
    "of the column, broadcast": lambda x: jax.lax.rsqrt(jnp.mean(x * x, -1) + EPS),
    "of the column, reshaped": lambda x: jax.lax.rsqrt(jnp.mean(x * x, -1).reshape(1, -1) + EPS),
    "of the column, reshaped last": lambda x: jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS).reshape(1, -1),
}


@pytest.mark.parametrize("what", SQUARE)
def test_rows_of_a_square_array_are_not_scaled_by_their_columns(what):
    args = jnp.ones(WIDTH), jax.random.normal(KEYS[0], (WIDTH, WIDTH))
    jaxpr = jax.make_jaxpr(lambda w, x: x * SQUARE[what](x) * w)(*args)
    assert list(recognition.norms(jaxpr.jaxpr)) == []


def test_rows_of_a_square_array_are_recognized():
    args = jnp.ones(WIDTH), jax.random.normal(KEYS[0], (WIDTH, WIDTH))
    for norm in NORMS:
        if norm is not mapped:  # of three axes
            assert len(list(recognition.norms(jax.make_jaxpr(norm("float32"))(*args).jaxpr))) == 1


@pytest.mark.parametrize(("dtype", "eps"), [("bfloat16", float(jnp.bfloat16(0.3))), ("int32", 0.0), ("float32", 0.3)])
def test_epsilon_is_what_its_conversions_leave(dtype, eps):
    def norm(weight, x):
        given = jax.lax.convert_element_type(jax.lax.convert_element_type(0.3, dtype), jnp.float32)
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + given) * weight

    (found,) = recognition.norms(jax.make_jaxpr(norm)(jnp.ones(WIDTH), rows(KEYS[0], "float32")).jaxpr)
    assert found.eps == pytest.approx(eps, rel=1e-6)


def test_a_training_step_keeps_what_its_backward_pass_reads():
    args = jnp.ones(WIDTH), rows(KEYS[0], "bfloat16"), rows(KEYS[1], "bfloat16")
    step = jax.grad(lambda *args: layer(with_rsqrt("bfloat16"))(*args)[0].astype(jnp.float32).sum())
    assert list(recognition.norms(jax.make_jaxpr(step)(*args).jaxpr)) == []


def test_a_weight_that_depends_on_the_sum():
    """Which ``add_rms_norm`` would have to know before it has added; the norm alone can be given it."""

    def fun(weight, x, residual):
        total = x + residual
        return with_rsqrt("bfloat16")(weight * h_of(total)[0, 0], total)

    args = jnp.ones(WIDTH), rows(KEYS[0], "bfloat16"), rows(KEYS[1], "bfloat16")
    jaxpr = jax.make_jaxpr(fun)(*args)
    assert substituted(jaxpr, [Kernels(("add_rms_norm",), interpret=True)]) is None
    found = substituted(jaxpr, [Kernels(interpret=True)])
    assert found.__name__ == "rms_norm"
    assert_within_rounding(found(*args)[0], fun(*args), ulps=4)


# -- grouped matmuls -----------------------------------------------------------------------------------------------

X = jax.random.normal(KEYS[0], (256, 128), jnp.bfloat16)
EXPERTS = jax.random.normal(KEYS[1], (4, 128, 128), jnp.bfloat16)


def plain(x, weights, sizes):
    return jax.lax.ragged_dot(x, weights, sizes)


def accumulated(x, weights, sizes):
    return jax.lax.ragged_dot(x, weights, sizes, preferred_element_type=jnp.float32).astype(x.dtype)


@pytest.mark.parametrize("fun", [plain, accumulated])
@pytest.mark.parametrize("sizes", [(64, 0, 150, 42), (10, 20, 30, 40), (0, 0, 0, 0)], ids=["all", "some", "none"])
def test_grouped_matmuls(fun, sizes):
    """Rows behind the last group are zeros."""
    args = X, EXPERTS, jnp.asarray(sizes, jnp.int32)
    found = substituted(jax.make_jaxpr(fun)(*args), [Kernels(interpret=True)])
    assert found.__name__ == "grouped_matmul"
    assert_within_rounding(found(*args)[0], accumulated(*args), ulps=2)


def test_other_ragged_products_are_left_alone():
    sizes = jnp.asarray([64, 64, 64, 64], jnp.int32)

    def in_float32(*args):
        return jax.lax.ragged_dot(*args, preferred_element_type=jnp.float32)

    assert list(recognition.grouped_matmuls(jax.make_jaxpr(in_float32)(X, EXPERTS, sizes).jaxpr)) == []
    weights_gradient = jax.make_jaxpr(jax.grad(lambda w: plain(X, w, sizes).astype(jnp.float32).sum()))(EXPERTS)
    assert len(list(recognition.grouped_matmuls(weights_gradient.jaxpr))) <= 1  # the forward one


# -- what is used where --------------------------------------------------------------------------------------------


def test_on_a_cpu_nothing_is_used():
    args = jnp.ones(WIDTH), rows(KEYS[0], "bfloat16"), rows(KEYS[1], "bfloat16")
    jaxpr = jax.make_jaxpr(layer(with_rsqrt("bfloat16")))(*args)
    assert substituted(jaxpr, [Kernels()]) is None
    assert substituted(jaxpr, [Kernels(everywhere=True)]) is None


def test_shapes_that_a_kernel_does_not_support_are_left_alone():
    args = jnp.ones(100), jnp.ones((8, 100)), jnp.ones((8, 100))
    assert substituted(jax.make_jaxpr(layer(with_rsqrt("float32")))(*args), [Kernels(interpret=True)]) is None


def test_a_kernel_is_used_where_it_was_measured_faster(monkeypatch):
    asked = []
    for module in (add_rms_norm, rms_norm):
        monkeypatch.setattr(module, "supports", module.supports_shapes)
    monkeypatch.setattr("pallas_kernels.measured.worthwhile_in_place", lambda *what: asked.append(what) or False)
    args = jnp.ones(WIDTH), rows(KEYS[0], "bfloat16"), rows(KEYS[1], "bfloat16")
    jaxpr = jax.make_jaxpr(layer(with_rsqrt("bfloat16")))(*args)
    assert substituted(jaxpr, [Kernels()]) is None
    kind = jax.devices()[0].device_kind
    assert asked == [("add_rms_norm", kind, (6, WIDTH, 0)), ("rms_norm", kind, (6, WIDTH))]
    assert substituted(jaxpr, [Kernels(everywhere=True)]).__name__ == "add_rms_norm"
    assert substituted(jaxpr, [Kernels(("grouped_matmul",), everywhere=True)]) is None


def test_names_and_text():
    with pytest.raises(df.DynaFlowError, match=r"no kernel 'norm'.*add_rms_norm, rms_norm, grouped_matmul"):
        Kernels(("norm",))
    assert repr(Kernels()) == "Kernels()"
    assert repr(Kernels(("add_rms_norm",), interpret=True)) == "Kernels(only=('add_rms_norm',), interpret=True)"
