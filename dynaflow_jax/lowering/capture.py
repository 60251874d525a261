"""A partition's function between the begin and the end of a capture, with every kernel inside.

XLA does some copying on its own: no output may share memory with an input, a constant or another output, and what is
written in place must not be an input. Such copies belong into the capture, or replaying it would miss them.

Some results are to be computed in the memory of arguments, as new weights are where the old ones are. XLA does so if it
sees that everything else has read these by then, and copies them there in the end if not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_jax import compat

# What XLA may give as its operand's memory under another type, if it has as many elements.
_VIEWS = frozenset(
    "reshape squeeze expand_dims transpose broadcast_in_dim bitcast_convert_type copy copy_p optimization_barrier "
    "pvary pcast name layout_constraint".split()
)
# What says of a value how it differs between devices: of no meaning on one of them, and not to be evaluated there.
_VARYING = frozenset({"pvary", "pcast"})
# What XLA may give a custom call as a part of its operand's memory.
_SLICES = frozenset({"slice", "dynamic_slice"})
# What XLA writes into its first operand's memory.
_IN_PLACE = frozenset(
    "dynamic_update_slice scatter scatter-add scatter-mul scatter-min scatter-max scatter_add".split()
)
_CALLS = compat.CALLS | compat.REMAT | {"custom_jvp_call", "custom_vjp_call"}

_TOKEN = jax.ShapeDtypeStruct((), np.int32)


def captured(fun: Callable[..., Sequence[Any]], into: Sequence[int] = ()) -> Callable[..., list[Any]]:
    """A function whose kernels are captured when it runs: a capture begins before the first and ends after the last.

    Args:
      fun: gives a sequence of arrays.
      into: the arguments, by position, in whose memory the first results are to be; left to XLA.

    Returns:
      A function with those results, and a token behind them.
    """
    del into

    def run(*args: Any) -> list[Any]:
        args, _ = _begun(args)
        results = jax.lax.optimization_barrier(list(fun(*args)))
        return [*results, jax.ffi.ffi_call("dynaflow_capture_end", _TOKEN, has_side_effect=True)(*results)]

    return run


def enclosed(fun: Callable[..., Sequence[Any]], into: Sequence[int] = ()) -> Callable[..., list[Any]]:
    """The same, with all copies inside, whatever the function gives: at the price that more may be copied."""
    return _inside(fun, into, tied=False)


def tied(fun: Callable[..., Sequence[Any]], into: Sequence[int] = ()) -> Callable[..., list[Any]]:
    """The same, with what depends on no argument inside, too: at the price that XLA folds no constants.

    And with every result copied: what computes it may turn out to change nothing, and the result to be an argument.
    """
    return _inside(fun, into, tied=True)


def _inside(fun: Callable[..., Sequence[Any]], into: Sequence[int], *, tied: bool) -> Callable[..., list[Any]]:
    def run(*args: Any) -> list[Any]:
        program = jax.make_jaxpr(fun)(*args)
        args, started = _begun(args)
        results = _evaluate(program, args, started, tied)
        if into:  # everything has been read by then
            results, targets = jax.lax.optimization_barrier((results, [args[i] for i in into]))
            results[: len(into)] = map(_written_over, results, targets)
        # The end gives the outputs, in place, so that they have memory of their own and rows in order before it.
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
        in_place = {i: i for i in range(len(results))}
        end = jax.ffi.ffi_call("dynaflow_capture_end", types, has_side_effect=True, input_output_aliases=in_place)
        return list(end(*results))

    return run


def _begun(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], jax.Array]:
    """The arguments as they are once a capture has begun, and what says so."""
    started = jax.ffi.ffi_call("dynaflow_capture_begin", _TOKEN, has_side_effect=True)(*args)
    return jax.lax.optimization_barrier((args, started))


def _evaluate(program: Any, args: Sequence[Any], started: jax.Array, tied: bool = False) -> list[Any]:
    """The function's results; views of inputs and constants are copied where they are given or written to."""
    jaxpr = compat.open_jaxpr(program)
    outside = _Outside(jaxpr, [True] * len(jaxpr.invars))
    results = _Evaluation(started, tied).run(jaxpr, program.consts, args, outside, set())
    pairs = zip(jaxpr.outvars, results, strict=True)
    return [
        _copied(value, started) if tied or outside.has(atom) or outside.cut(atom) else value for atom, value in pairs
    ]


class _Evaluation:
    """Computes what a jaxpr does, on copies of what would be written to.

    Args:
      started: what says that a capture has begun.
      tied: whether what depends on no input is made to wait for that, too.
    """

    def __init__(self, started: jax.Array, tied: bool):
        self._started = started
        # Zero, which XLA does not know.
        self._zero = _copied(np.int32(0), started) if tied else None

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], outside: _Outside, free: set[Any]
    ) -> list[Any]:
        """The results.

        Args:
          jaxpr: what to compute.
          consts: the values of its constants.
          args: the values of its inputs.
          outside: which of its variables may be in memory before the first kernel.
          free: its inputs that depend on nothing.
        """
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        free = free | set(jaxpr.constvars)

        def read(atom: Any) -> Any:
            return atom.val if compat.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            known = [compat.is_literal(atom) or atom in free for atom in eqn.invars]
            # Opening what is to be computed again would let XLA share it with the first time.
            body = None if eqn.primitive.name in compat.REMAT else _body(eqn)
            if body is not None:
                inner = compat.open_jaxpr(body)
                within = _Outside(inner, [outside.has(atom) for atom in eqn.invars])
                given = {var for var, is_known in zip(inner.invars, known, strict=True) if is_known}
                results = self.run(inner, compat.consts_of(body), values, within, given)
            elif eqn.primitive.name in _VARYING:
                results = values[: len(eqn.outvars)]
            else:
                for i in _written(eqn):
                    if outside.has(eqn.invars[i]):
                        values[i] = _copied(values[i], self._started)
                results = compat.bind(eqn, *values) if self._zero is None else self._tied(eqn, values, known)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _tied(self, eqn: Any, values: list[Any], known: Sequence[bool]) -> list[Any]:
        """An equation's results, which wait if nothing else makes them."""
        if not all(known):
            return compat.bind(eqn, *values)
        arrays = [i for i, value in enumerate(values) if jnp.ndim(value)]
        for i in arrays:
            values[i] = self._waiting(values[i])
        results = compat.bind(eqn, *values)
        return results if arrays else [self._waiting(value) for value in results]

    def _waiting(self, value: Any) -> Any:
        """A value that XLA can only compute once the capture has begun."""
        value = jnp.asarray(value)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return _of_bits(self._waiting, value)
        other = ~value if value.dtype == bool else value + jnp.ones((), value.dtype)
        return jnp.where(self._zero == 0, value, other)


def _body(eqn: Any) -> Any:
    """The jaxpr of a call, whose inputs and outputs are the call's; ``None`` for whatever is no such call."""
    if eqn.primitive.name in _CALLS:
        for _, body in compat.sub_jaxprs(eqn):
            inner = compat.open_jaxpr(body)
            if len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars):
                return body
    return None


def _written(eqn: Any) -> Sequence[int]:
    """The operands in whose memory XLA computes results; not those of loops, which cannot be captured anyway."""
    if eqn.primitive.name in _IN_PLACE:
        return (0,)
    aliases = eqn.params.get("input_output_aliases") or ()
    return tuple(int(operand) for operand, _ in (aliases.items() if isinstance(aliases, Mapping) else aliases))


def _copied(value: Any, started: jax.Array) -> Any:
    """A copy that XLA cannot take for its original, and can only make once the capture has begun."""
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return _of_bits(lambda bits: _copied(bits, started), value)
    return jax.ffi.ffi_call("dynaflow_copy", jax.ShapeDtypeStruct(value.shape, value.dtype))(value, started)


def _written_over(value: Any, target: Any) -> Any:
    """A value in the memory of another one."""
    same = jax.ShapeDtypeStruct(value.shape, value.dtype)
    return jax.ffi.ffi_call("dynaflow_copy", same, input_output_aliases={1: 0})(value, target)


def _of_bits(fun: Callable[[Any], Any], keys: Any) -> Any:
    """Random keys whose bits a function gives, of the bits that they have."""
    return jax.random.wrap_key_data(fun(jax.random.key_data(keys)), impl=jax.random.key_impl(keys))


class _Outside:
    """Which variables may have no memory of their own when a capture ends.

    Inputs, constants, and views of either, whose memory may be there before the first kernel; and slices.

    Args:
      jaxpr: whose variables.
      given: for each of its inputs, whether it is.
    """

    def __init__(self, jaxpr: Any, given: Sequence[bool]):
        self._vars = {var for var, outside in zip(jaxpr.invars, given, strict=True) if outside} | set(jaxpr.constvars)
        self._cut: set[Any] = set()
        constant = set(jaxpr.constvars)  # what depends on no input can be computed before the capture begins
        for eqn in jaxpr.eqns:
            if all(compat.is_literal(atom) or atom in constant for atom in eqn.invars):
                constant.update(eqn.outvars)
                self._vars.update(eqn.outvars)
            elif eqn.primitive.name in _VIEWS:
                pairs = zip(eqn.outvars, eqn.invars, strict=False)  # further operands are sizes
                same = [(var, of) for var, of in pairs if var.aval.size == of.aval.size]
                self._vars.update(var for var, of in same if self.has(of))
                self._cut.update(var for var, of in same if self.cut(of))
            elif all(atom.aval.size == 1 and self.has(atom) for atom in eqn.invars) and _body(eqn) is None:
                # Of numbers XLA finds out what changes nothing: a sum over no axis, a remainder that is known.
                self._vars.update(var for var in eqn.outvars if var.aval.size == 1)
            elif eqn.primitive.name in _SLICES:
                self._cut.update(eqn.outvars)
            elif (body := _body(eqn)) is not None:
                inner = compat.open_jaxpr(body)
                within = _Outside(inner, [self.has(atom) for atom in eqn.invars])
                pairs = list(zip(eqn.outvars, inner.outvars, strict=True))
                self._vars.update(var for var, own in pairs if within.has(own))
                self._cut.update(var for var, own in pairs if within.cut(own))

    def has(self, atom: Any) -> bool:
        """Whether a variable's or literal's memory may be there before the first kernel."""
        return compat.is_literal(atom) or atom in self._vars

    def cut(self, atom: Any) -> bool:
        """Whether it is a slice, or a view of one."""
        return not compat.is_literal(atom) and atom in self._cut
