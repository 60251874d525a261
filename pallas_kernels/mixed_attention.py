"""Causal attention of prompts beside the attention of decoding rows to their caches, in one persistent kernel.

A mixed batch (chunked prefill: Sarathi-Serve, arXiv 2403.02310) holds both. Prefill keeps the tensor cores busy, decode
the memory: POD-Attention (arXiv 2410.18038) computes the two in one launch that keeps both on every multiprocessor.
Here they share each block, as in `matmul_silu`: two warpgroups compute tiles of the prefill (FlashAttention-3,
arXiv 2407.08608: the softmax of one beside the products of the other), one fetches for them, and a fourth computes
parts of the decode (FlashDecoding: caches are cut, so that few rows fill the device too). Prefill and decode are dealt
out to the blocks apart from each other.

JAX ships each of the two alone: prefill with Mosaic GPU, decode with Triton. This is Mosaic GPU: in Triton all programs
of a launch have the registers and the shared memory of the largest, and a block is of one kind or the other.

Decode has few query heads for each key head. Its products are transposed, ``K @ q^T`` and ``V^T @ p^T``: the 64 rows
that a ``wgmma`` instruction has at least are tokens of the cache, and heads are padded to 8, not to 64.

The parts of a row are joined by XLA behind the kernel, in a pass over a few percent of what decode reads. The last part
to arrive could do it instead, if Mosaic GPU had the atomic counter that tells which one that is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import hopper, mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.support import Support, dtype_reason, first_reason, hardware_reason

_DTYPES = (jnp.bfloat16, jnp.float16)
_HEAD_DIMS = (64, 128)
_PREFILL = 2  # the warpgroups that compute prefill; then come the one that fetches for them, and the one for decode
_FETCH, _DECODE = _PREFILL, _PREFILL + 1
_QUERIES = 64  # that a warpgroup attends with
_TILE = _PREFILL * _QUERIES  # tokens of a prompt, whether queries or keys, that a block takes at a time
_CHUNK = 64  # tokens of a cache that are attended to at a time
_MAX_GROUP = 16  # query heads for a key head
_REGISTERS = (208, 24, 72)  # per thread, of the warpgroups that compute prefill, fetch, and compute decode
_NAMES = ("copy_gmem_to_smem", "copy_smem_to_gmem", "wgmma")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the two share a multiprocessor.

    Attributes:
      tiles: of keys and of values of the prompts, counted together, that are in flight.
      chunks: of keys and of values of the caches, the same.
      part: tokens of a cache that one block attends to; whole chunks. ``None`` for as many as still fill the device.
    """

    tiles: int = 3
    chunks: int = 5
    part: int | None = None

    def smem_bytes(self, head_dim: int, padded: int, itemsize: int = 2) -> int:
        """Shared memory of a block, in bytes, for ``padded`` heads of a group."""
        tokens = _TILE * (self.tiles + 1) + _CHUNK * self.chunks + padded * self.queries
        return itemsize * (tokens * head_dim + _CHUNK * padded) + 4 * padded

    @property
    def queries(self) -> int:
        """Chunks in flight: each comes with the queries that attend to it."""
        return (self.chunks + 1) // 2


def _padded(group: int) -> int:
    return -(-group // 8) * 8


_SMEM_BYTES = hopper.SMEM_BYTES - 4096  # Mosaic keeps barriers and a scratch for reductions besides


@dataclasses.dataclass(frozen=True)
class _Work:
    """What there is to compute, and which block computes what."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    capacity: int
    part: int
    blocks: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def padded(self) -> int:
        """Query heads of a group, and those that are computed besides: a ``wgmma`` has a multiple of 8 columns."""
        return _padded(self.group)

    @property
    def splits(self) -> int:
        return -(-self.capacity // self.part)

    def own_tiles(self, block: Any) -> Any:
        """How many tiles of queries of the prefill a block computes."""
        full, rest = divmod(self.batch * self.heads * (self.tokens // _TILE), self.blocks)
        return full + (self._position(full, block) < rest).astype(jnp.int32)

    def _position(self, turn: Any, block: Any) -> Any:
        return jnp.where(turn % 2 == 0, block, self.blocks - 1 - block)

    def tile(self, turn: Any, block: Any) -> tuple[Any, Any, Any]:
        """Batch, head, and tile of queries that a block computes in a turn.

        The longest first, and dealt to and fro, so that blocks get about equally much in spite of the causal mask.
        """
        index = turn * self.blocks + self._position(turn, block)
        pairs = self.batch * self.heads
        batch, head = lax.div(lax.rem(index, pairs), self.heads), lax.rem(index, self.heads)
        return batch, head, self.tokens // _TILE - 1 - lax.div(index, pairs)

    def own_parts(self, block: Any) -> Any:
        """How many parts of caches a block attends to."""
        return lax.div(self.splits * self.rows * self.kv_heads - block + self.blocks - 1, self.blocks)

    def cache_part(self, i: Any, block: Any) -> tuple[Any, Any, Any]:
        """Split, row and key head of a block's ``i``-th part. Neighbouring blocks read the same lines of the cache."""
        index = i * self.blocks + block
        pair = lax.div(index, self.kv_heads)
        return lax.div(pair, self.rows), lax.rem(pair, self.rows), lax.rem(index, self.kv_heads)

    def chunks(self, i: Any, block: Any, lengths: Any) -> Any:
        """Chunks of a block's ``i``-th part that hold tokens."""
        split, row, _ = self.cache_part(i, block)
        return lax.div(lax.clamp(0, lengths[row] - split * self.part, self.part) + _CHUNK - 1, _CHUNK)


def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decode_q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What the kernel computes, in plain JAX; see `mixed_attention`."""
    causal = jnp.tri(q.shape[-3], dtype=bool)
    filled = jnp.arange(k_cache.shape[1]) < lengths[:, None, None]
    return _attention(q, k, v, causal, scale), _attention(decode_q[:, None], k_cache, v_cache, filled, scale)[:, 0]


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float | None) -> jax.Array:
    """Attention of ``[..., queries, heads, head_dim]`` where a mask ``[..., queries, keys]`` allows it; else zeros."""
    grouped = q.reshape(*q.shape[:-2], k.shape[-2], -1, q.shape[-1])
    scores = jnp.einsum("...qhgd,...khd->...hgqk", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = mask[..., None, None, :, :]
    peak = jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=-jnp.inf)
    weights = jnp.where(mask, jnp.exp(scores - peak), 0.0)
    out = jnp.einsum("...hgqk,...khd->...hgqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = out / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1.0)  # the largest weight is 1, if there is any
    return jnp.moveaxis(out, -2, -4).reshape(q.shape).astype(q.dtype)


def supports(*arrays: Any, tuning: Tuning | None = None, device: Any = None) -> Support:
    """Whether the kernel can run on a device with arrays (or types) like these: all that `mixed_attention` takes."""
    limits = supports_shapes(*arrays, tuning=tuning)
    if not limits:
        return limits
    # Before, Mosaic GPU did not store a product transposed.
    return first_reason(hardware_reason(device, mosaic.HOPPER), mosaic.version_reason(0, 11))


def key(*arrays: Any) -> tuple[int, ...]:
    """Decoding rows, capacity, prompts, tokens, heads, key heads, ``head_dim``: by which measurements are kept."""
    q, k_cache = arrays[0], arrays[4]
    return *k_cache.shape[:2], math.prod(q.shape[:-3]), *q.shape[-3:-1], *k_cache.shape[2:]


def supports_shapes(*arrays: Any, tuning: Tuning | None = None) -> Support:
    """Whether the kernel can be compiled for arrays (or types) like these, on whatever machine."""
    q, _, _, decode_q, k_cache, _, lengths = arrays
    tuning = tuning or Tuning()
    if (len(q.shape), len(decode_q.shape), len(k_cache.shape)) not in ((3, 3, 4), (4, 3, 4)):
        return Support(
            "q is to be [prompts, tokens, heads, head_dim], or without prompts, decode_q [rows, heads, head_dim] and "
            "k_cache [rows, capacity, kv_heads, head_dim], not "
            + ", ".join(str(tuple(x.shape)) for x in (q, decode_q, k_cache))
        )
    (tokens, heads, head_dim), (rows, capacity, kv_heads, _) = q.shape[-3:], k_cache.shape
    prompt, cache = (*q.shape[:-2], kv_heads, head_dim), (rows, capacity, kv_heads, head_dim)
    wanted = {"k": prompt, "v": prompt, "decode_q": (rows, heads, head_dim), "k_cache": cache, "v_cache": cache}
    values = dict(zip(wanted, arrays[1:6], strict=True))
    for name, shape in wanted.items():
        if values[name].shape != shape:
            return Support(f"{name} has shape {tuple(values[name].shape)}, and {shape} is wanted")
    if lengths.shape != (rows,):
        return Support(f"lengths has shape {tuple(lengths.shape)} for {rows} rows")
    if not math.prod(q.shape) or not math.prod(k_cache.shape):
        return Support("there is nothing to prefill, or nothing to decode: use attention for the other alone")
    group, rest = divmod(heads, kv_heads)
    needed = tuning.smem_bytes(head_dim, _padded(group))
    return first_reason(
        mosaic.missing_reason(*_NAMES),
        dtype_reason("q", q, _DTYPES),
        *(None if x.dtype == q.dtype else f"{name} is {x.dtype}, and q is {q.dtype}" for name, x in values.items()),
        dtype_reason("lengths", lengths, (jnp.int32,)),
        f"{heads} query heads are no multiple of {kv_heads} key heads" if rest else None,
        f"{group} query heads share a key head, and at most {_MAX_GROUP} can" if group > _MAX_GROUP else None,
        None if head_dim in _HEAD_DIMS else f"head_dim is {head_dim}, and only {_HEAD_DIMS} are supported",
        f"prompts of {tokens} tokens are not made of whole tiles of {_TILE}" if tokens % _TILE else None,
        f"caches of {capacity} tokens are not made of whole chunks of {_CHUNK}" if capacity % _CHUNK else None,
        f"parts of {tuning.part} tokens are not made of whole chunks" if (tuning.part or 0) % _CHUNK else None,
        f"{tuning} has fewer than 2 tiles or chunks in flight" if min(tuning.tiles, tuning.chunks) < 2 else None,
        f"{tuning} exceeds the shared memory" if needed > _SMEM_BYTES else None,
    )


def mixed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decode_q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    scale: float | None = None,
    num_sms: int | None = None,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of prompts, and attention of decoding rows to their caches, at the same time.

    Sums and the softmax are in float32; its weights are rounded to the dtype of the values. For inference: it has no
    derivative.

    Args:
      q: ``[prompts, tokens, heads, head_dim]``, or without the first axis, bfloat16 or float16: queries of the prompts.
        ``tokens`` is a multiple of 128, ``head_dim`` is 64 or 128.
      k: ``[prompts, tokens, kv_heads, head_dim]``: keys; at most 16 query heads share one key head.
      v: like ``k``: values.
      decode_q: ``[rows, heads, head_dim]``: a query for each decoding row.
      k_cache: ``[rows, capacity, kv_heads, head_dim]``: the keys so far; ``capacity`` is a multiple of 64.
      v_cache: like ``k_cache``: the values. What lies behind the lengths must be finite.
      lengths: ``[rows]``, int32: how many tokens of its cache each row attends to, at most ``capacity``; may be 0.
      scale: of the scores; ``head_dim ** -0.5`` if left out.
      num_sms: on at most this many multiprocessors; all if left out.
      tuning: how the two share a multiprocessor.
      interpret: simulate the kernel on the CPU.

    Returns:
      Attention of the prompts, like ``q``, and of the rows, like ``decode_q``: zeros where the length is 0.

    Raises:
      KernelError: if shapes or dtypes are not supported.
    """
    arrays = q, k, v, decode_q, k_cache, v_cache, lengths
    tuning = tuning or Tuning()
    supports_shapes(*arrays, tuning=tuning).require("mixed_attention")
    blocks = mosaic.num_sms() if num_sms is None else num_sms
    (tokens, heads), (rows, capacity, kv_heads, head_dim) = q.shape[-3:-1], k_cache.shape
    part = min(capacity, tuning.part or _part(rows * kv_heads, capacity, blocks))
    work = _Work(math.prod(q.shape[:-3]), tokens, heads, kv_heads, head_dim, rows, capacity, part, blocks)
    prompts = [x.reshape(work.batch, *x.shape[-3:]) for x in (q, k, v)]
    # A wgmma takes a multiple of 8 heads; XLA fuses this with what computes the queries.
    grouped = decode_q.reshape(rows, kv_heads, work.group, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, work.padded - work.group), (0, 0)))
    factor = (head_dim**-0.5 if scale is None else scale) * math.log2(math.e)  # the softmax is taken to base 2
    out, parts, sums = _run(work, tuning, factor, interpret)(*prompts, grouped, k_cache, v_cache, lengths)
    return out.reshape(q.shape), _joined(work, parts, sums, lengths, decode_q)


def _part(pairs: int, capacity: int, blocks: int) -> int:
    """Tokens of a part: the most that still gives every block eight parts, if that many can be had."""
    return next((n for n in (2048, 1024, 512, 256) if pairs * (capacity // n) >= 8 * blocks), 128)


def _joined(work: _Work, parts: jax.Array, sums: jax.Array, lengths: jax.Array, like: jax.Array) -> jax.Array:
    """The rows' attention, of parts ``[splits, rows, kv_heads, head_dim, padded]`` and the logarithms of their sums."""
    is_filled = (jnp.arange(work.splits)[:, None] * work.part < lengths)[..., None, None]  # the others are not written
    parts, sums = parts[..., : work.group], sums[..., : work.group]
    sums = jnp.where(is_filled, sums, -jnp.inf)
    weights = jnp.where(is_filled, jnp.exp2(sums - sums.max(axis=0)), 0.0)
    weighted = jnp.where(is_filled[..., None], parts * weights[..., None, :], 0.0).sum(axis=0)
    joined = weighted / jnp.maximum(weights.sum(axis=0), 1.0)[..., None, :]  # the largest weight is 1, if there is any
    return jnp.swapaxes(joined, -1, -2).reshape(like.shape).astype(like.dtype)


def _run(work: _Work, tuning: Tuning, factor: float, interpret: bool) -> Callable[..., Any]:
    """The kernel: of prompts, grouped and padded queries, caches and lengths, it makes what `_joined` joins."""

    def body(*refs: Any, **scratch: Any) -> None:
        q, k, v, *decode, out, parts, sums = refs
        wg = lax.axis_index("wg")

        @pl.when(wg < _PREFILL)
        def _compute() -> None:
            _prefill(work, tuning, factor, q, out, scratch, interpret)

        @pl.when(wg == _FETCH)
        def _feed() -> None:
            _fetch(work, tuning, k, v, scratch)

        @pl.when(wg == _DECODE)
        def _attend() -> None:
            _decode(work, tuning, factor, decode, (parts, sums), scratch, interpret)

    def launch(q: jax.Array, *others: jax.Array) -> Any:
        def memory(*shape: int) -> Any:
            swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
            return plgpu.SMEM(shape, q.dtype, transforms=swizzled)

        dim, cut = work.head_dim, (work.splits, work.rows, work.kv_heads)
        types = (
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((*cut, dim, work.padded), jnp.float32),
            jax.ShapeDtypeStruct((*cut, work.padded), jnp.float32),
        )
        scratch = {
            "queries": memory(_PREFILL, _QUERIES, dim),
            "tiles": memory(tuning.tiles, _TILE, dim),
            "asked": plgpu.Barrier(num_barriers=_PREFILL),
            "full": plgpu.Barrier(num_barriers=tuning.tiles),
            "empty": plgpu.Barrier(num_arrivals=_PREFILL, num_barriers=tuning.tiles),
            "turn": plgpu.Barrier(num_arrivals=_PREFILL),
            "decode_queries": memory(tuning.queries, work.padded, dim),
            "chunks": memory(tuning.chunks, _CHUNK, dim),
            "weights": memory(work.padded, _CHUNK),
            "sums": plgpu.SMEM((work.padded,), jnp.float32),
            "decode_asked": plgpu.Barrier(num_barriers=tuning.queries),
            "loaded": plgpu.Barrier(num_barriers=tuning.chunks),
        }
        return mosaic.launch(
            body,
            types,
            grid=work.blocks,
            warpgroups=_DECODE + 1,
            scratch=scratch,
            interpret=interpret,
            name="mixed_attention",
            approx_math=True,
        )(q, *others)

    return launch


def _product(a: Any, b: Any, start: Any, interpret: bool, meanwhile: Callable[[], None] = lambda: None) -> Any:
    """``start + a @ b`` on the tensor cores; ``a`` in registers or shared memory, ``b`` in shared memory."""
    if interpret:  # the simulator has no products of registers, and no transposed references
        meanwhile()
        return start + jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def multiply(acc: Any) -> None:
        plgpu.wgmma(acc, a, b)
        meanwhile()

    return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(start))


def _transposed(ref: Any, interpret: bool) -> Any:
    return ref[...].T if interpret else ref.T


def _along(values: jax.Array, like: jax.Array, axis: int) -> jax.Array:
    """A vector, repeated along the other axis of a matrix than its own."""
    return lax.broadcast_in_dim(values, like.shape, [axis])


def _weigh(scores: jax.Array, peak: jax.Array, factor: float, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights ``2 ** (scores * factor - new peak)``, the new peak along an axis, and the change of earlier weights."""
    new = jnp.maximum(peak, scores.max(axis=axis) * factor)
    return jnp.exp2(scores * factor - _along(new, scores, 1 - axis)), new, jnp.exp2(peak - new)


def _prefill(work: _Work, tuning: Tuning, factor: float, q: Any, out: Any, scratch: Any, interpret: bool) -> None:
    """What the two computing warpgroups do: each attends with half of the queries of its block's tiles."""
    plgpu.set_max_registers(_REGISTERS[0], action="increase")
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    tiles, full, empty, turn = (scratch[name] for name in ("tiles", "full", "empty", "turn"))
    own, asked = scratch["queries"].at[wg], scratch["asked"].at[wg]
    for slot in range(tuning.tiles):
        plgpu.barrier_arrive(empty.at[slot])

    def take_turns() -> None:
        """The tensor cores for the other warpgroup, while this one computes its softmax; and back."""
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def tile(i: Any, done: Any) -> Any:
        batch, head, place = work.tile(i, block)
        rows = pl.ds(place * _TILE + wg * _QUERIES, _QUERIES)
        plgpu.copy_gmem_to_smem(q.at[batch, rows, head], own, asked)
        plgpu.barrier_wait(asked)
        pl.when(wg == 1)(take_turns)

        def attend(step: Any, carry: Any, is_last: bool = False) -> Any:
            acc, total, peak = carry
            keys, values = (lax.rem(2 * (done + step) + j, tuning.tiles) for j in range(2))
            plgpu.barrier_wait(full.at[keys])
            scores = jnp.zeros((_QUERIES, _TILE), jnp.float32)
            scores = _product(own, _transposed(tiles.at[keys], interpret), scores, interpret, take_turns)
            plgpu.barrier_arrive(empty.at[keys])
            if is_last:
                query, token = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in range(2))
                scores = jnp.where(query + wg * _QUERIES >= token, scores, -jnp.inf)
            weights, peak, change = _weigh(scores, peak, factor, 1)
            total = total * change + weights.sum(axis=1)
            # All of it before the tensor cores are asked for, rather than when they wait for it.
            weights, total, peak, change = lax.optimization_barrier((weights.astype(q.dtype), total, peak, change))
            take_turns()
            plgpu.barrier_wait(full.at[values])
            acc = _product(weights, tiles.at[values], acc * _along(change, acc, 0), interpret)
            plgpu.barrier_arrive(empty.at[values])
            return acc, total, peak

        start = (
            jnp.zeros((_QUERIES, work.head_dim), jnp.float32),
            jnp.zeros(_QUERIES, jnp.float32),
            jnp.full(_QUERIES, -jnp.inf, jnp.float32),
        )
        acc, total, _ = attend(place, lax.fori_loop(0, place, attend, start), is_last=True)
        pl.when(wg == 0)(take_turns)
        own[...] = (acc * _along(1 / total, acc, 0)).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own, out.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return done + place + 1

    lax.fori_loop(0, work.own_tiles(block), tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _fetch(work: _Work, tuning: Tuning, k: Any, v: Any, scratch: Any) -> None:
    """What the fetching warpgroup does: keeps keys and values of the prompts coming, over all of its block's tiles."""
    plgpu.set_max_registers(_REGISTERS[1], action="decrease")
    block = lax.axis_index("block")
    tiles, full, empty = (scratch[name] for name in ("tiles", "full", "empty"))

    def tile(i: Any, done: Any) -> Any:
        batch, head, place = work.tile(i, block)

        def step(step: Any, _: Any) -> None:
            for j, source in enumerate((k, v)):
                slot = lax.rem(2 * (done + step) + j, tuning.tiles)
                plgpu.barrier_wait(empty.at[slot])
                tokens = source.at[batch, pl.ds(step * _TILE, _TILE), lax.div(head, work.group)]
                plgpu.copy_gmem_to_smem(tokens, tiles.at[slot], full.at[slot])

        lax.fori_loop(0, place + 1, step, None)
        return done + place + 1

    lax.fori_loop(0, work.own_tiles(block), tile, jnp.int32(0))
    # Every slot is given back once more than it is filled: at the start.
    for slot in range(tuning.tiles):
        plgpu.barrier_wait(empty.at[slot])


def _decode(work: _Work, tuning: Tuning, factor: float, inputs: Any, outs: Any, scratch: Any, interpret: bool) -> None:
    """What the last warpgroup does: attends to its block's parts of caches, and fetches ahead, into the next parts.

    The slots of the queue hold keys and values in turns. ``ahead`` is what the next free slot is for: the part, the
    chunk in it, and how many chunks that part has, none if all is fetched.
    """
    plgpu.set_max_registers(_REGISTERS[2], action="decrease")
    block = lax.axis_index("block")
    q, k_cache, v_cache, lengths = inputs
    parts, part_sums = outs
    names = ("decode_queries", "chunks", "weights", "sums", "decode_asked", "loaded")
    queries, chunks, staged, sums, asked, loaded = (scratch[name] for name in names)
    own = work.own_parts(block)

    def following(ahead: Any) -> Any:
        def next_part(ahead: Any) -> Any:
            return ahead[0] + 1, jnp.int32(0), work.chunks(ahead[0] + 1, block, lengths)

        part, chunk, count = ahead
        return lax.while_loop(lambda x: (x[1] >= x[2]) & (x[0] < own), next_part, (part, chunk + 1, count))

    def fetch(ahead: Any, nth: Any, is_keys: bool) -> Any:
        """Fills the slot of the ``nth`` piece, and gives what comes next."""
        part, chunk, count = ahead
        split, row, head = work.cache_part(part, block)

        @pl.when(count > 0)
        def _copy() -> None:
            tokens = pl.ds(split * work.part + chunk * _CHUNK, _CHUNK)
            slot = lax.rem(nth, tuning.chunks)
            source = (k_cache if is_keys else v_cache).at[row, tokens, head]
            plgpu.copy_gmem_to_smem(source, chunks.at[slot], loaded.at[slot])
            if is_keys:
                slot = lax.rem(lax.div(nth, 2), tuning.queries)
                plgpu.copy_gmem_to_smem(q.at[row, head], queries.at[slot], asked.at[slot])

        return ahead if is_keys else following(ahead)

    def part(i: Any, carry: Any) -> Any:
        split, row, head = work.cache_part(i, block)
        count = work.chunks(i, block, lengths)

        def attend(chunk: Any, carry: Any) -> Any:
            acc, total, peak, nth, ahead = carry
            keys, values = lax.rem(nth, tuning.chunks), lax.rem(nth + 1, tuning.chunks)
            asking = lax.rem(lax.div(nth, 2), tuning.queries)
            plgpu.barrier_wait(loaded.at[keys])
            plgpu.barrier_wait(asked.at[asking])
            scores = jnp.zeros((_CHUNK, work.padded), jnp.float32)
            scores = _product(chunks.at[keys], _transposed(queries.at[asking], interpret), scores, interpret)
            ahead = fetch(ahead, nth + tuning.chunks, tuning.chunks % 2 == 0)
            token = lax.broadcasted_iota(jnp.int32, scores.shape, 0) + split * work.part + chunk * _CHUNK
            scores = jnp.where(token < lengths[row], scores, -jnp.inf)
            weights, peak, change = _weigh(scores, peak, factor, 0)
            total = total * _along(change, total, 1) + weights  # summed over the tokens at the end only
            if interpret:
                staged[...] = weights.astype(staged.dtype).T
            else:
                staged.T[...] = weights.astype(staged.dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(loaded.at[values])
            values = _transposed(chunks.at[values], interpret)
            acc = _product(values, _transposed(staged, interpret), acc * _along(change, acc, 1), interpret)
            ahead = fetch(ahead, nth + 1 + tuning.chunks, tuning.chunks % 2 == 1)
            return acc, total, peak, nth + 2, ahead

        start = (
            jnp.zeros((work.head_dim, work.padded), jnp.float32),
            jnp.zeros((_CHUNK, work.padded), jnp.float32),
            jnp.full(work.padded, -jnp.inf, jnp.float32),
        )
        acc, total, peak, *carry = lax.fori_loop(0, count, attend, (*start, *carry))

        @pl.when(count > 0)
        def _store() -> None:
            total_ = total.sum(axis=0)
            parts[split, row, head] = acc * _along(1 / total_, acc, 1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            sums[...] = peak + jnp.log2(total_)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sums, part_sums.at[split, row, head])

        return tuple(carry)

    ahead = following((jnp.int32(-1), jnp.int32(0), jnp.int32(0)))
    for nth in range(tuning.chunks):
        ahead = fetch(ahead, jnp.int32(nth), nth % 2 == 0)
    lax.fori_loop(0, own, part, (jnp.int32(0), ahead))
    plgpu.wait_smem_to_gmem(0)
