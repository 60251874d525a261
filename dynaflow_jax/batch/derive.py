"""A micro-batch's program, derived from the whole batch's without tracing the function again.

Tracing is what JAX does slowest, and most of a program does not know how many rows there are. So `Derivation` finds
out which axes of which variables hold the rows of the batch, and writes the same equations for fewer rows. Axes that
an equation forces to be equally long (both operands of a sum, the two sides of a contraction, what a loop carries) are
one class, found by union-find (Tarjan, 1975) over the program and all programs inside it; the classes of the inputs'
batch axes are the batch. An axis that merely has the batch's size is in no such class, so a batch of 8 next to 8 heads
is no problem, and a mask that broadcasts along the batch gets the micro-batch's size because of what it is used with.

Where a reshape merges the batch with other axes, or takes such an axis apart, the position of the rows in it says
which axis is the batch's on the other side.

The derived program is a proposal like a traced one: `proof.analyse` compares it with the whole batch's, equation by
equation, before anything is split. What is not derived for certain is `Underivable`, and the function is traced.

Arrays that the function closes over may have the batch on an axis too; each micro-batch then gets its rows of them.
Numbers that it computes from the batch size in Python, such as the divisor of a mean, stay what they are for the whole
batch. So derived rows are exactly the function's own rows, and where the function sums over the batch,
the derived parts add up to the sum of the function: to its mean, if it divides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dynaflow_jax import compat
from dynaflow_jax.batch.state import INVARIANT, RowIndex, Rows, State
from dynaflow_jax.inline import Flat, Node
from dynaflow_jax.program import Program, from_jaxpr

Axes = tuple[int, ...]
"""For each axis of a variable, a number that stands for its length; `_Lengths` knows which of them are equal."""


class Underivable(Exception):
    """The micro-batch's program cannot be derived for certain; the message says why, in one clause."""


class _Lengths:
    """Classes of equally long axes.

    Attributes:
      parents: of each axis, another one of its class, or itself.
      fixed: axes that must not change with the batch, and the primitive that says so.
      merges: reshapes that merge axes or take them apart: axes and sizes before, and after.
    """

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.fixed: list[tuple[Axes, str]] = []
        self.merges: list[tuple[Axes, Sequence[int], Axes, Sequence[int]]] = []

    def new(self, count: int) -> Axes:
        """Axes of which nothing is known."""
        start = len(self.parents)
        self.parents.extend(range(start, start + count))
        return tuple(range(start, start + count))

    def find(self, axis: int) -> int:
        """The representative of an axis's class."""
        parents = self.parents
        while (parent := parents[axis]) != axis:
            parents[axis] = axis = parents[parent]
        return axis

    def unite(self, a: Axes, b: Axes) -> None:
        """Notes that axes are equally long, one by one."""
        if a is b:
            return
        for i, j in zip(a, b, strict=True):
            if i != j and (i := self.find(i)) != (j := self.find(j)):
                self.parents[max(i, j)] = min(i, j)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """How the rows lie along an axis: ``outer`` times all rows, each ``inner`` elements long."""

    outer: int
    inner: int


@dataclasses.dataclass(eq=False)
class _Body:
    """A program where it is called.

    Attributes:
      jaxpr: the jaxpr, for programs inside equations.
      program: its equations.
      axes: of each variable.
      inside: for equations with programs inside, by position: parameter, place in it if it is a sequence, program.
    """

    jaxpr: Any
    program: Program
    axes: dict[Any, Axes] = dataclasses.field(default_factory=dict)
    inside: dict[int, list[tuple[str, int | None, _Body]]] = dataclasses.field(default_factory=dict)


class Derivation:
    """Where the batch is in a program, and the same program for other numbers of rows.

    Attributes:
      constants: what the leading inputs, which the function closes over, are to a micro-batch: ``Rows`` where the batch
        is on an axis.
      counts: of the sums over the batch, how many elements of the whole batch each adds up.
      custom: whether rows of the batch go through calls with derivative rules of their own (``custom_jvp``). JAX keeps
        such a rule as a function for the shapes that were traced, so whoever differentiates needs a traced program.
        (Calls with ``custom_vjp`` are not derived: JAX cannot map over a program that hides one from its view.)
    """

    def __init__(self, flat: Flat, in_axes: Sequence[int | None], batch_size: int) -> None:
        """Finds the batch's axes.

        Args:
          flat: the whole batch's program.
          in_axes: the batch axis of each input, or ``None``; one entry per input, less the leading constants.
          batch_size: the number of rows of the whole batch.

        Raises:
          Underivable: if an axis of the batch is one that must not change.
        """
        self._flat, self._batch_size = flat, batch_size
        self._lengths = _Lengths()
        self._sums: list[tuple[Axes, int]] = []
        self._custom: list[Sequence[Axes]] = []
        program = flat.program
        count = len(program.invars) - len(in_axes)
        inputs, seeds = [self._lengths.new(len(_shape(var))) for var in program.invars[:count]], []
        for var, axis in zip(program.invars[count:], in_axes, strict=True):
            axes = self._lengths.new(len(_shape(var)))
            if axis is None:
                self._lengths.fixed.append((axes, "an input without a batch axis"))
            else:
                seeds.append((axes[axis], _Rows(1, _shape(var)[axis] // batch_size)))
            inputs.append(axes)
        self._body = self._walk(None, program, inputs)
        self._rows = self._solve(seeds)
        self._axis_of: dict[Axes, int | None] = {}
        self.constants = tuple(map(self._state, inputs[:count]))
        self.counts = frozenset(count for axes, count in self._sums if self._grows(axes))
        self.custom = any(self._grows(axes) for call in self._custom for axes in call)

    def proposals(self, values: Sequence[Any]) -> Iterator[tuple[State, ...]]:
        """What the constants may be to a micro-batch, one proposal after the other.

        Args:
          values: the constants.

        Yields:
          Their states. All that have the batch on an axis are ``Rows`` first; then those that count the batch's rows
          are ``RowIndex``, which is right where they pick rows of another value; and those that are nothing but zeros
          are known to be, as which of such positions are negative.
        """
        yield self.constants
        proposal = tuple(
            _of_positions(state, value) if isinstance(state, Rows) else state
            for value, state in zip(values, self.constants, strict=True)
        )
        if proposal != self.constants:
            yield proposal

    def at(self, size: int) -> Flat:
        """The program for a micro-batch of ``size`` rows; its nodes' twins are the whole batch's."""
        return _Writer(self, size).flat(self._body, self._flat)

    # -- finding the axes ---------------------------------------------------------------------------------------------

    def _walk(self, jaxpr: Any, program: Program, inputs: Sequence[Axes]) -> _Body:
        body = _Body(jaxpr, program)
        axes = body.axes
        axes.update(zip(program.invars, inputs, strict=True))
        for i, eqn in enumerate(program.eqns):
            given = [self._of(atom, axes) for atom in eqn.invars]
            self._inside: list[tuple[str, int | None, _Body]] = []
            rule = _RULES.get(eqn.primitive.name, _unknown)
            made = rule(self, eqn, given)
            if self._inside:
                body.inside[i] = self._inside
            axes.update(zip(eqn.outvars, made, strict=True))
        return body

    def _of(self, atom: Any, axes: dict[Any, Axes]) -> Axes:
        return self._lengths.new(len(_shape(atom))) if compat.is_literal(atom) else axes[atom]

    def enter(self, inputs: Sequence[Axes], jaxpr: Any, parameter: str, place: int | None = None) -> list[Axes]:
        """For rules: the axes of the outputs of a program inside the equation, from those of its inputs."""
        outside = self._inside
        program = from_jaxpr(jaxpr)
        count = len(program.invars) - len(inputs)
        constants = [self.fixed(len(_shape(var)), "a constant") for var in program.invars[:count]]
        body = self._walk(jaxpr, program, [*constants, *inputs])
        self._inside = [*outside, (parameter, place, body)]
        return [self._of(atom, body.axes) for atom in program.outvars]

    def new(self, count: int) -> Axes:
        """For rules: axes of any length."""
        return self._lengths.new(count)

    def fixed(self, count: int, what: str) -> Axes:
        """For rules: axes that do not change with the batch."""
        axes = self._lengths.new(count)
        self.fix(axes, what)
        return axes

    def fix(self, axes: Sequence[int], what: str) -> None:
        """For rules: these axes do not change with the batch."""
        if axes:
            self._lengths.fixed.append((tuple(axes), what))

    def unite(self, a: Axes, b: Axes) -> None:
        """For rules: these axes are equally long, one by one."""
        self._lengths.unite(a, b)

    def merge(self, old: Axes, old_sizes: Sequence[int], new: Axes, new_sizes: Sequence[int]) -> None:
        """For rules: elements along some axes, in order, are those along other axes."""
        self._lengths.merges.append((old, old_sizes, new, new_sizes))

    def sums(self, axes: Sequence[int], count: int) -> None:
        """For rules: a sum of so many elements."""
        self._sums.append((tuple(axes), count))

    def has_custom_derivative(self, axes: Sequence[Axes]) -> None:
        """For rules: a call with a derivative rule of its own, on these values."""
        self._custom.append(axes)

    def _solve(self, seeds: Sequence[tuple[int, _Rows]]) -> dict[int, _Rows]:
        """The classes that the batch is in, with how the rows lie in them."""
        find = self._lengths.find
        found = {find(axis): rows for axis, rows in seeds}
        pending: Sequence[Any] = []
        waiting = self._lengths.merges
        while len(pending) != len(waiting):
            pending, waiting = waiting, []
            for merge in pending:
                old, old_sizes, new, new_sizes = merge
                before = [i for i, axis in enumerate(old) if find(axis) in found]
                after = [i for i, axis in enumerate(new) if find(axis) in found]
                if before and not after:
                    index, rows = _across(found[find(old[before[0]])], before[0], old_sizes, new_sizes)
                    found[find(new[index])] = rows
                elif after and not before:
                    index, rows = _across(found[find(new[after[0]])], after[0], new_sizes, old_sizes)
                    found[find(old[index])] = rows
                elif not before:
                    waiting.append(merge)
        for axes, what in self._lengths.fixed:
            if any(find(axis) in found for axis in axes):
                raise Underivable(f"the batch meets {what}")
        return found

    def _state(self, axes: Axes) -> State:
        """What an input is to a micro-batch that gets its rows of it."""
        axis = self.axis_of(axes)
        if axis is None:
            return INVARIANT
        rows = self._rows[self._lengths.find(axes[axis])]
        return Rows(axis, outer=rows.outer, inner=rows.inner)

    def _grows(self, axes: Axes) -> bool:
        return self.axis_of(axes) is not None

    def axis_of(self, axes: Axes) -> int | None:
        """Which of a variable's axes the batch is on."""
        if axes not in self._axis_of:
            on = [i for i, axis in enumerate(axes) if self._lengths.find(axis) in self._rows]
            if len(on) > 1:
                raise Underivable("a value has the batch on two axes")
            self._axis_of[axes] = on[0] if on else None
        return self._axis_of[axes]


def _across(rows: _Rows, index: int, sizes: Sequence[int], others: Sequence[int]) -> tuple[int, _Rows]:
    """Which axis of a reshape's other side the rows are on, and how they lie there."""
    before = math.prod(sizes[:index]) * rows.outer
    after = math.prod(sizes[index + 1 :]) * rows.inner
    for i in range(len(others)):
        outer, no_outer = divmod(before, math.prod(others[:i]))
        inner, no_inner = divmod(after, math.prod(others[i + 1 :]))
        if not no_outer and not no_inner:
            return i, _Rows(outer, inner)
    raise Underivable("a reshape takes the axis of the batch apart")


def _of_positions(state: Rows, value: Any) -> State:
    """The state of a constant with rows, if it is about positions: 0, 1, 2, ..., or zero everywhere."""
    whole = jnp.issubdtype(value.dtype, jnp.integer)
    if compat.is_tracer(value) or not (whole or value.dtype == bool):
        return state
    if value.size and not np.any(value):
        return Rows(state.axis, uniform=True, zero=True)
    return RowIndex(0) if whole and value.ndim == 1 and np.array_equal(value, np.arange(len(value))) else state


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


class _Writer:
    """The equations for a number of rows. A jaxpr that is called alike in several places is written once."""

    def __init__(self, derivation: Derivation, size: int) -> None:
        self.axis_of = derivation.axis_of
        self.size, self.batch_size = size, derivation._batch_size
        self._types: dict[Any, Any] = {}
        self._jaxprs: dict[Any, Any] = {}

    def flat(self, body: _Body, flat: Flat) -> Flat:
        """A flat program."""
        env: dict[Any, Any] = {}
        invars = tuple(self.variable(var, body, env) for var in body.program.invars)
        nodes = []
        for i, node in enumerate(flat.nodes):
            inner = node.body
            if inner is not None:
                ((_, _, of_region),) = body.inside[i]
                inner = self.flat(of_region, inner)
            eqn = self.equation(i, node.eqn, body, env, inner)
            nodes.append(Node(eqn, node.place, inner, twin=node.eqn))
        outvars = tuple(env.get(var, var) if not compat.is_literal(var) else var for var in flat.program.outvars)
        program = Program(invars, outvars, tuple(node.eqn for node in nodes))
        return dataclasses.replace(flat, program=program, nodes=tuple(nodes))

    def jaxpr(self, body: _Body) -> Any:
        """A jaxpr inside an equation."""
        key = self._key(body)
        if key not in self._jaxprs:
            env: dict[Any, Any] = {}
            program = body.program
            invars = [self.variable(var, body, env) for var in program.invars]
            eqns = [self.equation(i, eqn, body, env) for i, eqn in enumerate(program.eqns)]
            outvars = [env.get(var, var) if not compat.is_literal(var) else var for var in program.outvars]
            constants = len(program.invars) - len(compat.open_jaxpr(body.jaxpr).invars)
            self._jaxprs[key] = compat.with_equations(body.jaxpr, invars[constants:], outvars, eqns)
        return self._jaxprs[key]

    def _key(self, body: _Body) -> Any:
        """Equal for calls of one jaxpr with the batch in the same places."""
        inside = tuple(self._key(inner) for bodies in body.inside.values() for _, _, inner in bodies)
        return id(body.jaxpr), tuple(map(self.axis_of, body.axes.values())), inside

    def variable(self, var: Any, body: _Body, env: dict[Any, Any]) -> Any:
        """What stands for a variable: itself, if it does not grow with the batch."""
        axis = self.axis_of(body.axes[var])
        if axis is not None:
            env[var] = new = compat.var_like(var, self.type(var.aval, axis))
            return new
        return var

    def type(self, aval: Any, axis: int) -> Any:
        """A type with fewer rows."""
        key = aval, axis
        if key not in self._types:
            size, rest = divmod(aval.shape[axis] * self.size, self.batch_size)
            if rest:
                raise Underivable("the rows of a value do not divide")
            self._types[key] = compat.resized(aval, axis, size)
        return self._types[key]

    def equation(self, index: int, eqn: Any, body: _Body, env: dict[Any, Any], region: Flat | None = None) -> Any:
        """An equation; itself, if nothing in it grows with the batch."""
        axes = body.axes
        changed = False
        invars = list(eqn.invars)
        for i, atom in enumerate(invars):
            if not compat.is_literal(atom) and (new := env.get(atom)) is not None:
                invars[i] = new
                changed = True
        outvars = list(eqn.outvars)
        for i, var in enumerate(outvars):
            if self.axis_of(axes[var]) is not None:
                outvars[i] = self.variable(var, body, env)
                changed = True
        if not changed:
            return eqn
        params = None
        if region is not None:
            params = compat.region_params(eqn, region.program, 0)
        elif bodies := body.inside.get(index):
            params = dict(eqn.params)
            for name, place, inner in bodies:
                new = self.jaxpr(inner)
                if place is not None:
                    new = (*params[name][:place], new, *params[name][place + 1 :])
                params[name] = new
        elif (sized := _SIZED.get(eqn.primitive.name)) is not None:
            params = eqn.params | sized(eqn, invars, outvars)
        return compat.replace_eqn(eqn, invars=invars, outvars=outvars, params=params)


# -- parameters that hold sizes ------------------------------------------------------------------------------------


def _resized_slice(eqn: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> dict[str, Any]:
    """Along the batch everything is taken."""
    limits = list(eqn.params["limit_indices"])
    for i, (old, new) in enumerate(zip(_shape(eqn.invars[0]), _shape(invars[0]), strict=True)):
        if old != new:
            limits[i] = new
    return {"limit_indices": tuple(limits)}


def _resized_window(eqn: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> dict[str, Any]:
    sizes = list(eqn.params["slice_sizes"])
    for i, (old, new) in enumerate(zip(_shape(eqn.invars[0]), _shape(invars[0]), strict=True)):
        if old != new and sizes[i] == old:
            sizes[i] = new
    return {"slice_sizes": tuple(sizes)}


_SIZED: dict[str, Callable[[Any, Sequence[Any], Sequence[Any]], dict[str, Any]]] = {
    "iota": lambda eqn, ins, outs: {"shape": _shape(outs[0])},
    "broadcast_in_dim": lambda eqn, ins, outs: {"shape": _shape(outs[0])},
    "reshape": lambda eqn, ins, outs: {"new_sizes": _shape(outs[0])},
    "random_bits": lambda eqn, ins, outs: {"shape": _shape(outs[0])[len(_shape(ins[0])) :]},
    "random_split": lambda eqn, ins, outs: {"shape": _shape(outs[0])[len(_shape(ins[0])) :]},
    "slice": _resized_slice,
    "dynamic_slice": _resized_window,
    "gather": _resized_window,
}

# -- which axes are equally long -----------------------------------------------------------------------------------

Rule = Callable[[Derivation, Any, Sequence[Axes]], Sequence[Axes]]
_RULES: dict[str, Rule] = {}


def _rule(*primitives: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(primitives, rule))
        return rule

    return register


def _unknown(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    """Whatever it does, it is not done to rows of the batch."""
    name = eqn.primitive.name
    for axes in given:
        ctx.fix(axes, name)
    return [ctx.fixed(len(_shape(var)), name) for var in eqn.outvars]


@_rule(
    *"abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type".split(),
    *"cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf".split(),
    *"erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le".split(),
    *"le_to lgamma log log1p logistic lt lt_to max min mul mulhi name ne neg nextafter not".split(),
    *"one_minus_square or polygamma population_count pow preduced pvary random_clone random_fold_in".split(),
    *"random_gamma random_seed real reciprocal reduce_precision regularized_incomplete_beta rem round rsqrt".split(),
    *"select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh".split(),
    *"sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta cumsum cummax cummin cumprod".split(),
    *"cumlogsumexp rev sort".split(),
)
def _elementwise(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    """All values have one shape, but for single numbers, and axes of size one that stand for any size."""
    shape = _shape(eqn.outvars[0])
    found: Axes = ()
    stretched = []
    for atom, axes in zip(eqn.invars, given, strict=True):
        if not axes:
            continue
        if _shape(atom) != shape:
            stretched.append((_shape(atom), axes))
        elif found:
            ctx.unite(found, axes)
        else:
            found = axes
    if not found:
        found = ctx.new(len(shape))
    for sizes, axes in stretched:
        if len(sizes) != len(shape):
            return _unknown(ctx, eqn, given)
        for i, size in enumerate(sizes):
            if size == shape[i]:
                ctx.unite((found[i],), (axes[i],))
    return [found] * len(eqn.outvars)


@_rule(
    *"optimization_barrier psum psum2 psum_invariant pmax pmin ppermute pbroadcast debug_callback debug_print".split(),
    "device_put",
)
def _one_by_one(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    """Each output has the shape of its input."""
    pairs = list(zip(eqn.invars, eqn.outvars, strict=False))
    if len(eqn.outvars) > len(eqn.invars) or any(_shape(a) != _shape(b) for a, b in pairs):
        return _unknown(ctx, eqn, given)
    return list(given[: len(eqn.outvars)])


@_rule("iota")
def _iota(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    return [ctx.new(len(_shape(eqn.outvars[0])))]


@_rule("broadcast_in_dim")
def _broadcast_in_dim(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    """New axes, and axes of size one that grow, may have any length."""
    shape = _shape(eqn.outvars[0])
    out = list(ctx.new(len(shape)))
    old = _shape(eqn.invars[0])
    for i, axis in enumerate(eqn.params["broadcast_dimensions"]):
        if old[i] == shape[axis]:
            out[axis] = given[0][i]
    return [tuple(out)]


@_rule("reshape")
def _reshape(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    """Runs of axes with equally many elements correspond; a run of one axis on each side is the same axis."""
    old, new = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if eqn.params["dimensions"] is not None or 0 in old or len(given) > 1:
        return _unknown(ctx, eqn, given)
    out = list(ctx.new(len(new)))
    for before, after in _runs(old, new):
        if len(before) == len(after) == 1:
            out[after[0]] = given[0][before[0]]
        else:
            sizes = [old[i] for i in before], [new[i] for i in after]
            ctx.merge(tuple(given[0][i] for i in before), sizes[0], tuple(out[i] for i in after), sizes[1])
    return [tuple(out)]


def _runs(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The shortest runs of axes, of sizes other than one, that have equally many elements."""
    left, right = ([i for i, size in enumerate(sizes) if size != 1] for sizes in (old, new))
    i = j = 0
    while i < len(left):
        start, other, i, j = i, j, i + 1, j + 1
        a, b = old[left[start]], new[right[other]]
        while a != b:
            if a < b:
                a *= old[left[i]]
                i += 1
            else:
                b *= new[right[j]]
                j += 1
        yield left[start:i], right[other:j]


@_rule("squeeze")
def _squeeze(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    (axes,) = given
    gone = {axis % len(axes) for axis in eqn.params["dimensions"]}
    return [tuple(axis for i, axis in enumerate(axes) if i not in gone)]


@_rule("transpose")
def _transpose(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    return [tuple(given[0][i] for i in eqn.params["permutation"])]


def _kept(ctx: Derivation, eqn: Any, axes: Axes, kept: Callable[[int], bool]) -> Axes:
    """The axes of the output; those that are not kept do not change with the batch."""
    out = list(axes)
    for i, axis in enumerate(axes):
        if not kept(i):
            ctx.fix((axis,), eqn.primitive.name)
            (out[i],) = ctx.fixed(1, eqn.primitive.name)
    return tuple(out)


@_rule("concatenate")
def _concatenate(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    dimension = eqn.params["dimension"]
    first, *rest = (_kept(ctx, eqn, axes, lambda i: i != dimension) for axes in given)
    for other in rest:
        ctx.unite(first, other)
    return [first]


@_rule("slice")
def _slice(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    params = eqn.params
    shape, strides = _shape(eqn.invars[0]), params["strides"] or (1,) * len(given[0])
    spans = list(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
    return [_kept(ctx, eqn, given[0], lambda i: spans[i] == (0, shape[i], 1))]


@_rule("split")
def _split(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    return [_kept(ctx, eqn, given[0], lambda i: i != eqn.params["axis"]) for _ in eqn.outvars]


@_rule("pad")
def _pad(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    return [_kept(ctx, eqn, given[0], lambda i: not any(eqn.params["padding_config"][i]))]


@_rule("tile")
def _tile(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    return [_kept(ctx, eqn, given[0], lambda i: eqn.params["reps"][i] == 1)]


@_rule("stack")
def _stack(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    axis = eqn.params["axis"]
    for other in given[1:]:
        ctx.unite(given[0], other)
    return [(*given[0][:axis], *ctx.fixed(1, "stack"), *given[0][axis:])]


@_rule("unstack")
def _unstack(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    axis = eqn.params["axis"]
    ctx.fix((given[0][axis],), "unstack")
    return [(*given[0][:axis], *given[0][axis + 1 :])] * len(eqn.outvars)


@_rule(
    *"reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin reduce".split(),
)
def _reduce(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    gone = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    full, *others = (axes for axes in given if axes)
    for other in others:
        ctx.unite(full, other)
    if eqn.primitive.name == "reduce_sum":
        ctx.sums([full[i] for i in gone], math.prod(_shape(eqn.invars[0])[i] for i in gone))
    return [tuple(axis for i, axis in enumerate(full) if i not in gone)] * len(eqn.outvars)


@_rule("top_k")
def _top_k(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    (axes,) = given
    along = eqn.params.get("axis", -1) % len(axes)
    return [_kept(ctx, eqn, axes, lambda i: i != along)] * 2


@_rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add", "select_and_gather_add")
def _window(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    """Along an axis with windows of one element nothing happens."""
    params = eqn.params

    def trivial(i: int) -> bool:
        ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
        return all(params[key][i] == 1 for key in ones if params.get(key)) and params["padding"][i] == (0, 0)

    kept = [_kept(ctx, eqn, axes, trivial) for axes in given]
    for other in kept[1:]:
        ctx.unite(kept[0], other)
    return [kept[0]]


@_rule("fft")
def _fft(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    stacked = len(given[0]) - len(eqn.params["fft_lengths"])
    return [_kept(ctx, eqn, given[0], lambda i: i < stacked)]


@_rule(*"cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd triangular_solve".split())
def _linalg(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    """A stack of matrices."""
    stacked = max(map(len, given)) - 2
    for axes in given:
        ctx.unite(given[0][:stacked], axes[:stacked])
        ctx.fix(axes[stacked:], eqn.primitive.name)
    shapes = [len(_shape(var)) - stacked for var in eqn.outvars]
    return [(*given[0][:stacked], *ctx.fixed(count, eqn.primitive.name)) for count in shapes]


@_rule("dot_general")
def _dot_general(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    a, b = given
    for i, j in (*zip(contract_a, contract_b, strict=True), *zip(batch_a, batch_b, strict=True)):
        ctx.unite((a[i],), (b[j],))
    ctx.sums([a[i] for i in contract_a], math.prod(_shape(eqn.invars[0])[i] for i in contract_a))
    free_a = (axis for i, axis in enumerate(a) if i not in contract_a and i not in batch_a)
    free_b = (axis for i, axis in enumerate(b) if i not in contract_b and i not in batch_b)
    return [(*(a[i] for i in batch_a), *free_a, *free_b)]


@_rule("conv_general_dilated")
def _conv(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    """Images and output features are kept, input features contracted, and windows do not go over the batch."""
    a, b = given
    lhs, rhs, out = eqn.params["dimension_numbers"]
    if eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1:
        ctx.unite((a[lhs[1]],), (b[rhs[1]],))
        ctx.sums([a[lhs[1]]], _shape(eqn.invars[0])[lhs[1]])
    else:
        ctx.fix((a[lhs[1]], *b), "grouped convolution")
    if eqn.params["batch_group_count"] != 1:
        ctx.fix(a, "grouped convolution")
    for axes, spec in ((a, lhs), (b, rhs)):
        ctx.fix([axes[i] for i in spec[2:]], "convolution")
    found = list(ctx.fixed(len(a), "convolution"))
    found[out[0]], found[out[1]] = a[lhs[0]], b[rhs[0]]
    return [tuple(found)]


@_rule("gather")
def _gather(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    """Lookups have the axes of the indices, and those of the operand that are taken whole."""
    operand, index = given
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = _shape(eqn.invars[0])
    ctx.fix(index[-1:], "gather")
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        ctx.unite((operand[i],), (index[j],))
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = iter(
        _kept(ctx, eqn, (axis,), lambda _, i=i: sizes[i] == shape[i])[0]
        for i, axis in enumerate(operand)
        if i not in gone
    )
    looked_up = iter(index[:-1])
    ndim = len(_shape(eqn.outvars[0]))
    return [tuple(next(kept if i in numbers.offset_dims else looked_up) for i in range(ndim))]


@_rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    operand, index, updates = given
    numbers = eqn.params["dimension_numbers"]
    shape, update_shape = _shape(eqn.invars[0]), _shape(eqn.invars[2])
    ctx.fix(index[-1:], "scatter")
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        ctx.unite((operand[i],), (index[j],))
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [i for i in range(len(operand)) if i not in gone]
    for i, j in zip(window, numbers.update_window_dims, strict=True):
        if shape[i] == update_shape[j]:
            ctx.unite((operand[i],), (updates[j],))
        else:
            ctx.fix((operand[i], updates[j]), "scatter")
    looked_up = tuple(axis for i, axis in enumerate(updates) if i not in numbers.update_window_dims)
    ctx.unite(looked_up, index[:-1])
    return [operand]


@_rule("dynamic_slice")
def _dynamic_slice(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    sizes, shape = eqn.params["slice_sizes"], _shape(eqn.invars[0])
    return [_kept(ctx, eqn, given[0], lambda i: sizes[i] == shape[i])]


@_rule("dynamic_update_slice")
def _dynamic_update_slice(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    operand, update = given[:2]
    shape, part = (_shape(var) for var in eqn.invars[:2])
    for i in range(len(shape)):
        if shape[i] == part[i]:
            ctx.unite((operand[i],), (update[i],))
        else:
            ctx.fix((operand[i], update[i]), "dynamic_update_slice")
    return [operand]


@_rule("random_bits", "random_split", "random_unwrap")
def _random(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    """Keys one by one; the draws for each may have any shape."""
    drawn = ctx.new(len(_shape(eqn.outvars[0])) - len(given[0]))
    if eqn.primitive.name == "random_unwrap":
        ctx.fix(drawn, "the numbers of a key")
    return [(*given[0], *drawn)]


@_rule("random_wrap")
def _random_wrap(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    ndim = len(_shape(eqn.outvars[0]))
    ctx.fix(given[0][ndim:], "random_wrap")
    return [given[0][:ndim]]


# -- programs inside equations -------------------------------------------------------------------------------------


@_rule("call", "custom_jvp_call", *compat.CALLS, *compat.REMAT)
def _call(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    bodies = list(compat.sub_jaxprs(eqn))
    if len(bodies) != 1 or len(compat.open_jaxpr(bodies[0][1]).invars) != len(given):
        return _unknown(ctx, eqn, given)
    ((parameter, jaxpr),) = bodies
    outs = ctx.enter(given, jaxpr, parameter)
    if eqn.primitive.name == "custom_jvp_call":
        ctx.has_custom_derivative([*given, *outs])
    return outs


@_rule("scan")
def _scan(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    """What is carried keeps its shape; what is stacked has one more axis, which is not the batch's."""
    num_consts, num_carry = compat.scan_partition(eqn)
    start = num_consts + num_carry
    for axes in given[start:]:
        ctx.fix(axes[:1], "the steps of a loop")
    outs = ctx.enter([*given[:start], *(axes[1:] for axes in given[start:])], eqn.params["jaxpr"], "jaxpr")
    for before, after in zip(given[num_consts:start], outs[:num_carry], strict=True):
        ctx.unite(before, after)
    return [*outs[:num_carry], *((*ctx.fixed(1, "the steps of a loop"), *axes) for axes in outs[num_carry:])]


@_rule("while")
def _while(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = given[num_cond + num_body :]
    ctx.enter([*given[:num_cond], *carry], eqn.params["cond_jaxpr"], "cond_jaxpr")
    outs = ctx.enter(given[num_cond:], eqn.params["body_jaxpr"], "body_jaxpr")
    for before, after in zip(carry, outs, strict=True):
        ctx.unite(before, after)
    return carry


@_rule("cond")
def _cond(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    branches = eqn.params["branches"]
    first, *rest = (ctx.enter(given[1:], branch, "branches", i) for i, branch in enumerate(branches))
    for outs in rest:
        for a, b in zip(first, outs, strict=True):
            ctx.unite(a, b)
    return first


@_rule("shard_map")
def _shard_map(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    """A device's share of a value has the axes of the value."""
    return ctx.enter(given, eqn.params["jaxpr"], "jaxpr")


@_rule("axis_index")
def _axis_index(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    return [()]


@_rule("all_gather", "all_gather_invariant")
def _all_gather(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    dimension = eqn.params["all_gather_dimension"]
    if eqn.params["tiled"]:
        return [_kept(ctx, eqn, axes, lambda i: i != dimension) for axes in given]
    return [(*axes[:dimension], *ctx.fixed(1, "all_gather"), *axes[dimension:]) for axes in given]


@_rule("reduce_scatter")
def _reduce_scatter(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    dimension = eqn.params["scatter_dimension"]
    outs = [_kept(ctx, eqn, axes, lambda i: i != dimension) for axes in given]
    return outs if eqn.params["tiled"] else [(*axes[:dimension], *axes[dimension + 1 :]) for axes in outs]


@_rule("all_to_all")
def _all_to_all(ctx: Derivation, eqn: Any, given: Sequence[Axes]) -> Sequence[Axes]:
    if any(_shape(a)[1:] and len(_shape(a)) != len(_shape(b)) for a, b in zip(eqn.invars, eqn.outvars, strict=True)):
        return _unknown(ctx, eqn, given)
    moved = eqn.params["split_axis"], eqn.params["concat_axis"]
    return [_kept(ctx, eqn, axes, lambda i: i not in moved) for axes in given]


# -- sums and means ------------------------------------------------------------------------------------------------


def divides_by(program: Program, counts: frozenset[int]) -> bool:
    """Whether a constant in a program, or its reciprocal, is one of these numbers: as a mean has it."""
    for eqn in program.eqns:
        for atom in eqn.invars:
            if compat.is_literal(atom) and not _shape(atom) and _counts(atom.val, counts):
                return True
        if eqn.params and any(divides_by(from_jaxpr(jaxpr), counts) for _, jaxpr in compat.sub_jaxprs(eqn)):
            return True
    return False


def _counts(value: Any, counts: frozenset[int]) -> bool:
    number = np.asarray(value)
    if not jnp.issubdtype(number.dtype, jnp.number):  # a truth value, or the derivative of a whole number
        return False
    return any(number == number.dtype.type(n) or number == number.dtype.type(1 / n) for n in counts)
