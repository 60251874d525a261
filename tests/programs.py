"""Random programs and random schedules, for the property tests.

A program is data: a list of instructions over numbered values, drawn together with what is known of every value: its
shape (``None`` is the batch), its dtype, whether every way of computing it gives the same bits, a bound of its
magnitude and one of its rounding error. Inputs and weights are small whole numbers, whatever their dtype, so that sums
and products come out the same in any order, and a row that lands in the wrong place shows as a whole number.

What is not exact has an error bound that is carried along operation by operation: what its inputs are off by, times
how much the operation can stretch that, plus the rounding of the operation itself. Two ways of computing it then differ
by at most twice the bound. Operations that would take it above `MAX_ERROR` are not drawn: values are apart by about
one, so an error that hides below it would have to be none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

import dynaflow_jax as df
from dynaflow_jax.errors import ScheduleError
from dynaflow_jax.schedule import external_outputs

MAX_ERROR = 0.06
FLOATS = ("float32", "bfloat16", "float16")
# Whole numbers up to here, and sums of them, are exact.
EXACT_UP_TO = {"float32": 2.0**22, "bfloat16": 2.0**7, "float16": 2.0**10}
EPS = {dtype: float(jnp.finfo(dtype).eps) for dtype in FLOATS}
NAMES = ("attention", "ffn", "a/b", "µ", "x{y}#3", "df:q{}#1", "50% %2F", "scan", "transpose(jvp(f))", "two words", "0")
TAGS = ((), ("compute",), ("network", "a,b"), "x}#")


@dataclasses.dataclass(frozen=True)
class Meta:
    """What is known of a value.

    Attributes:
      shape: its shape; ``None`` stands for the rows of the batch.
      dtype: its dtype.
      exact: whether every order of computation gives the same bits.
      mag: a bound of its magnitude.
      err: a bound of its rounding error.
      total: how an output that is summed over the batch is to be joined.
    """

    shape: tuple[int | None, ...]
    dtype: str
    exact: bool = True
    mag: float = 3.0
    err: float = 0.0
    total: str | None = None

    @property
    def axis(self) -> int | None:
        return self.shape.index(None) if None in self.shape else None

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def others(self) -> list[int]:
        """The axes that are not the batch's."""
        return [i for i, size in enumerate(self.shape) if size is not None]

    def but(self, **changes: Any) -> Meta:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument: of which shape, and of numbers below what."""

    meta: Meta
    high: int = 3

    def value(self, rows: int, seed: int) -> np.ndarray:
        shape = tuple(rows if size is None else size for size in self.meta.shape)
        rng = np.random.default_rng([seed, rows, *map(ord, self.meta.dtype)])
        if self.meta.dtype == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        low = 0 if self.high > 3 else -self.high
        return rng.integers(low, self.high + 1, shape).astype(jnp.dtype(self.meta.dtype))


@dataclasses.dataclass(frozen=True)
class Instr:
    """One instruction: an operation, the numbers of the values it reads, and its parameters.

    A block (``jit``, ``mark``, ...) holds instructions, whose values become values of the program; a loop or branch
    holds bodies with values of their own.
    """

    op: str
    args: tuple[int, ...] = ()
    params: tuple[Any, ...] = ()
    bodies: tuple[tuple[Instr, ...], ...] = ()

    def show(self, number: int, indent: str = "") -> str:
        args = ", ".join([f"v{i}" for i in self.args] + list(map(repr, self.params)))
        text = f"{indent}v{number} = {self.op}({args})"
        for body in self.bodies:
            text += "".join(f"\n{instr.show(j, indent + '    ')}" for j, instr in enumerate(body))
        return text


# -- operations -----------------------------------------------------------------------------------------------------


def _elementwise(name: str, x: Any) -> Any:
    if x.dtype == jnp.bool_:
        return ~x
    whole = jnp.issubdtype(x.dtype, jnp.integer)
    return {
        "neg": lambda: -x,
        "abs": lambda: jnp.abs(x),
        "relu": lambda: jnp.maximum(x, 0) if whole else jax.nn.relu(x),
        "shift": lambda: x + 1,
        "double": lambda: x * 2,
        "square": lambda: x * x,
        "sign": lambda: jnp.sign(x),
        "tanh": lambda: jnp.tanh(x),
        "sin": lambda: jnp.sin(x),
        "silu": lambda: jax.nn.silu(x),
        "sigmoid": lambda: jax.nn.sigmoid(x),
        "mod": lambda: x % 5,
        "div": lambda: x // 2,
        "and": lambda: x & 6,
        "mix": lambda: x * 1664525 + 1013904223,
    }[name]()


EXACT_ONES = {"neg": 1, "abs": 1, "relu": 1, "shift": 1, "double": 2}
JUMPY_ONES = ("sign",)  # good only on exact values
SMOOTH_ONES = {"tanh": 1.0, "sin": 1.0, "silu": 1.1, "sigmoid": 0.25}
WHOLE_ONES = ("neg", "abs", "relu", "shift", "square", "mod", "div", "and", "mix")


def _pair(name: str, x: Any, y: Any) -> Any:
    if x.dtype == jnp.bool_ and name in ("add", "sub", "mul"):
        return {"add": x | y, "sub": x ^ y, "mul": x & y}[name]
    return {
        "add": lambda: x + y,
        "sub": lambda: x - y,
        "mul": lambda: x * y,
        "max": lambda: jnp.maximum(x, y),
        "less": lambda: x < y,
        "equal": lambda: x == y,
    }[name]()


def _norm(x: Any, axis: int) -> Any:
    centered = x - jnp.mean(x, axis, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.mean(centered * centered, axis, keepdims=True) + 1)


def _along(x: Any, name: str, axis: int) -> Any:
    """Operations along an axis that is not the batch's."""
    if name in ("sum", "max", "any", "argmax"):
        found = getattr(jnp, name)(x, axis)
        return found.astype(x.dtype) if name == "sum" else found
    return {
        "mean": lambda: jnp.mean(x, axis),
        "cumsum": lambda: jnp.cumsum(x, axis, dtype=x.dtype),
        "sort": lambda: jnp.sort(x, axis),
        "flip": lambda: jnp.flip(x, axis),
        "softmax": lambda: jax.nn.softmax(x, axis),
        "norm": lambda: _norm(x, axis),
    }[name]()


def run_instr(instr: Instr, env: list[Any]) -> list[Any]:
    """The values that an instruction gives, most of them one."""
    xs, params = [env[i] for i in instr.args], instr.params
    match instr.op:
        case "one":
            return [_elementwise(params[0], xs[0])]
        case "clip":
            return [jnp.clip(xs[0], -3, 3)]
        case "two":
            return [_pair(params[0], xs[0], xs[1])]
        case "where":
            return [jnp.where(xs[0], xs[1], xs[2])]
        case "cast":
            return [xs[0].astype(params[0])]
        case "along":
            return [_along(xs[0], *params)]
        case "gemm":
            return [jnp.tensordot(xs[0], xs[1], ((params[0],), (0,)))]
        case "bmm":  # per row: contracts the last axes of two values whose batch is in front
            return [jnp.einsum("bi,bi->b" if xs[0].ndim == 2 else "bij,bkj->bik", xs[0], xs[1])]
        case "flat_gemm":  # the tokens of all rows as one axis, with operators that begin and end there
            return _flat_gemm(xs[0], xs[1], params[0])
        case "transpose":
            return [jnp.transpose(xs[0], params[0])]
        case "expand":
            return [jnp.expand_dims(xs[0], params[0])]
        case "concat":
            return [jnp.concatenate(xs, params[0])]
        case "slice":
            return [jax.lax.slice_in_dim(xs[0], params[1], params[2], axis=params[0])]
        case "pad":
            widths = [(0, 0)] * xs[0].ndim
            widths[params[0]] = (1, 0)
            return [jnp.pad(xs[0], widths)]
        case "take":
            return [jnp.take(xs[0], xs[1] % xs[0].shape[0], axis=0)]
        case "pick":  # the element that each row asks for
            return [xs[0][jnp.arange(xs[0].shape[0]), xs[1] % xs[0].shape[1]]]
        case "one_hot":
            return [jax.nn.one_hot(xs[0] % 3, 3, dtype=params[0])]
        case "position":
            return [jnp.broadcast_to(jnp.arange(xs[0].shape[params[0]]), xs[0].shape[: params[0] + 1])]
        case "vmap":
            return [jax.vmap(functools.partial(_elementwise, params[0]), params[1], params[1])(xs[0])]
        case "total":
            how, axes, factor = params
            return [(jnp.mean if how == "mean" else jnp.sum)(xs[0], axes, dtype=_total_dtype(xs[0], how)) * factor]
        case "block":
            return _block(instr, env)
        case "scan":
            return _scan(instr, xs)
        case "while":
            return [_while(instr, xs)]
        case "cond":
            flag, *operands = xs
            branches = [functools.partial(_branch, body) for body in instr.bodies]
            if params[0] == "switch":
                return [jax.lax.switch(flag.astype(int) + 0, branches, *operands)]
            return [jax.lax.cond(flag, *branches, *operands)]
    raise AssertionError(instr)


def _total_dtype(x: Any, how: str) -> Any:
    return None if how == "mean" or x.dtype == jnp.bool_ else x.dtype


def _flat_gemm(x: Any, w: Any, name: str) -> list[Any]:
    flat = x.reshape(-1, x.shape[-1])
    with df.mark(name):
        y = flat @ w
    with df.mark(name):
        y = y - 1
    return [y.reshape(*x.shape[:-1], w.shape[-1])]


def run_all(body: tuple[Instr, ...], env: list[Any]) -> list[Any]:
    """The values that were there, and those that the instructions give."""
    env = list(env)
    for instr in body:
        env += run_instr(instr, env)
    return env


def _branch(body: tuple[Instr, ...], *operands: Any) -> Any:
    return run_all(body, list(operands))[-1]


def _block(instr: Instr, env: list[Any]) -> list[Any]:
    kind, name, tags = instr.params
    (body,) = instr.bodies
    env, start = list(env), len(env)  # functions that close over it are traced again later
    if kind == "mark":
        with df.mark(name, tags=tags):
            return run_all(body, env)[start:]
    if kind == "scope":
        with jax.named_scope("scope"):
            return run_all(body, env)[start:]
    reads = sorted({i for i in _reads(body) if i < start})

    def called(*values):
        inner = list(env)
        for i, value in zip(reads, values, strict=True):
            inner[i] = value
        return run_all(body, inner)[start:]

    def closing(*_):
        return run_all(body, env)[start:]

    called.__name__ = closing.__name__ = "called"
    values = [env[i] for i in reads]
    if kind == "jit":
        return jax.jit(called)(*values)
    if kind == "jit_closed":  # what it reads is closed over
        return jax.jit(closing)()
    if kind == "jit_twice":  # the function that JAX traced for one call serves another
        jitted = jax.jit(called)
        jitted(*values)
        return jitted(*values)
    if kind == "remat":
        return jax.checkpoint(called)(*values)
    if kind == "decorated":
        return df.mark(name, tags=tags)(called)(*values)
    assert kind == "custom_vjp"
    wrapped = jax.custom_vjp(called)

    def forward(*values):
        return jax.vjp(called, *values)

    wrapped.defvjp(forward, lambda pullback, cotangents: pullback(cotangents))
    return wrapped(*values)


def _reads(body: tuple[Instr, ...]) -> set[int]:
    found: set[int] = set()
    for instr in body:
        found.update(instr.args)
        if instr.op == "block":
            found |= _reads(instr.bodies[0])
    return found


def _scan(instr: Instr, xs: list[Any]) -> list[Any]:
    """A loop: carries its first value, and slices the others or reads them whole."""
    length, reverse, unroll, sliced, gives_rows = instr.params
    (body,) = instr.bodies
    carry, rest = xs[0], xs[1:]

    def iteration(carry, slices):
        slices = iter(slices)
        local = [carry, *(next(slices) if axis is not None else x for axis, x in zip(sliced, rest, strict=True))]
        out = run_all(body, local)[-1]
        return jnp.clip(out, -3, 3).astype(carry.dtype), (out if gives_rows else None)

    stacked = [jnp.moveaxis(x, axis, 0) for axis, x in zip(sliced, rest, strict=True) if axis is not None]
    carry, ys = jax.lax.scan(iteration, carry, stacked, length=length, reverse=reverse, unroll=unroll)
    return [carry, ys] if gives_rows else [carry]


def _while(instr: Instr, xs: list[Any]) -> Any:
    """A loop whose number of iterations is known only when it runs."""
    (body,) = instr.bodies
    times, carry, *rest = xs

    def iteration(_, carry):
        return jnp.clip(run_all(body, [carry, *rest])[-1], -3, 3).astype(carry.dtype)

    return jax.lax.fori_loop(0, jnp.abs(times), iteration, carry)


# -- what is known of the values ------------------------------------------------------------------------------------


class NotDrawn(Exception):
    """An instruction that this program must not have."""


def checked(meta: Meta) -> Meta:
    if meta.is_float and meta.exact and meta.mag > EXACT_UP_TO[meta.dtype]:
        raise NotDrawn("too large to be exact")
    if meta.err > MAX_ERROR or (not meta.exact and meta.mag > 64):
        raise NotDrawn("not accurate enough")
    if meta.shape and math.prod(size or 4 for size in meta.shape) > 300:
        raise NotDrawn("too large")
    return meta


def inexact(meta: Meta, mag: float, stretch: float, roundings: float) -> Meta:
    """Of an operation that stretches its input's error and rounds so many times, at that magnitude."""
    err = stretch * meta.err + roundings * EPS[meta.dtype] * max(mag, meta.mag, 1)
    return checked(meta.but(exact=False, mag=mag, err=err))


def rounded(meta: Meta, roundings: float = 1) -> Meta:
    """Of an exact operation, if what it reads was exact."""
    if meta.exact or not meta.is_float:
        return checked(meta)
    return checked(meta.but(err=meta.err + roundings * EPS[meta.dtype] * max(meta.mag, 1)))


def infer_one(name: str, x: Meta) -> Meta:
    if not x.is_float:
        return x.but(mag={"mod": 4.0, "neg": x.mag, "abs": x.mag}.get(name, math.inf))
    if name == "square":
        return rounded(x.but(mag=x.mag**2, err=2 * x.mag * x.err + x.err**2))
    if name in EXACT_ONES:
        times = EXACT_ONES[name]
        return rounded(x.but(mag=times * x.mag + 1, err=times * x.err))
    if name in JUMPY_ONES:
        if not x.exact:
            raise NotDrawn
        return x.but(mag=1)
    return inexact(x, 1.1 * x.mag if name == "silu" else 1, SMOOTH_ONES[name], 8)


def infer_two(name: str, x: Meta, y: Meta) -> Meta:
    if name in ("less", "equal"):
        if not (x.exact and y.exact):
            raise NotDrawn
        return x.but(dtype="bool", mag=1)
    if not x.is_float:
        return x.but(mag=math.inf)
    exact = x.exact and y.exact
    if name == "mul":
        mag, err = x.mag * y.mag, x.mag * y.err + y.mag * x.err + x.err * y.err
    elif name == "max":
        mag, err = max(x.mag, y.mag), max(x.err, y.err)
    else:
        mag, err = x.mag + y.mag, x.err + y.err
    return rounded(x.but(mag=mag, err=err, exact=exact))


def infer_along(name: str, axis: int, x: Meta) -> Meta:
    size = x.shape[axis] or 1
    less = tuple(s for i, s in enumerate(x.shape) if i != axis)
    if name == "any":
        if not x.exact:
            raise NotDrawn
        return Meta(less, "bool")
    if name == "argmax":
        if not x.exact:
            raise NotDrawn
        return Meta(less, "int32")
    if name == "max":
        return x.but(shape=less)
    if name in ("flip", "sort"):  # the i-th smallest of numbers that are off by little is off by little
        return x
    if name == "sum":
        return rounded(x.but(shape=less, mag=size * x.mag, err=size * x.err), size)
    if name == "cumsum":
        return rounded(x.but(mag=size * x.mag, err=size * x.err), size)
    if not x.is_float:
        raise NotDrawn
    if name == "mean":
        return inexact(x.but(shape=less), x.mag, 1, size + 2)
    if name == "softmax":
        return inexact(x, 1, 1, 10 + size)
    return inexact(x, math.sqrt(size), 2 + math.sqrt(size), 4 * size + x.mag * size)


def infer_contraction(x: Meta, y: Meta, shape: tuple[int | None, ...], size: int) -> Meta:
    if not x.is_float:
        return x.but(shape=shape, mag=math.inf)
    exact = x.exact and y.exact
    err = size * (x.mag * y.err + y.mag * x.err + x.err * y.err)
    return rounded(x.but(shape=shape, mag=size * x.mag * y.mag, err=err, exact=exact), size)


def infer(instr: Instr, env: list[Meta]) -> list[Meta]:
    """What is known of what an instruction gives."""
    xs, params = [env[i] for i in instr.args], instr.params
    x = xs[0] if xs else None
    match instr.op:
        case "one":
            return [infer_one(params[0], x)]
        case "clip":
            return [x.but(mag=min(3.0, x.mag))]
        case "two":
            return [infer_two(params[0], x, xs[1])]
        case "where":
            exact = xs[1].exact and xs[2].exact
            return [xs[1].but(mag=max(xs[1].mag, xs[2].mag), err=max(xs[1].err, xs[2].err), exact=exact)]
        case "cast":
            return [_infer_cast(x, params[0])]
        case "along":
            return [infer_along(params[0], params[1], x)]
        case "gemm":
            kept = tuple(s for i, s in enumerate(x.shape) if i != params[0])
            return [infer_contraction(x, xs[1], kept + xs[1].shape[1:], x.shape[params[0]] or 1)]
        case "bmm":
            shape = x.shape[:1] if len(x.shape) == 2 else (*x.shape[:2], xs[1].shape[1])
            return [infer_contraction(x, xs[1], shape, x.shape[-1] or 1)]
        case "flat_gemm":
            found = infer_contraction(x, xs[1], x.shape[:-1] + xs[1].shape[1:], x.shape[-1] or 1)
            return [checked(found.but(mag=found.mag + 1))]
        case "transpose":
            return [x.but(shape=tuple(x.shape[i] for i in params[0]))]
        case "expand":
            return [x.but(shape=(*x.shape[: params[0]], 1, *x.shape[params[0] :]))]
        case "concat":
            shape = list(x.shape)
            shape[params[0]] = sum(y.shape[params[0]] or 0 for y in xs)
            err, exact = max(y.err for y in xs), all(y.exact for y in xs)
            return [checked(x.but(shape=tuple(shape), mag=max(y.mag for y in xs), err=err, exact=exact))]
        case "slice":
            return [x.but(shape=(*x.shape[: params[0]], params[2] - params[1], *x.shape[params[0] + 1 :]))]
        case "pad":
            axis = params[0]
            return [checked(x.but(shape=(*x.shape[:axis], (x.shape[axis] or 0) + 1, *x.shape[axis + 1 :])))]
        case "take":
            return [checked(x.but(shape=xs[1].shape + x.shape[1:]))]
        case "pick":
            return [x.but(shape=(None, *x.shape[2:]))]
        case "one_hot":
            return [checked(Meta((*x.shape, 3), params[0], mag=1))]
        case "position":
            return [Meta(x.shape[: params[0] + 1], "int32")]
        case "vmap":
            return [infer_one(params[0], x)]
        case "total":
            return [_infer_total(x, *params)]
        case "block":
            inner = list(env)
            for one in instr.bodies[0]:
                inner += infer(one, inner)
            return inner[len(env) :]
        case "scan":
            return _infer_scan(instr, xs)
        case "while":
            return [_infer_loop(instr.bodies[0], xs[1], xs[2:], 3)[0]]
        case "cond":
            outs = [_infer_body(body, xs[1:]) for body in instr.bodies]
            if any((out.shape, out.dtype) != (outs[0].shape, outs[0].dtype) for out in outs):
                raise NotDrawn
            exact = all(out.exact for out in outs)
            return [outs[0].but(mag=max(o.mag for o in outs), err=max(o.err for o in outs), exact=exact)]
    raise AssertionError(instr)


def _infer_cast(x: Meta, dtype: str) -> Meta:
    if dtype == "bool":
        if not x.exact:
            raise NotDrawn
        return x.but(dtype=dtype, mag=1)
    if dtype not in FLOATS:
        if not x.exact:
            raise NotDrawn
        return x.but(dtype=dtype)
    if x.dtype == "int32" and x.mag > 64:
        raise NotDrawn
    if x.exact:
        return checked(x.but(dtype=dtype, mag=max(x.mag, 1)))
    return checked(x.but(dtype=dtype, err=x.err + EPS[dtype] * max(x.mag, 1)))


ROWS_AT_MOST = 8


def _infer_total(x: Meta, how: str, axes: tuple[int, ...] | None, factor: int) -> Meta:
    shape = () if axes is None else tuple(s for i, s in enumerate(x.shape) if i not in axes)
    over = range(len(x.shape)) if axes is None else axes
    count = math.prod(ROWS_AT_MOST if x.shape[i] is None else x.shape[i] or 1 for i in over)
    if how == "sum":
        if x.dtype == "bool":
            x = x.but(dtype="int32")
        return rounded(x.but(shape=shape, mag=factor * count * x.mag, err=factor * count * x.err, total=how), count)
    if not x.is_float:
        if x.mag > 64:
            raise NotDrawn
        x = x.but(dtype="float32")
    return inexact(x.but(shape=shape, total=how), factor * x.mag, factor, factor * (count + 8))


def _infer_body(body: tuple[Instr, ...], operands: list[Meta]) -> Meta:
    env = list(operands)
    for instr in body:
        env += infer(instr, env)
    return env[-1]


def _infer_loop(body: tuple[Instr, ...], carry: Meta, rest: list[Meta], times: int) -> tuple[Meta, Meta]:
    """The last carry, and what any iteration gives."""
    carry = carry.but(mag=max(carry.mag, 3.0))
    given = None
    for _ in range(times):
        out = _infer_body(body, [carry, *rest])
        if out.shape != carry.shape or (out.dtype != carry.dtype):
            raise NotDrawn
        given = out if given is None else out.but(mag=max(out.mag, given.mag), exact=out.exact and given.exact)
        exact = carry.exact and out.exact
        carry = checked(out.but(mag=max(carry.mag, 3.0), err=max(out.err, carry.err), exact=exact))
    # Operations that jump were drawn, and must be checked, for what the carry is in the end.
    _infer_body(body, [carry, *rest])
    return carry, given


def _infer_scan(instr: Instr, xs: list[Meta]) -> list[Meta]:
    length, _, _, sliced, gives_rows = instr.params
    rest = []
    for axis, x in zip(sliced, xs[1:], strict=True):
        rest.append(x if axis is None else x.but(shape=tuple(s for i, s in enumerate(x.shape) if i != axis)))
    carry, given = _infer_loop(instr.bodies[0], xs[0], rest, length)
    return [carry, given.but(shape=(length, *given.shape))] if gives_rows else [carry]


# -- drawing programs -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: its batched inputs, its weights, its instructions and its outputs.

    Values are numbered: batched inputs, then weights, then what instructions give.
    """

    inputs: tuple[Input, ...]
    weights: tuple[Input, ...]
    body: tuple[Instr, ...]
    outputs: tuple[int, ...]
    metas: tuple[Meta, ...] = dataclasses.field(repr=False)

    def __call__(self, weights: Any, inputs: Any) -> dict[str, Any]:
        env = run_all(self.body, [*inputs, *weights])
        return {f"v{i}": env[i] for i in self.outputs}

    @property
    def batch_axes(self) -> Any:
        return None, [each.meta.axis for each in self.inputs]

    @property
    def out_axes(self) -> Any:
        return {f"v{i}": self.metas[i].total for i in self.outputs}

    def arguments(self, rows: int, seed: int = 0) -> tuple[list[Any], list[Any]]:
        values = [each.value(rows, seed + i) for i, each in enumerate((*self.inputs, *self.weights))]
        return values[len(self.inputs) :], values[: len(self.inputs)]

    def __repr__(self) -> str:
        lines = []
        for i, each in enumerate((*self.inputs, *self.weights)):
            what = "rows" if i < len(self.inputs) else "weight"
            lines.append(f"v{i}: {what} {each.meta.dtype}{list(each.meta.shape)} up to {each.high}")
        number = len(lines)
        for instr in self.body:
            lines.append(instr.show(number))
            number += len(infer(instr, list(self.metas[:number])))
        return "\n" + "\n".join(lines) + f"\nreturn {', '.join(f'v{i}' for i in self.outputs)}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # how hypothesis prints it
        printer.text(repr(self))


class Drawing:
    """Draws the instructions of a program."""

    def __init__(self, draw: Any, smooth: bool, differentiable: bool):
        self.draw = draw
        self.smooth = smooth
        self.differentiable = differentiable

    def choose(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def body(self, env: list[Meta], count: int, depth: int, *, closed: bool) -> tuple[tuple[Instr, ...], list[Meta]]:
        """Instructions over values; a closed body can read no more weights than it is given."""
        env, found = list(env), []
        for _ in range(count):
            try:
                instr = self.instr(env, depth, closed)
                outs = infer(instr, env)
            except (NotDrawn, IndexError):
                continue
            found.append(instr)
            env += outs
            if any(out.is_float and out.mag > 6 for out in outs[-1:]) and outs[-1].total is None:
                found.append(Instr("clip", (len(env) - 1,)))
                env += infer(found[-1], env)
        return tuple(found), env

    def pick(self, env: list[Meta], good: Any) -> int:
        options = [i for i, meta in enumerate(env) if meta.total is None and good(meta)]
        if not options:
            raise NotDrawn
        # Late values more often: programs should be deep.
        return options[
            -1 - min(self.draw(st.integers(0, len(options) - 1)), self.draw(st.integers(0, len(options) - 1)))
        ]

    def instr(self, env: list[Meta], depth: int, closed: bool) -> Instr:
        kinds = ["one", "one", "two", "two", "gemm", "bmm", "where", "cast", "vmap"]
        kinds += ["along"] * 4 + ["shape"] * 3
        if not closed:
            kinds += ["gemm", "gemm", "flat_gemm", "take"]
        if not self.differentiable:
            kinds += ["pick", "one_hot", "position"]
        if depth:
            kinds += ["mark"] * 8 + ["block"] * 2 + ["scan"] * 3 + ["cond", "while"]
        return getattr(self, f"_{self.choose(kinds)}")(env, depth)

    def _one_name(self, x: Meta) -> str:
        if x.dtype == "bool":
            return "neg"
        if not x.is_float:
            return self.choose(WHOLE_ONES)
        names = [*EXACT_ONES, "square", *(() if self.differentiable else JUMPY_ONES)]
        return self.choose([*names, *SMOOTH_ONES] if self.smooth else names)

    def _one(self, env, depth):
        i = self.pick(env, lambda meta: True)
        return Instr("one", (i,), (self._one_name(env[i]),))

    def _vmap(self, env, depth):
        i = self.pick(env, lambda meta: meta.shape)
        return Instr("vmap", (i,), (self._one_name(env[i]), self.draw(st.integers(0, len(env[i].shape) - 1))))

    def _two(self, env, depth):
        i = self.pick(env, lambda meta: True)
        x = env[i]
        j = self.pick(env, lambda meta: meta.dtype == x.dtype and _fits(meta.shape, x.shape))
        names = ["add", "sub", "mul", "max"] + ([] if self.differentiable else ["less", "equal"])
        return Instr("two", (i, j), (self.choose(names),))

    def _where(self, env, depth):
        i = self.pick(env, lambda meta: meta.axis is not None)
        j = self.pick(env, lambda meta: meta.dtype == env[i].dtype and meta.shape == env[i].shape)
        c = self.pick(env, lambda meta: meta.dtype == "bool" and _fits(meta.shape, env[i].shape))
        return Instr("where", (c, i, j))

    def _cast(self, env, depth):
        i = self.pick(env, lambda meta: True)
        x = env[i]
        if self.differentiable:  # gradients are exact in float32 only
            raise NotDrawn
        return Instr("cast", (i,), (self.choose(t for t in (*FLOATS, "int32", "bool") if t != x.dtype),))

    def _along(self, env, depth):
        i = self.pick(env, lambda meta: meta.others)
        x = env[i]
        if x.dtype == "bool":
            names = ["any", "flip"]
        elif not x.is_float:
            names = ["sum", "max", "cumsum", "sort", "flip"] + ([] if self.differentiable else ["argmax"])
        else:
            names = ["sum", "cumsum", "flip"]
            names += [] if self.differentiable else ["sort", "argmax", "max"]
            names += ["mean", "softmax", "norm"] * 2 if self.smooth else []
        return Instr("along", (i,), (self.choose(names), self.choose(x.others)))

    def _gemm(self, env, depth):
        i = self.pick(env, lambda meta: meta.others and meta.dtype != "bool")
        axis = self.choose(env[i].others)
        fit = [
            j
            for j, w in enumerate(env)
            if w.axis is None and len(w.shape) == 2 and w.shape[0] == env[i].shape[axis] and w.dtype == env[i].dtype
        ]
        if not fit:
            raise NotDrawn
        return Instr("gemm", (i, self.choose(fit)), (axis,))

    def _flat_gemm(self, env, depth):
        i = self.pick(env, lambda meta: len(meta.shape) >= 3 and meta.shape[-1] is not None and meta.is_float)
        fit = [
            j
            for j, w in enumerate(env)
            if w.axis is None and len(w.shape) == 2 and w.shape[0] == env[i].shape[-1] and w.dtype == env[i].dtype
        ]
        if not fit:
            raise NotDrawn
        return Instr("flat_gemm", (i, self.choose(fit)), (self.choose(NAMES),))

    def _bmm(self, env, depth):
        good = lambda meta: meta.axis == 0 and len(meta.shape) in (2, 3) and meta.dtype != "bool"  # noqa: E731
        i = self.pick(env, good)
        x = env[i]
        j = self.pick(
            env,
            lambda y: good(y) and len(y.shape) == len(x.shape) and y.shape[-1] == x.shape[-1] and y.dtype == x.dtype,
        )
        return Instr("bmm", (i, j))

    def _take(self, env, depth):
        i = self.pick(env, lambda meta: meta.axis is None and meta.shape)
        j = self.pick(env, lambda meta: meta.dtype == "int32" and len(meta.shape) <= 2)
        return Instr("take", (i, j))

    def _pick(self, env, depth):
        i = self.pick(env, lambda meta: meta.axis == 0 and len(meta.shape) >= 2)
        j = self.pick(env, lambda meta: meta.shape == (None,) and meta.dtype == "int32")
        return Instr("pick", (i, j))

    def _one_hot(self, env, depth):
        i = self.pick(env, lambda meta: meta.dtype == "int32" and len(meta.shape) <= 2)
        return Instr("one_hot", (i,), (self.choose(FLOATS),))

    def _position(self, env, depth):
        i = self.pick(env, lambda meta: meta.others and (meta.axis or 0) < meta.others[-1])
        return Instr("position", (i,), (env[i].others[-1],))

    def _shape(self, env, depth):
        i = self.pick(env, lambda meta: meta.shape)
        x = env[i]
        which = self.choose(["transpose", "expand", "concat", "slice", "pad"])
        if which == "transpose":
            return Instr("transpose", (i,), (tuple(self.draw(st.permutations(range(len(x.shape))))),))
        if which == "expand":
            if len(x.shape) > 3:
                raise NotDrawn
            return Instr("expand", (i,), (self.draw(st.integers(0, len(x.shape))),))
        axis = self.choose(x.others) if x.others else None
        if axis is None:
            raise NotDrawn
        if which == "slice":
            size = x.shape[axis] or 1
            start = self.draw(st.integers(0, size - 1))
            return Instr("slice", (i,), (axis, start, self.draw(st.integers(start + 1, size))))
        if which == "pad" and x.dtype != "bool":
            return Instr("pad", (i,), (axis,))

        def alike(y: Meta) -> bool:
            rest = [s for k, s in enumerate(y.shape) if k != axis]
            own = [s for k, s in enumerate(x.shape) if k != axis]
            return y.dtype == x.dtype and len(y.shape) == len(x.shape) and rest == own and y.shape[axis] is not None

        return Instr("concat", (i, self.pick(env, alike)), (axis,))

    def _mark(self, env, depth):
        body, _ = self.body(env, self.draw(st.integers(1, 3)), depth - 1, closed=False)
        if not body:
            raise NotDrawn
        kind = self.choose(["mark", "mark", "mark", "decorated"])
        return Instr("block", (), (kind, self.choose(NAMES), self.choose(TAGS)), (body,))

    def _block(self, env, depth):
        kinds = ["jit", "jit", "jit_closed", "jit_twice", "remat", "scope"]
        body, _ = self.body(env, self.draw(st.integers(1, 3)), depth - 1, closed=False)
        if not body:
            raise NotDrawn
        reads = {i for i in _reads(body) if i < len(env)}
        if all(env[i].is_float for i in reads) and all(m.is_float for m in _metas(body, env)[len(env) :]):
            kinds += ["custom_vjp"]
        return Instr("block", (), (self.choose(kinds), "called", ()), (body,))

    def loop_body(self, carry: Meta, rest: list[Meta], depth: int) -> tuple[Instr, ...]:
        carry = carry.but(mag=max(carry.mag, 3.0))
        body, env = self.body([carry, *rest], self.draw(st.integers(1, 3)), depth - 1, closed=True)
        good = [i for i, m in enumerate(env) if i and m.shape == carry.shape and m.dtype == carry.dtype]
        last = self.choose([i for i in good if i > len(rest)] or good or [0])
        # The result must depend on the carry, and be the last value.
        end = Instr("two", (last, 0), (self.choose(["add", "sub", "max"]),))
        if self.draw(st.booleans()):
            end = Instr("block", (), ("mark", self.choose(NAMES), ()), ((end,),))
        return (*body, end)

    def _scan(self, env, depth):
        i = self.pick(env, lambda meta: meta.dtype != "bool" and meta.axis is not None)
        length = self.draw(st.integers(1, 3))
        rest, sliced, local = [], [], []
        for _ in range(self.draw(st.integers(0, 2))):
            j = self.pick(env, lambda meta: True)
            axes = [axis for axis in env[j].others if env[j].shape[axis] == length]
            axis = self.choose([*axes, None]) if axes else None
            rest.append(j)
            sliced.append(axis)
            local.append(env[j] if axis is None else env[j].but(shape=_without(env[j].shape, axis)))
        body = self.loop_body(env[i], local, depth)
        unroll = self.choose([1, 1, length])
        params = (length, self.draw(st.booleans()), unroll, tuple(sliced), self.draw(st.booleans()))
        return Instr("scan", (i, *rest), params, (body,))

    def _while(self, env, depth):
        if self.differentiable:
            raise NotDrawn
        times = self.pick(env, lambda meta: meta.shape == () and meta.dtype == "int32" and meta.mag <= 3)
        i = self.pick(env, lambda meta: meta.dtype != "bool" and meta.axis is not None)
        rest = [self.pick(env, lambda meta: True) for _ in range(self.draw(st.integers(0, 1)))]
        body = self.loop_body(env[i], [env[j] for j in rest], depth)
        return Instr("while", (times, i, *rest), (), (body,))

    def _cond(self, env, depth):
        flag = self.pick(env, lambda meta: meta.shape == () and meta.dtype == "bool" and meta.axis is None)
        operands = [self.pick(env, lambda meta: True) for _ in range(self.draw(st.integers(1, 2)))]
        local = [env[i] for i in operands]
        bodies = []
        for _ in range(2):
            body, inner = self.body(local, self.draw(st.integers(1, 2)), depth - 1, closed=True)
            same = [i for i, m in enumerate(inner) if (m.shape, m.dtype) == (local[0].shape, local[0].dtype)]
            last = self.choose(same)
            bodies.append((*body, Instr("one", (last,), ("neg",))))
        kind = self.choose(["cond", "switch"])
        return Instr("cond", (flag, *operands), (kind,), tuple(bodies))


def _metas(body: tuple[Instr, ...], env: list[Meta]) -> list[Meta]:
    env = list(env)
    for instr in body:
        env += infer(instr, env)
    return env


def _without(shape: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    return tuple(s for i, s in enumerate(shape) if i != axis)


def _fits(shape: tuple[Any, ...], into: tuple[Any, ...]) -> bool:
    """Whether a value of the one shape can be broadcast to the other."""
    if len(shape) > len(into):
        return False
    tail = into[len(into) - len(shape) :]
    return all(a == b or (a == 1 and b is not None) for a, b in zip(shape, tail, strict=True))


@st.composite
def programs(draw, *, differentiable: bool = False, outputs: str = "any", size: int = 6, depth: int = 2) -> Program:
    """Random programs.

    Args:
      draw: hypothesis's own.
      differentiable: only operations whose derivative is exact, and float inputs.
      outputs: ``"any"``, or ``"sum"`` or ``"mean"`` for a single number.
      size: instructions at most, at each level.
      depth: levels of blocks at most.
    """
    smooth = not differentiable and draw(st.booleans())
    drawing = Drawing(draw, smooth, differentiable)
    dtype = draw(
        st.sampled_from(["float32"] if differentiable else ["float32", "float32", "bfloat16", "float16", "int32"])
    )
    inputs = []
    for kind in draw(st.lists(st.sampled_from(["main", "main", "ids", "mask"]), min_size=0, max_size=2)):
        if kind == "main" or differentiable:
            inputs.append(_batched(draw, dtype, 3))
        elif kind == "ids":
            inputs.append(Input(Meta((None,), "int32", mag=4.0), 4))
        else:
            inputs.append(_batched(draw, "bool", 1))
    inputs.insert(0, _batched(draw, dtype, 3))
    weights = [
        Input(Meta((k, n), dtype, mag=2.0), 2) for k, n in draw(st.sampled_from([[(2, 2), (3, 3)], [(3, 2), (2, 3)]]))
    ]
    weights.append(Input(Meta((draw(st.integers(2, 3)),), dtype, mag=2.0), 2))
    weights.append(Input(Meta((2, 3, 3), dtype, mag=2.0), 2))
    if not differentiable:
        weights += [Input(Meta((), "bool"), 1), Input(Meta((), "int32"), 3)]
    env = [each.meta for each in (*inputs, *weights)]
    body, env = drawing.body(env, draw(st.integers(2, size)), depth, closed=False)
    start = len(inputs) + len(weights)
    if not any(meta.axis is not None for meta in env[start:]):
        body = (*body, Instr("one", (0,), ("neg",)))
        env = [*env, infer(body[-1], env)[0]]
    chosen = []
    rows = [i for i in range(len(env)) if env[i].axis is not None and i >= len(inputs)]
    if outputs == "any":
        made = list(range(start, len(env)))
        chosen = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
        if made[-1] not in chosen:
            chosen.append(made[-1])
        if draw(st.booleans()):
            chosen.append(draw(st.integers(0, start - 1)))  # as it came in
    count = 1 if outputs != "any" else draw(st.integers(0, 2))
    for _ in range(count):
        i = draw(st.sampled_from(rows[-4:]))
        if outputs != "any":
            floats = [j for j in rows if env[j].is_float]
            i = draw(st.sampled_from(floats[-3:] or [0]))
        others = draw(st.lists(st.sampled_from(env[i].others), unique=True)) if env[i].others else []
        axes = draw(st.sampled_from([None, tuple(sorted([env[i].axis, *others]))])) if outputs == "any" else None
        how = outputs if outputs != "any" else draw(st.sampled_from(["sum", "mean"]))
        instr = Instr("total", (i,), (how, axes, draw(st.integers(1, 2)) if outputs == "any" else 1))
        try:
            env += infer(instr, env)
        except NotDrawn:
            assume(outputs == "any")
            continue
        body = (*body, instr)
        chosen.append(len(env) - 1)
    return Program(tuple(inputs), tuple(weights), body, tuple(dict.fromkeys(chosen)), tuple(env))


def _batched(draw: Any, dtype: str, high: int) -> Input:
    shape: list[Any] = draw(st.lists(st.integers(2, 3), min_size=0 if dtype == "bool" else 1, max_size=2))
    shape.insert(draw(st.integers(0, len(shape))), None)
    return Input(Meta(tuple(shape), dtype, mag=float(high)), high)


RULES = (
    df.SplitFunc("dot_general"),
    df.SplitFunc("tanh", name="x y", tags={"compute"}),
    df.SplitFunc("scope"),
    df.SplitFunc("called"),
    df.SplitFunc("add", tags="memory"),
    df.SplitFunc("neg"),
    df.SplitFunc("relu"),
    (df.SplitFunc("dot_general"), df.SplitFunc("add")),
    (df.SplitFunc("neg"), df.SplitFunc("neg", name="last")),
)


def rules() -> st.SearchStrategy[list[Any]]:
    """Partition rules, most of which match something."""
    return st.one_of(st.just([]), st.lists(st.sampled_from(RULES), max_size=2, unique=True))


# -- random schedules -----------------------------------------------------------------------------------------------


class Replacement:
    """The own computation of operators, as a function that could replace them; it can be found by name."""

    registry: dict[str, Replacement] = {}

    def __init__(self, ctx: Any, ops: list[Any]):
        self.parts = [(op.micro_batch, op.operator.program, op.operator.jaxpr) for op in ops]
        found: dict[Any, None] = {}
        made: set[Any] = set()
        for m, program, _ in self.parts:
            found.update(((m, var), None) for var in program.invars if (m, var) not in made)
            made.update((m, var) for var in program.outvars)
        self.reads = list(found)
        self.gives = external_outputs(ctx._region, [op.ref for op in ops])
        self.__name__ = "replacement"
        self.__module__ = "programs"
        where = "/".join(ctx.path)
        self.__qualname__ = f"{where}/{'+'.join(str(op.ref) for op in ops)}".replace("<", "(")
        self.registry[f"{self.__module__}:{self.__qualname__}"] = self

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        env = dict(zip(self.reads, values, strict=True))
        for m, program, jaxpr in self.parts:
            outs = jax.extend.core.jaxpr_as_fun(jaxpr)(*(env[m, var] for var in program.invars))
            env.update(zip(((m, var) for var in program.outvars), outs, strict=True))
        return tuple(env[key] for key in self.gives)


class RandomSchedule(df.OpScheduler):
    """Any valid schedule: which one is written on a tape of numbers. A tape of zeros is program order.

    Args:
      sizes: rows of the micro-batches.
      tape: what to do; read round and round.
      replace: whether operators may be replaced.
    """

    def __init__(self, sizes: tuple[int, ...], tape: tuple[int, ...] = (0,), replace: bool = True):
        self.sizes = sizes
        self.tape = tape
        self.replace = replace

    def split(self, info: Any) -> tuple[int, ...]:
        assert sum(self.sizes) == info.batch_size
        return self.sizes

    def schedule(self, ctx: Any) -> None:
        position = 5 * len(ctx.path)

        def pick(count: int) -> int:
            nonlocal position
            position += 1
            return self.tape[position % len(self.tape)] % count

        while ready := ctx.get_ready_ops():
            first = ready[pick(len(ready))]
            ops = self._together(ctx, first, ready, pick)
            kwargs: dict[str, Any] = {"stream": ("compute", "network", "copy engine")[pick(3)]}
            if ctx.steps and pick(4) == 3:
                kwargs["after"] = ctx.steps[pick(len(ctx.steps))]
            if pick(5) == 4:
                kwargs |= {"priority": pick(3) - 1, "sm_budget": 1 + pick(8)}
            before = ctx.steps, [op.ref for op in ctx.get_ready_ops()]
            if self.replace and pick(4) == 3 and not any(op.runs_once for op in ops):
                ctx.execute(ops, fn=Replacement(ctx, ops), **kwargs)
                continue
            try:
                ctx.execute(ops if len(ops) > 1 or pick(2) else ops[0], **kwargs)
            except ScheduleError as error:
                # Some operators cannot be merged; the context must be as it was.
                if "cannot be merged" not in str(error):
                    raise
                assert before == (ctx.steps, [op.ref for op in ctx.get_ready_ops()])
                ctx.execute(first, **kwargs)

    def _together(self, ctx: Any, first: Any, ready: list[Any], pick: Any) -> list[Any]:
        """What to execute in one step, beginning with an operator."""
        what = pick(4)
        if first.runs_once or what == 0:
            return [first]
        same = [op for op in ready if op.key == first.key and op != first]
        if what in (1, 2) and same:  # merged, of some or all micro-batches, in any order
            others = same[: 1 + pick(len(same))]
            return [*others, first] if pick(2) else [first, *others]
        ops, taken = [first], {first.ref}
        for _ in range(1 + pick(3)):
            more = [op for op in self._ready_after(ctx, taken) if not op.runs_once]
            if not more:
                break
            ops.append(more[pick(len(more))])
            taken.add(ops[-1].ref)
        if len({op.key for op in ops}) == 1:  # that would be a merge
            return [first]
        return ops

    @staticmethod
    def _ready_after(ctx: Any, taken: set[Any]) -> list[Any]:
        """What could run next in the same step."""
        done = {ref for step in ctx.steps for ref in step.operators} | taken
        return [op for op in ctx.all_ops() if op.ref not in done and ctx._sources[op.ref] <= done]

    def __repr__(self) -> str:
        return f"RandomSchedule({self.sizes}, {self.tape})"


@st.composite
def schedules(draw, *, replace: bool = True) -> RandomSchedule:
    """Random schedules, of batches of up to `ROWS_AT_MOST` rows."""
    count = draw(st.sampled_from([2, 3, 2, 3, 1]))
    sizes = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count).filter(lambda s: sum(s) <= ROWS_AT_MOST))
    tape = draw(st.lists(st.integers(0, 11), min_size=1, max_size=24))
    return RandomSchedule(tuple(sizes), tuple(tape), replace)


# -- comparing ------------------------------------------------------------------------------------------------------


def check_same(program: Program, got: dict[str, Any], want: dict[str, Any]) -> None:
    """Outputs of a program, computed in two ways, are the same up to what rounding explains."""
    assert got.keys() == want.keys()
    for i in program.outputs:
        a, b, meta = np.asarray(got[f"v{i}"]), np.asarray(want[f"v{i}"]), program.metas[i]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"v{i}: {a.dtype}{a.shape} for {b.dtype}{b.shape}"
        assert a.dtype == jnp.dtype(meta.dtype), f"v{i} is {a.dtype}, {meta}"  # of the generator
        if meta.exact or not meta.is_float:
            np.testing.assert_array_equal(a, b, err_msg=f"v{i} should be exact")
        else:
            wide = [value.astype(np.float64) for value in (a, b)]
            np.testing.assert_allclose(*wide, rtol=0, atol=2 * meta.err + 1e-12, err_msg=f"v{i}, {meta}")
