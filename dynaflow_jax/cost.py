"""What an operator costs: floating-point operations, bytes of device memory, and which of the two bounds it.

Estimates in the manner of the roofline model (Williams et al., 2009): elementwise work is taken as fused into what
feeds or reads it, so bytes count only values that must pass through memory.
"""

from __future__ import annotations

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
# Kernels of their own: operands and results pass through memory, whatever surrounds them.
_KERNELS = COLLECTIVES | frozenset(
    "dot_general ragged_dot ragged_dot_general conv_general_dilated sort top_k gather scatter scatter-add scatter-mul "
    "scatter_add scatter_mul dynamic_update_slice fft cholesky triangular_solve eigh svd qr lu while cond scan "
    "pallas_call ffi_call custom_call pure_callback io_callback shard_map random_bits".split()
)
# The same memory under another type.
_VIEWS = frozenset(
    "reshape squeeze expand_dims optimization_barrier pvary pcast copy_p name sharding_constraint "
    "mesh_cast reshard layout_constraint".split()
)
# These only rearrange: a kernel reads through them.
_MOVEMENT = frozenset("broadcast_in_dim iota slice copy".split())
# Recomputing these for every reader costs more than keeping the result, so XLA does not.
_EXPENSIVE = frozenset(
    "div rem exp exp2 expm1 log log1p tanh logistic erf erf_inv erfc sin cos tan sqrt rsqrt cbrt pow atan2 "
    "lgamma digamma random_bits threefry2x32".split()
)

# FLOP per byte above which the matrix unit, not the memory, is the limit: dense bf16 rate over memory bandwidth, of
# vendors' data sheets.
_RIDGE = {"H200": 206.0, "H100": 295.0, "A100": 156.0, "L4": 403.0, "T4": 203.0, "TPU": 240.0, "CPU": 12.0}
# Bytes per second between a device and its memory, of the same data sheets.
_BANDWIDTH = {
    "H200": 4.8e12,
    "H100": 3.35e12,
    "A100": 2.0e12,
    "L4": 3.0e11,
    "T4": 3.2e11,
    "TPU": 1.6e12,
    "CPU": 1.0e11,
}


def communicates(eqn: Any) -> bool:
    """Whether an equation moves data between devices, or holds one that does."""
    if eqn.primitive.name in COLLECTIVES:
        return True
    return bool(eqn.params) and any(
        communicates(inner) for _, body in compat.sub_jaxprs(eqn) for inner in compat.open_jaxpr(body).eqns
    )


def ridge(platform: str, device_kind: str) -> float:
    """Operations per byte at which a device turns from memory-bound to compute-bound."""
    return _RIDGE[_known(platform, device_kind)]


def seconds(flops: float, size: float, platform: str, device_kind: str) -> float:
    """The least time that a device needs for so many operations and bytes, at its dense bf16 rate and bandwidth."""
    known = _known(platform, device_kind)
    return max(size, flops / _RIDGE[known]) / _BANDWIDTH[known]


def _known(platform: str, device_kind: str) -> str:
    """The entry of the tables that a device is taken for."""
    found = next((name for name in _RIDGE if name in device_kind), None)
    return found or ("CPU" if platform == "cpu" else "H100")


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
        return _convolution_flops(eqn)
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


def _convolution_flops(eqn: Any) -> float:
    """Multiplications and additions with padding and the holes of dilation left out, as XLA counts them."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    image, kernel, out = (var.aval.shape for var in (*eqn.invars[:2], eqn.outvars[0]))
    count = 2.0 * kernel[numbers.rhs_spec[1]]
    count *= math.prod(out[d] for d in numbers.out_spec[:2])  # rows and output features
    for i, (low, _) in enumerate(params["padding"]):
        size, taps, steps = (
            shape[spec[i + 2]]
            for shape, spec in ((image, numbers.lhs_spec), (kernel, numbers.rhs_spec), (out, numbers.out_spec))
        )
        holes = params["lhs_dilation"][i]
        at = np.arange(steps)[:, None] * params["window_strides"][i] - low
        at = at + np.arange(taps) * params["rhs_dilation"][i]
        count *= int(((at >= 0) & (at <= (size - 1) * holes) & (at % holes == 0)).sum())
    return count


def _body_flops(jaxpr: Any) -> float:
    return sum(flops(eqn) for eqn in compat.open_jaxpr(jaxpr).eqns)


def traffic(eqns: Iterable[Any], outputs: Sequence[Any]) -> float:
    """Bytes read from and written to device memory by equations whose elementwise parts are fused.

    Args:
      eqns: the equations of an operator.
      outputs: the variables that something outside reads; they pass through memory.
    """
    fusion = _Fusion(list(_opened(eqns)), outputs)
    return float(sum(map(fusion.traffic, fusion.eqns)))


def kernels(eqns: Iterable[Any]) -> int:
    """How many kernels equations take at the least: one for each that is not fused into another, or one in all."""
    count = 0
    for eqn in _opened(eqns):
        if eqn.primitive.name == "scan":
            count += eqn.params["length"] * sum(kernels(compat.open_jaxpr(b).eqns) for _, b in compat.sub_jaxprs(eqn))
        else:
            count += eqn.primitive.name in _KERNELS
    return max(count, 1)


class _Fusion:
    """What XLA makes of equations: kernels, with elementwise work fused into whatever reads it.

    Attributes:
      eqns: the equations.
      made_by: for each variable that is evaluated where it is read, its equation.
      kept: those of them that pass through memory all the same.
    """

    def __init__(self, eqns: Sequence[Any], outputs: Sequence[Any]):
        self.eqns = eqns
        self.products = {eqn.outvars[0]: eqn for eqn in eqns if eqn.primitive.name == "dot_general"}
        self.made_by = {
            var: eqn
            for eqn in eqns
            if eqn.primitive.name not in _KERNELS and eqn.primitive.name not in _REDUCTIONS
            for var in eqn.outvars
        }
        self.kept = {self.source(var) for var in outputs if not compat.is_literal(var)}
        readers: dict[Any, set[Any]] = {}  # the kernels that evaluate a variable
        for i, eqn in reversed(list(enumerate(eqns))):
            name = eqn.primitive.name
            operands = [self.source(var) for var in eqn.invars if not compat.is_literal(var)]
            if name in _KERNELS:
                self.kept.update(var for var in operands if self.is_computed(var))
                continue
            kernels = {i} if name in _REDUCTIONS else set()
            for var in eqn.outvars:
                kernels |= {var} if var in self.kept else readers.get(var, set())
            if name in _EXPENSIVE and len(kernels) > 1:
                self.kept.update(eqn.outvars)
                kernels = {i}
            for var in operands:
                readers.setdefault(var, set()).update(kernels)

    def source(self, var: Any) -> Any:
        """The variable of which ``var`` is a view."""
        while (eqn := self.made_by.get(var)) is not None:
            if eqn.primitive.name not in _VIEWS and not self._is_transposed_product(eqn):
                break
            source = eqn.invars[list(eqn.outvars).index(var) if len(eqn.outvars) > 1 else 0]
            if compat.is_literal(source):
                break
            var = source
        return var

    def _is_transposed_product(self, eqn: Any) -> bool:
        """Whether an equation transposes a matrix product, which can be written transposed at once."""
        if eqn.primitive.name != "transpose" or (product := self.products.get(eqn.invars[0])) is None:
            return False
        _, (batch, _) = product.params["dimension_numbers"]
        return all(d < len(batch) for d in eqn.params["permutation"][: len(batch)])

    def is_computed(self, var: Any) -> bool:
        """Whether a variable holds more than a rearrangement of a value that memory holds already."""
        while (eqn := self.made_by.get(var)) is not None and eqn.primitive.name in _MOVEMENT:
            var = next((self.source(v) for v in eqn.invars if not compat.is_literal(v)), None)
        return eqn is not None

    def traffic(self, eqn: Any) -> float:
        """Bytes that evaluating an equation moves, with everything fused into it."""
        name = eqn.primitive.name
        if name == "scan":
            bodies = (compat.open_jaxpr(body) for _, body in compat.sub_jaxprs(eqn))
            return eqn.params["length"] * sum(traffic(body.eqns, body.outvars) for body in bodies)
        written = sum(bytes_of(var.aval) for var in eqn.outvars)
        if name == "gather":
            return 2 * written + bytes_of(eqn.invars[1].aval)
        if name.startswith("scatter"):  # in place
            return 2 * bytes_of(eqn.invars[2].aval) + bytes_of(eqn.invars[1].aval)
        if name == "dynamic_update_slice":  # in place
            return 2 * bytes_of(eqn.invars[1].aval)
        if name in _KERNELS or name in _REDUCTIONS:
            return written + self.read(eqn.invars) + (self.rearranged(eqn) if name == "dot_general" else 0)
        if name not in _VIEWS and (kept := [var for var in eqn.outvars if var in self.kept]):
            return sum(bytes_of(var.aval) for var in kept) + self.read([kept[0]], through_kept=True)
        return 0

    def read(self, atoms: Iterable[Any], *, through_kept: bool = False) -> int:
        """Bytes in memory that evaluating ``atoms`` reads."""
        total = 0
        pending = [self.source(var) for var in atoms if not compat.is_literal(var)]
        first, seen = set(pending) if through_kept else set(), set(pending)
        while pending:
            var = pending.pop()
            eqn = self.made_by.get(var)
            if eqn is None or (var in self.kept and var not in first):
                total += bytes_of(var.aval)
                continue
            sources = {self.source(v) for v in eqn.invars if not compat.is_literal(v)}
            if eqn.primitive.name in ("slice", "dynamic_slice") and not any(map(self.is_computed, sources)):
                total += bytes_of(var.aval)  # not the whole of what it is a slice of
                continue
            pending += sources - seen
            seen |= sources
        return total

    def rearranged(self, eqn: Any) -> int:
        """Bytes moved to bring a product's operands into an order that a matrix product can read."""
        contract, batch = eqn.params["dimension_numbers"]
        total = 0
        for var, contracted, batched in zip(eqn.invars, contract, batch, strict=True):
            # What is computed for the product alone is written in the right order at once.
            if compat.is_literal(var) or self.is_computed(self.source(var)):
                continue
            rest = [d for d in range(len(var.aval.shape)) if d not in batched and d not in contracted]
            orders = ([*batched, *rest, *contracted], [*batched, *contracted, *rest])
            if sorted(orders[0]) not in orders:
                total += 2 * bytes_of(var.aval)
        return total


def _opened(eqns: Iterable[Any]) -> Iterable[Any]:
    """Equations with plain calls replaced by what they call, joined by renaming where the call's edges are."""
    for eqn in eqns:
        bodies = list(compat.sub_jaxprs(eqn)) if eqn.params else []
        if len(bodies) == 1 and eqn.primitive.name not in _KERNELS:
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
