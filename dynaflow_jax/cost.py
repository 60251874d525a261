"""What an operator costs: floating-point operations, bytes of device memory, and which of the two bounds it.

Estimates in the manner of the roofline model (Williams et al., 2009): elementwise work is taken as fused into what
feeds or reads it, so bytes count only values that must pass through memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dynaflow_jax import compat, devices

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
_PRODUCTS = frozenset("dot_general ragged_dot ragged_dot_general conv_general_dilated".split())
# Kernels of their own: operands and results pass through memory, whatever surrounds them.
_KERNELS = COLLECTIVES | frozenset(
    "dot_general ragged_dot ragged_dot_general conv_general_dilated sort top_k scatter scatter-add scatter-mul "
    "scatter_add scatter_mul dynamic_update_slice fft cholesky triangular_solve eigh svd qr lu while cond scan "
    "pallas_call ffi_call custom_call pure_callback io_callback shard_map random_bits "
    "dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_bwd "
    "dot_product_attention_bwd_wrapper".split()
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

# Fused attention of cuDNN, forward and backward: products with the scores in between never in memory.
_ATTENTION = {
    "dot_product_attention_fwd": 2,
    "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd": 5,
    "dot_product_attention_bwd_wrapper": 5,
}


def products(eqns: Iterable[Any]) -> int:
    """How many matrix products and convolutions equations compute, each once where they are in a loop."""
    found = 0
    for eqn in eqns:
        found += eqn.primitive.name in _PRODUCTS
        found += sum(products(compat.open_jaxpr(body).eqns) for _, body in compat.sub_jaxprs(eqn))
    return found


def communicates(eqn: Any) -> bool:
    """Whether an equation moves data between devices, or holds one that does."""
    if eqn.primitive.name in COLLECTIVES:
        return True
    return bool(eqn.params) and any(
        communicates(inner) for _, body in compat.sub_jaxprs(eqn) for inner in compat.open_jaxpr(body).eqns
    )


def ridge(platform: str, device_kind: str) -> float:
    """Operations per byte at which a device turns from memory-bound to compute-bound."""
    return devices.find(platform, device_kind).ridge


def seconds(flops: float, size: float, platform: str, device_kind: str) -> float:
    """The least time that a device needs for so many operations and bytes, at its dense bf16 rate and bandwidth."""
    device = devices.find(platform, device_kind)
    return max(size / device.memory_rate, flops / device.bf16_flops)


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
    if name in _ATTENTION:
        return _attention_flops(eqn)
    if name == "pallas_call":
        return _pallas_flops(eqn)
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


def _attention_flops(eqn: Any) -> float:
    """Products of all queries with all keys, or with half of them under a causal mask."""
    query, key = (var.aval.shape for var in eqn.invars[:2])
    rows, heads = (2, 1) if eqn.params["layout"] == 1 else (1, 2)
    pairs = float(query[0] * query[heads] * query[rows] * key[rows])
    if "CAUSAL" in str(eqn.params["mask_type"]):
        pairs /= 2
    return _ATTENTION[eqn.primitive.name] * 2 * pairs * query[3]


def _pallas_flops(eqn: Any) -> float:
    """What the kernel's author says, or what its body does in all cells of its grid."""
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return float(estimate.flops)
    cells = math.prod(size for size in eqn.params["grid_mapping"].grid if isinstance(size, int))
    return cells * sum(_body_flops(body) for _, body in compat.sub_jaxprs(eqn))


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


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one kernel, or one exchange between devices, asks of a device.

    Attributes:
      name: the primitive that it is made around.
      flops: floating-point operations of the matrix unit.
      bytes: bytes of device memory read and written.
      dtype: of the numbers that it computes with, such as ``"bfloat16"``.
      itemsize: bytes of each of them.
      matmul: of a matrix product, its batch, rows, columns and the length that is summed over.
      sent: bytes that the device sends to others.
      hops: how many exchanges that is, one after the other.
      count: how many such kernels run one after the other.
    """

    name: str
    flops: float
    bytes: float
    dtype: str = "float32"
    itemsize: int = 4
    matmul: tuple[int, int, int, int] | None = None
    sent: float = 0.0
    hops: int = 0
    count: int = 1

    def shared_by(self, shards: int) -> Kernel:
        """One device's part of a kernel on a batch that is sharded over several."""
        if shards == 1:
            return self
        matmul = self.matmul and (self.matmul[0], max(1, self.matmul[1] // shards), *self.matmul[2:])
        return dataclasses.replace(
            self, flops=self.flops / shards, bytes=self.bytes / shards, sent=self.sent / shards, matmul=matmul
        )


@runtime_checkable
class Itemized(Protocol):
    """A function in place of operators that says itself what it asks of a device, for predictions."""

    def kernels(self, axes: Mapping[str, int]) -> list[Kernel]:
        """Its kernels and exchanges, one after the other; with ``sent``, a kernel has an exchange beside it.

        Args:
          axes: sizes of the mesh axes that it may communicate over.
        """
        ...


def itemized(eqns: Iterable[Any], outputs: Sequence[Any], axes: Mapping[str, int]) -> list[Kernel]:
    """The kernels that equations take, with elementwise work fused, and the exchanges between devices.

    A reduction and the one kernel that reads its result together with what was reduced, as in a norm or a softmax, are
    one kernel, which reads that once.

    Args:
      eqns: the equations of an operator.
      outputs: the variables that something outside reads; they pass through memory.
      axes: sizes of the mesh axes that the equations may communicate over.
    """
    fusion = _Fusion(list(_opened(eqns)), outputs)
    found: list[Kernel] = []
    normalizations = fusion.normalizations()
    taken = {i for reductions in normalizations.values() for i in reductions}
    for i, eqn in enumerate(fusion.eqns):
        name = eqn.primitive.name
        if name in ("scan", "shard_map"):
            mesh = eqn.params.get("mesh")
            inside = {**axes, **({} if mesh is None else mesh.shape)}
            for _, body in compat.sub_jaxprs(eqn):
                inner = compat.open_jaxpr(body)
                found += [
                    dataclasses.replace(kernel, count=kernel.count * eqn.params.get("length", 1))
                    for kernel in itemized(inner.eqns, inner.outvars, inside)
                ]
        elif name in COLLECTIVES:
            sent, hops = _sent(eqn, axes)
            if sent:
                dtype = eqn.invars[0].aval.dtype
                found.append(Kernel(name, 0.0, 2 * sent, str(dtype), dtype.itemsize, sent=sent, hops=hops))
        elif i not in taken and (size := fusion.traffic(eqn)):
            if reductions := normalizations.get(i):
                size = fusion.normalized(i, reductions)
            work = flops(eqn) if name in _KERNELS else 0.0
            dtype = next((var.aval.dtype for var in (*eqn.invars, *eqn.outvars) if hasattr(var.aval, "dtype")), None)
            kind = (str(dtype), getattr(dtype, "itemsize", 4))
            found.append(Kernel(name, work, size, *kind, matmul=_matmul(eqn)))
    return found


def _matmul(eqn: Any) -> tuple[int, int, int, int] | None:
    """Batch, rows, columns and summed length of an equation that is a matrix product, or is computed like one."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        lhs, rhs = (var.aval.shape for var in eqn.invars[:2])
        batches, summed = (math.prod(lhs[d] for d in dims) for dims in (batch, contracted))
        shared = max(batches * summed, 1)
        return batches, math.prod(lhs) // shared, math.prod(rhs) // shared, summed
    if name.startswith("ragged_dot"):
        rows, columns = eqn.invars[0].aval.shape[0], eqn.invars[1].aval.shape[-1]
        return 1, rows, columns, size_of(eqn.invars[0].aval) // max(rows, 1)
    if name == "conv_general_dilated":  # as an implicit product
        columns = eqn.outvars[0].aval.shape[eqn.params["dimension_numbers"].out_spec[1]]
        rows = size_of(eqn.outvars[0].aval) // max(columns, 1)
        return 1, rows, columns, int(flops(eqn) / max(2 * rows * columns, 1))
    return None


def _sent(eqn: Any, axes: Mapping[str, int]) -> tuple[float, int]:
    """Bytes that each device sends in a collective, and in how many exchanges, as a dispatched plan does it."""
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = names if isinstance(names, (tuple, list)) else (names,)
    size = float(sum(bytes_of(var.aval) for var in eqn.invars))
    name = eqn.primitive.name
    if name == "ppermute":
        return (size, 1) if any(source != target for source, target in eqn.params["perm"]) else (0.0, 0)
    devices = math.prod(axes.get(axis, 1) for axis in names if isinstance(axis, str))
    if devices == 1:
        return 0.0, 0
    if name.startswith("all_gather"):
        return size * (devices - 1), 1
    if name.startswith(("psum", "pmax", "pmin", "unreduced_psum")) and name != "psum_scatter":
        return (size, 1) if devices == 2 else (2 * size * (devices - 1) / devices, 2)
    return size * (devices - 1) / devices, 1


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
                folded = set(filter(self._is_transposed, eqn.invars)) if name == "dot_general" else set()
                self.kept.update(var for var in operands if self.is_computed(var) and var not in folded)
                continue
            if name == "gather" and self.is_computed(operands[0]):  # reads here and there what memory holds
                self.kept.add(operands[0])
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

    def _is_transposed(self, var: Any) -> bool:
        """Whether a variable is the transpose of a value in memory, which a product can read as it lies there."""
        eqn = self.made_by.get(var)
        return (
            eqn is not None and eqn.primitive.name == "transpose" and not self.is_computed(self.source(eqn.invars[0]))
        )

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
        if name == "gather":  # what is read of what memory holds, wherever it lies
            return 2 * written + bytes_of(eqn.invars[1].aval) if set(eqn.outvars) & self.kept else 0
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
        return sum(self.leaves(atoms, through_kept=through_kept).values())

    def leaves(self, atoms: Iterable[Any], *, through_kept: bool = False) -> dict[Any, int]:
        """What evaluating ``atoms`` reads in memory, and how many bytes of it."""
        found: dict[Any, int] = {}
        pending = [self.source(var) for var in atoms if not compat.is_literal(var)]
        first, seen = set(pending) if through_kept else set(), set(pending)
        while pending:
            var = pending.pop()
            eqn = self.made_by.get(var)
            if eqn is None or (var in self.kept and var not in first):
                found[var] = found.get(var, 0) + bytes_of(var.aval)  # twice if a product is of one matrix
                continue
            sources = {self.source(v) for v in eqn.invars if not compat.is_literal(v)}
            if eqn.primitive.name in ("slice", "dynamic_slice") and not any(map(self.is_computed, sources)):
                found[var] = bytes_of(var.aval)  # not the whole of what it is a slice of
                continue
            if eqn.primitive.name == "gather":
                found[var] = bytes_of(var.aval) + bytes_of(eqn.invars[1].aval)
                continue
            pending += sources - seen
            seen |= sources
        return found

    def normalizations(self) -> dict[int, list[int]]:
        """For kernels that take reductions with them, by index of the equation, the indices of those.

        A norm or a softmax reduces rows and reads them again with the result, which a kernel that holds a row does at
        once.
        """
        outputs = {i: [v for v in eqn.outvars if v in self.kept] for i, eqn in enumerate(self.eqns)}
        kernels = (eqn for eqn in self.eqns if eqn.primitive.name in _KERNELS)
        by_kernels = {self.source(var) for eqn in kernels for var in eqn.invars if not compat.is_literal(var)}
        reads: dict[int, dict[Any, int]] = {}
        for i, eqn in enumerate(self.eqns):
            if eqn.primitive.name in _REDUCTIONS:
                reads[i] = self.leaves(eqn.invars)
            elif eqn.primitive.name not in _KERNELS and outputs[i]:
                reads[i] = self.leaves(outputs[i][:1], through_kept=True)
        ends: dict[int, int] = {}  # the kernel that a reduction becomes part of
        for i in reversed(reads):
            eqn = self.eqns[i]
            if eqn.primitive.name not in _REDUCTIONS or not self._is_of_rows(eqn):
                continue
            if any(var in self.kept or var in by_kernels for var in eqn.outvars):
                continue
            readers = [j for j, own in reads.items() if any(var in own for var in eqn.outvars)]
            end = {ends.get(j, j) for j in readers}
            if len(end) == 1 and all(reads[j].keys() & reads[i].keys() for j in readers):
                ends[i] = end.pop()
        found: dict[int, list[int]] = {}
        for i, end in ends.items():
            if self.eqns[end].primitive.name not in _REDUCTIONS:
                found.setdefault(end, []).append(i)
        return found

    def normalized(self, index: int, reductions: Sequence[int]) -> float:
        """Bytes that a kernel moves together with the reductions that it takes with it."""
        members = [self.eqns[i] for i in reductions]
        kept = [var for var in self.eqns[index].outvars if var in self.kept]
        read = self.leaves(kept[:1], through_kept=True)
        for eqn in members:
            read |= self.leaves(eqn.invars)
        inside = {var for eqn in members for var in eqn.outvars}
        written = sum(bytes_of(var.aval) for var in kept)
        return float(written + sum(size for var, size in read.items() if var not in inside))

    def _is_of_rows(self, eqn: Any) -> bool:
        """Whether a reduction is over the last axes, so that what it reduces lies together."""
        axes, ndim = eqn.params.get("axes"), len(eqn.invars[0].aval.shape)
        return axes is not None and tuple(sorted(axes)) == tuple(range(ndim - len(axes), ndim))

    def rearranged(self, eqn: Any) -> int:
        """Bytes moved to bring a product's operands into an order that a matrix product can read."""
        contract, batch = eqn.params["dimension_numbers"]
        total = 0
        for var, contracted, batched in zip(eqn.invars, contract, batch, strict=True):
            if compat.is_literal(var):
                continue
            source, lies = self.source(var), list(range(len(var.aval.shape)))
            if self._is_transposed(var) and var not in self.kept:
                lies.sort(key=self.made_by[var].params["permutation"].__getitem__)
            # What is computed for the product alone is written in the right order at once.
            elif self.is_computed(source):
                continue
            rest = [d for d in range(len(var.aval.shape)) if d not in batched and d not in contracted]
            if lies not in ([*batched, *rest, *contracted], [*batched, *contracted, *rest]):
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
