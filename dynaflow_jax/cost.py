"""What an operator costs: floating-point operations, bytes of device memory, and which of the two bounds it.

Estimates in the manner of the roofline model (Williams et al., 2009): elementwise work is taken as fused into what
feeds or reads it, so bytes count only values that must pass through memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dynaflow_jax import compat

COLLECTIVES = frozenset(
    "psum psum2 psum_invariant pmax pmin all_gather all_gather_invariant all_gather_reduced reduce_scatter "
    "unreduced_reduce_scatter unreduced_psum all_to_all ragged_all_to_all ppermute pgather psum_scatter".split()
)
"""Primitives that move data between devices."""

# One operation per element of the output, as XLA's own cost analysis has it; transcendentals it counts apart.
_ARITHMETIC = frozenset(
    "add add_any sub mul div rem max min neg abs sign floor ceil round and or xor not eq ne lt le gt ge select_n clamp "
    "integer_pow square one_minus_square is_finite nextafter shift_left shift_right_logical shift_right_arithmetic "
    "conj real imag population_count clz".split()
)
_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce argmax argmin "
    "cumsum cumprod cummax cummin cumlogsumexp reduce_window_sum reduce_window_max reduce_window_min".split()
)
# Their results pass through memory whatever surrounds them.
_MATERIALISED = COLLECTIVES | _REDUCTIONS
_MATERIALISED |= frozenset(
    "dot_general ragged_dot ragged_dot_general conv_general_dilated sort top_k gather scatter scatter-add scatter-mul "
    "scatter_add scatter_mul dynamic_update_slice fft cholesky triangular_solve eigh svd qr lu while cond scan "
    "pallas_call ffi_call custom_call pure_callback io_callback shard_map random_bits".split()
)

# FLOP per byte above which the matrix unit, not the memory, is the limit: dense bf16 rate over memory bandwidth, of
# vendors' data sheets.
_RIDGE = {"H200": 206.0, "H100": 295.0, "A100": 156.0, "L4": 403.0, "T4": 203.0, "TPU": 240.0, "CPU": 12.0}


def ridge(platform: str, device_kind: str) -> float:
    """Operations per byte at which a device turns from memory-bound to compute-bound."""
    for name, value in _RIDGE.items():
        if name in device_kind:
            return value
    return _RIDGE["CPU"] if platform == "cpu" else _RIDGE["H100"]


def size_of(aval: Any) -> int:
    """Number of elements."""
    return math.prod(getattr(aval, "shape", ()))


def bytes_of(aval: Any) -> int:
    """Size in bytes; random keys count as their bits, tokens as nothing."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    item = dtype.itemsize if isinstance(dtype, np.dtype) else getattr(dtype, "itemsize", 8)
    return size_of(aval) * item


def flops(eqn: Any) -> float:
    """Floating-point operations of one equation, with all that it calls."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        lhs = eqn.invars[0].aval
        return 2.0 * size_of(eqn.outvars[0].aval) * math.prod(lhs.shape[d] for d in contract)
    if name in _ARITHMETIC:
        return float(size_of(eqn.outvars[0].aval))
    if name in _REDUCTIONS:
        return float(size_of(eqn.invars[0].aval))
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        kernel = eqn.invars[1].aval.shape
        taps = math.prod(kernel[d] for d in numbers.rhs_spec[1:])  # input features of a group, and the window
        return 2.0 * size_of(eqn.outvars[0].aval) * taps
    if name.startswith("ragged_dot"):
        return 2.0 * size_of(eqn.invars[0].aval) * eqn.invars[1].aval.shape[-1]
    if name == "cond":
        return max((_body_flops(branch) for _, branch in compat.sub_jaxprs(eqn)), default=0.0)
    if name == "scan":
        return float(eqn.params["length"]) * sum(_body_flops(body) for _, body in compat.sub_jaxprs(eqn))
    if eqn.params and (bodies := list(compat.sub_jaxprs(eqn))):
        # A while loop counts once: how often it runs is not known before it does.
        return sum(_body_flops(body) for _, body in bodies)
    return 0.0


def _body_flops(jaxpr: Any) -> float:
    return sum(flops(eqn) for eqn in compat.open_jaxpr(jaxpr).eqns)


@functools.lru_cache(maxsize=4096)
def _is_movement(name: str) -> bool:
    return name in ("broadcast_in_dim", "iota", "squeeze", "reshape", "expand_dims", "copy", "copy_p", "slice")


def traffic(eqns: Iterable[Any], outputs: Sequence[Any]) -> float:
    """Bytes read from and written to device memory by equations whose elementwise parts are fused.

    Args:
      eqns: the equations of an operator.
      outputs: the variables that something outside reads; they pass through memory.
    """
    total = 0.0
    made_by: dict[Any, Any] = {}  # variables that fuse into their reader, and the equation that makes them
    kept = set(outputs)
    eqns = list(_opened(eqns))
    for eqn in eqns:
        if eqn.primitive.name in _MATERIALISED:
            kept.update(var for var in eqn.invars if not compat.is_literal(var) and _is_computed(var, made_by))
        else:
            made_by.update((var, eqn) for var in eqn.outvars)
    for eqn in eqns:
        name = eqn.primitive.name
        if name == "scan":
            total += eqn.params["length"] * sum(
                traffic(body.eqns, body.outvars)
                for body in (compat.open_jaxpr(body) for _, body in compat.sub_jaxprs(eqn))
            )
        elif name in _MATERIALISED:
            total += sum(bytes_of(var.aval) for var in _read(eqn, made_by, kept))
            total += sum(bytes_of(var.aval) for var in eqn.outvars)
        else:
            for var in eqn.outvars:
                if var in kept and name not in ("reshape", "squeeze", "expand_dims"):  # these are views
                    total += bytes_of(var.aval)
                    total += sum(bytes_of(read.aval) for read in _read(eqn, made_by, kept))
    return total


def _opened(eqns: Iterable[Any]) -> Iterable[Any]:
    """Equations with plain calls replaced by what they call, joined by renaming where the call's edges are."""
    for eqn in eqns:
        bodies = list(compat.sub_jaxprs(eqn)) if eqn.params else []
        if len(bodies) == 1 and eqn.primitive.name not in _MATERIALISED:
            inner = compat.open_jaxpr(bodies[0][1])
            if len(inner.invars) == len(eqn.invars):
                env = dict(zip(inner.invars, eqn.invars, strict=True))
                env.update(
                    (var, out)
                    for var, out in zip(inner.outvars, eqn.outvars, strict=True)
                    if not compat.is_literal(var) and var not in env
                )
                yield from _opened(_renamed(inner_eqn, env) for inner_eqn in inner.eqns)
                continue
        yield eqn


def _renamed(eqn: Any, env: dict[Any, Any]) -> Any:
    invars = [var if compat.is_literal(var) else env.get(var, var) for var in eqn.invars]
    return compat.replace_eqn(eqn, invars=invars, outvars=[env.get(var, var) for var in eqn.outvars])


def _is_computed(var: Any, made_by: dict[Any, Any]) -> bool:
    """Whether a fused variable holds more than a rearrangement of a value that memory holds already."""
    eqn = made_by.get(var)
    while eqn is not None and _is_movement(eqn.primitive.name):
        source = next((v for v in eqn.invars if not compat.is_literal(v)), None)
        eqn = made_by.get(source)
    return eqn is not None


def _read(eqn: Any, made_by: dict[Any, Any], kept: set[Any]) -> set[Any]:
    """The variables in memory that evaluating an equation reads, through everything fused into it."""
    found: set[Any] = set()
    pending = [var for var in eqn.invars if not compat.is_literal(var)]
    seen = set(pending)
    while pending:
        var = pending.pop()
        if var in kept or var not in made_by:
            found.add(var)
            continue
        for source in made_by[var].invars:
            if not compat.is_literal(source) and source not in seen:
                seen.add(source)
                pending.append(source)
    return found
