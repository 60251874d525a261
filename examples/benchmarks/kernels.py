"""Each Pallas kernel against the best that XLA does with the same operators, on one GPU and on two.

    JAX_PLATFORMS=cuda python -m examples.benchmarks.kernels [--json=FILE] [--update_table] [--only=NAME,...]

Every contender is first compared with the plain-JAX reference. Contenders take turns in one process; medians. Short
kernels are chained inside one program, so that the host's dispatch is not what is measured. ``--update_table`` writes
what was faster where into the table that strategies ask (`pallas_kernels.measured`).
"""

import dataclasses
import functools
import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from examples.benchmarks.keep import keep
from pallas_kernels import (
    add_rms_norm,
    all_gather_matmul,
    grouped_matmul,
    hopper,
    matmul_reduce_scatter,
    matmul_silu,
    measured,
    mixed_attention,
    persistent_matmul,
    rms_norm,
)

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_UPDATE = flags.DEFINE_bool("update_table", False, "Whether to write pallas_kernels/measured.json.")
_ONLY = flags.DEFINE_list("only", [], "Names of kernels to measure; all if empty.")
_SECONDS = flags.DEFINE_float("seconds", 140, "No case is begun after this time.")
_SWEEP = flags.DEFINE_bool("sweep", False, "Whether to try every tuning of each kernel.")

# How XLA compiles contenders of these names.
OPTIONS: dict[str, dict[str, Any]] = {
    "concurrent": {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT", "xla_gpu_graph_min_graph_size": 1},
    "one-shot psum, then norm": {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": True},
}


@dataclasses.dataclass
class Case:
    """Contenders for one shape of one kernel.

    Attributes:
      kernel: its name.
      shape: its key in the table of measurements.
      reference: gives the right result, to compare with.
      xla: what to beat, by name; functions of ``args``.
      ours: the kernel, in one or several tunings.
      args: the operands, already on the device.
      bytes: that must be moved, for the limit by memory bandwidth.
      limits: other functions whose time is a lower bound.
      chain: whether and how to repeat a call inside one program: maps arguments and results to the next arguments.
      repeat: calls inside one program.
      wrap: makes a program over several devices of one for each.
      whole: by the name of a contender, what is done to its program, with all calls in it.
      label: of a variant that the table of measurements does not keep.
      tolerance: on the difference from the reference, relative to its largest magnitude.
    """

    kernel: str
    shape: tuple[int, ...]
    reference: Callable[..., Any]
    xla: Mapping[str, Callable[..., Any]]
    ours: Mapping[str, Callable[..., Any]]
    args: tuple[Any, ...]
    bytes: int = 0
    limits: Sequence[Callable[..., Any]] = ()
    chain: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] | None = None
    repeat: int = 1
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fun: fun
    whole: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = dataclasses.field(default_factory=dict)
    label: str = ""
    tolerance: float = 0.02

    @property
    def name(self) -> str:
        return f"{self.kernel}-{'x'.join(map(str, self.shape))}{self.label and f'-{self.label}'}"


def main(argv: Sequence[str]) -> None:
    del argv
    start = time.monotonic()
    device = jax.devices()[0]
    print(f"{len(jax.devices())} x {device.device_kind}, JAX {jax.__version__}", flush=True)
    bandwidth = copy_bandwidth()
    print(f"a copy moves {bandwidth / 1e12:.2f} TB/s", flush=True)
    table, rows = measured.load(), []
    for kernel, cases in CASES.items():
        if _ONLY.value and kernel not in _ONLY.value:
            continue
        try:
            for case in cases():
                if time.monotonic() - start > _SECONDS.value:
                    print(f"{case.name}: out of time", flush=True)
                    break
                if (row := measure(case, bandwidth)) is None:
                    continue
                rows.append(row)
                keep(_JSON.value, "kernels", rows)
                if row["equal"] and not case.label:
                    speedup = row["best_xla_us"] / row["ours_us"]
                    table = measured.recorded(table, kernel, device.device_kind, case.shape, speedup)
        except Exception:
            print(f"{kernel} FAILED\n{traceback.format_exc()}", flush=True)
    if _UPDATE.value and not _SWEEP.value:  # of a sweep the fastest tuning would count, not the one that is used
        measured.save(table)
    print(f"{time.monotonic() - start:.0f} s", flush=True)


def measure(case: Case, bandwidth: float) -> dict[str, Any] | None:
    """One row of the results; ``None`` if no tuning of the kernel works."""
    want = jax.jit(case.wrap(case.reference))(*case.args)
    funs: dict[str, Callable[..., Any]] = {}
    equal = {}
    for name, fun in {**case.xla, **case.ours}.items():
        try:
            begin = time.monotonic()
            whole = case.whole.get(name, lambda program: program)
            equal[name] = close(jax.jit(case.wrap(whole(fun)))(*case.args), want, case.tolerance)
            funs[name] = jax.jit(case.wrap(whole(chained(case, fun))), compiler_options=OPTIONS.get(name))
            jax.block_until_ready(funs[name](*case.args))
            if not equal[name]:
                print(f"  {case.name}: {name} is WRONG", flush=True)
            if time.monotonic() - begin > 10:
                print(f"  {case.name}: {name} took {time.monotonic() - begin:.0f} s to compile", flush=True)
        except Exception:
            funs.pop(name, None)
            print(f"  {case.name}: {name} FAILED\n{traceback.format_exc()}", flush=True)
    for i, fun in enumerate(case.limits):
        funs[f"limit {i}"] = jax.jit(case.wrap(chained(case, fun)))
        jax.block_until_ready(funs[f"limit {i}"](*case.args))
    times = medians(funs, case.args)
    times = {name: time / case.repeat for name, time in times.items()}
    ours = [name for name in case.ours if name in times and equal[name]] or [n for n in case.ours if n in times]
    theirs = [name for name in case.xla if name in times]
    if not ours or not theirs:
        return None
    fastest, best = min(ours, key=times.__getitem__), min(theirs, key=times.__getitem__)
    limits = [case.bytes / bandwidth * 1e6] + [time for name, time in times.items() if name.startswith("limit")]
    row = {
        "case": case.name,
        "best_xla_us": round(times[best], 2),
        "best_xla": best,
        "ours_us": round(times[fastest], 2),
        "ours": fastest,
        "limit_us": round(max(limits), 2) or None,
        "equal": equal[fastest],
    }
    print(
        f"{row['case']:42s} XLA {row['best_xla_us']:8.1f} µs ({best}), ours {row['ours_us']:8.1f} µs ({fastest}), "
        f"limit {max(limits):8.1f} µs, ratio {times[best] / times[fastest]:.3f}, of limit "
        f"{max(limits) / times[fastest]:.3f}, equal {row['equal']}",
        flush=True,
    )
    if len(times) > 3:
        print("    " + ", ".join(f"{name} {time:.1f}" for name, time in times.items()), flush=True)
    return row


def chained(case: Case, fun: Callable[..., Any]) -> Callable[..., Any]:
    """A program of several calls, each waiting for the one before."""
    if case.chain is None:
        return fun
    call = jax.jit(fun)  # traced once

    def program(*args: Any) -> Any:
        result = call(*args)
        for _ in range(case.repeat - 1):
            result = jax.lax.optimization_barrier(result)
            args = case.chain(args, result)
            result = call(*args)
        return result

    return program


def close(got: Any, want: Any, tolerance: float) -> bool:
    """Whether results agree, up to ``tolerance`` of the largest magnitude of each."""

    def one(a: Any, b: Any) -> bool:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        return a.shape == b.shape and float(np.abs(a - b).max()) <= tolerance * float(np.abs(b).max())

    return all(jax.tree.leaves(jax.tree.map(one, got, want)))


def medians(
    funs: dict[str, Callable[..., Any]], args: Any, rounds: int = 7, seconds: float = 0.012
) -> dict[str, float]:
    """Median microseconds of a call, contenders in turns, each turn of about ``seconds``."""
    calls = {}
    for name, fun in funs.items():
        start = time.perf_counter()
        for _ in range(3):
            result = fun(*args)
        jax.block_until_ready(result)
        calls[name] = max(3, min(100, int(seconds / ((time.perf_counter() - start) / 3))))
    times: dict[str, list[float]] = {name: [] for name in funs}
    for _ in range(rounds):
        for name, fun in funs.items():
            jax.block_until_ready(fun(*args))
            start = time.perf_counter()
            for _ in range(calls[name]):
                result = fun(*args)
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - start) / calls[name] * 1e6)
    return {name: statistics.median(taken) for name, taken in times.items()}


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Bytes per second, read and written, of the faster of a copy and an elementwise pass."""
    x = jnp.zeros(size // 4, jnp.float32)
    times = medians({"copy": jax.jit(jnp.copy), "pass": jax.jit(lambda x: x + 1)}, (x,), rounds=5)
    return 2 * size / (min(times.values()) / 1e6)


def normal(index: int, *shape: int, scale: float = 1.0, dtype: Any = jnp.bfloat16) -> jax.Array:
    return (jax.random.normal(jax.random.key(index), shape, jnp.float32) * scale).astype(dtype)


def norms() -> Iterator[Case]:
    """Residual addition and RMSNorm, with and without a peer's partial sum."""
    for width in (4096, 8192):
        for rows in (16, 256, 1024, 4096, 16384):
            for partials in (0, 1):
                x, residual, *rest = (normal(i, rows, width) for i in range(2 + partials))
                weight = normal(9, width, scale=0.1) + 1
                ours = {"default": add_rms_norm.add_rms_norm}
                if _SWEEP.value and partials == 0:
                    for tuning in itertools.starmap(add_rms_norm.Tuning, itertools.product((1, 2, 4), (False, True))):
                        name = f"{tuning.rows} rows{' kept' * tuning.keep_weight}"
                        ours[name] = functools.partial(add_rms_norm.add_rms_norm, tuning=tuning)
                yield Case(
                    "add_rms_norm",
                    (rows, width, partials),
                    add_rms_norm.reference,
                    {"XLA": add_rms_norm.reference},
                    ours,
                    (x, residual, weight, *rest),
                    bytes=(4 + partials) * x.nbytes + weight.nbytes,
                    chain=lambda args, result: (*result, *args[2:]),
                    repeat=16 if rows <= 1024 else 4,
                )


def norms_alone() -> Iterator[Case]:
    """RMSNorm of what another operator gives."""
    for width in (4096, 8192):
        for rows in (16, 256, 1024, 4096, 16384):
            x, weight = normal(0, rows, width), normal(9, width, scale=0.1) + 1
            yield Case(
                "rms_norm",
                (rows, width),
                rms_norm.reference,
                {"XLA": rms_norm.reference},
                {"default": rms_norm.rms_norm},
                (x, weight),
                bytes=2 * x.nbytes + weight.nbytes,
                chain=lambda args, result: (result, *args[1:]),
                repeat=16 if rows <= 1024 else 4,
            )


def matmuls() -> Iterator[Case]:
    """The persistent matmul with all multiprocessors, and with a budget."""
    for m, k, n in (
        (8192, 8192, 8192),
        (4096, 4096, 28672),
        (4096, 14336, 4096),
        (4096, 4096, 4096),
        (1024, 4096, 4096),
    ):
        a, b = normal(0, m, k), normal(1, k, n, scale=k**-0.5)
        ours = {
            f"{t.m}x{t.n}{t.split}{t.minor}": functools.partial(persistent_matmul.persistent_matmul, tiles=t)
            for tiles in persistent_matmul.TILES
            for t in ((tiles, dataclasses.replace(tiles, minor="n")) if _SWEEP.value else (tiles,))
        }
        if _SWEEP.value and (shipped := shipped_matmul()) is not None:
            ours |= shipped
        case = Case("persistent_matmul", (m, k, n), persistent_matmul.reference, {"XLA": jnp.matmul}, ours, (a, b))
        yield case
        if m * n >= 4096 * 28672:
            # XLA cannot be given a budget: its time with all multiprocessors is what there is to compare with.
            budget = functools.partial(persistent_matmul.persistent_matmul, num_sms=100)
            yield dataclasses.replace(case, ours={"100 SMs": budget}, label="100sms")


def shipped_matmul() -> dict[str, Callable[..., Any]] | None:
    """JAX's own Hopper matmul, to compare with; it takes all multiprocessors."""
    try:
        from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as shipped
    except ImportError:
        return None
    axis = shipped.MatmulDimension
    config = shipped.TuningConfig(
        tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, grid_minor_dim=axis.M, grid_tile_width=8,
        wg_dimension=axis.N,
    )  # fmt: skip
    wide = dataclasses.replace(config, tile_m=64, tile_n=256, wg_dimension=axis.M)
    return {
        name: lambda a, b, config=config: shipped.matmul(a, b, None, config)
        for name, config in (("shipped 128x128n", config), ("shipped 64x256m", wide))
    }


def matmuls_and_activations() -> Iterator[Case]:
    """A projection of one micro-batch beside the activation of another: Llama-3-8B."""
    tokens, width, ffn = 4096, 4096, 14336
    gate_up = normal(2, tokens, 2 * ffn)
    for n in (width, 6144, 2 * ffn):
        a, b = normal(0, tokens, width), normal(1, width, n, scale=width**-0.5)
        tunings = {"default": None, "wide": matmul_silu.WIDE} if _SWEEP.value else {"default": None}
        if _SWEEP.value:
            wide = hopper.Tiles(stages=3, minor="n")
            tall = hopper.Tiles(m=256, n=128, stages=3, split="m", minor="n")
            deep = hopper.Tiles(stages=4, minor="n", slots=1)
            square = hopper.Tiles(m=128, n=128, stages=4, split="m", minor="n")
            registers = (152, 40, 168)
            tunings |= {
                "tall n": matmul_silu.Tuning(tiles=tall),
                "panel 4": matmul_silu.Tuning(tiles=dataclasses.replace(wide, panel=4)),
                "panel 16": matmul_silu.Tuning(tiles=dataclasses.replace(wide, panel=16)),
                "2 in flight": matmul_silu.Tuning(tiles=wide, depth=2),
                "4 stages": matmul_silu.Tuning(tiles=deep, rows=4, depth=2),
                "square": matmul_silu.Tuning(tiles=square, registers=registers),
                "square m": matmul_silu.Tuning(tiles=dataclasses.replace(square, minor="m"), registers=registers),
                "square 5": matmul_silu.Tuning(
                    tiles=dataclasses.replace(square, stages=5), depth=2, registers=registers
                ),
            }
        ours = {name: functools.partial(matmul_silu.matmul_silu, tuning=tuning) for name, tuning in tunings.items()}
        yield Case(
            "matmul_silu",
            (tokens, width, n, tokens, ffn),
            matmul_silu.reference,
            {"one after the other": matmul_silu.reference, "concurrent": matmul_silu.reference},
            ours,
            (a, b, gate_up),
            bytes=gate_up.nbytes * 3 // 2,
            limits=(lambda a, b, _: a @ b,),
        )


def mixed_batches() -> Iterator[Case]:
    """A prompt's attention beside that of decoding rows to full caches: Llama-3-8B.

    XLA's are one after the other in one program, but for "concurrent". The limit is the longer of the two alone:
    cuDNN's prefill, or the caches at the rate of a copy.
    """
    heads, kv_heads, head_dim = 32, 8, 128
    decodes = {"cuDNN": cudnn_decode, "XLA": xla_decode} | shipped_decode()

    def one_after_the_other(decode: Callable[..., jax.Array]) -> Callable[..., Any]:
        return lambda q, k, v, *rows: (cudnn_prefill(q, k, v), decode(*rows))

    for tokens, rows, capacity in (
        (1024, 16, 4096),
        (1024, 64, 1024),
        (2048, 16, 8192),
        (2048, 64, 2048),
        (2048, 64, 4096),
        (4096, 16, 8192),
        (4096, 64, 4096),
        (4096, 128, 2048),
        (4096, 128, 8192),
    ):
        q = normal(0, 1, tokens, heads, head_dim)
        k, v = (normal(i, 1, tokens, kv_heads, head_dim) for i in (1, 2))
        k_cache, v_cache = (normal(i, rows, capacity, kv_heads, head_dim) for i in (3, 4))
        args = q, k, v, normal(5, rows, heads, head_dim), k_cache, v_cache, jnp.full(rows, capacity, jnp.int32)
        tunings = {"default": mixed_attention.Tuning()}
        if _SWEEP.value:
            queues = itertools.product(((3, 5), (4, 3), (2, 7)), (None, 256, 1024))
            tunings |= {f"{t} {c} {part}": mixed_attention.Tuning(t, c, part) for (t, c), part in queues}
        yield Case(
            "mixed_attention",
            mixed_attention.key(*args),
            mixed_attention.reference,
            {f"cuDNN, then {name}": one_after_the_other(decode) for name, decode in decodes.items()}
            | {"concurrent": one_after_the_other(cudnn_decode)},
            {
                name: functools.partial(mixed_attention.mixed_attention, tuning=tuning)
                for name, tuning in tunings.items()
            },
            args,
            bytes=k_cache.nbytes + v_cache.nbytes,
            limits=(lambda q, k, v, *rows: (cudnn_prefill(q, k, v), rows[0]),),
            chain=lambda args, result: (result[0], *args[1:3], result[1], *args[4:]),
            repeat=4,
        )


def cudnn_prefill(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def cudnn_decode(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    return dense_decode(q, k, v, lengths, "cudnn")


def xla_decode(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    return dense_decode(q, k, v, lengths, "xla")


def dense_decode(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, implementation: Any) -> jax.Array:
    return jax.nn.dot_product_attention(
        q[:, None],
        k,
        v,
        query_seq_lengths=jnp.ones_like(lengths),
        key_value_seq_lengths=lengths,
        implementation=implementation,
    )[:, 0]


def shipped_decode() -> dict[str, Callable[..., jax.Array]]:
    """JAX's own split attention for decoding, to compare with."""
    try:
        from jax.experimental.pallas.ops.gpu import decode_attention as shipped
    except ImportError:
        return {}

    def decode(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        return shipped.gqa(q, k, v, kv_seq_len=lengths).astype(q.dtype)

    return {"JAX's Pallas kernel": decode}


def all_reduces() -> Iterator[Case]:
    """The all-reduce of a decoding step with the norm behind it, over all devices: in a plan, against XLA.

    The dispatcher's kernel for sums reads the peers' memory; the norm is XLA's.
    """
    if (mesh := whole_mesh()) is None:
        return
    devices = mesh.size

    def xla(x: jax.Array, residual: jax.Array, weight: jax.Array) -> Any:
        return add_rms_norm.reference(jax.lax.psum(x, "model"), residual, weight)

    def exact(x: jax.Array, residual: jax.Array, weight: jax.Array) -> Any:
        normed, total = add_rms_norm.reference(jax.lax.psum(x.astype(jnp.float32), "model"), residual, weight)
        return normed.astype(x.dtype), total

    dispatched = functools.partial(df.dynaflow, scheduler=df.strategies.Sequential(), backend="dispatch")

    width = 4096
    for rows in (16, 64, 128, 256, 512):
        x, residual, weight = normal(0, devices * rows, width), normal(1, rows, width), normal(2, width)
        yield Case(
            "all_reduce_norm",
            (rows, width, devices),
            exact,
            {"psum, then norm": xla, "one-shot psum, then norm": xla},
            {"dispatched": xla},
            (placed(x, mesh, P("model")), placed(residual, mesh, P()), placed(weight, mesh, P())),
            limits=(add_rms_norm.reference,),
            chain=lambda args, result: (*result, args[2]),
            repeat=16,
            wrap=functools.partial(
                jax.shard_map, mesh=mesh, in_specs=(P("model"), P(), P()), out_specs=P(), check_vma=False
            ),
            whole={"dispatched": dispatched},
            label="dispatched",
        )


def scattered() -> Iterator[Case]:
    """The projections behind attention and MLP of Llama-3-8B, tensor-parallel, with the reduce-scatter behind them."""
    if (mesh := whole_mesh()) is None:
        return
    for tokens, k in ((1024, 4096), (4096, 4096), (4096, 14336), (8192, 14336)):
        a, b = normal(0, tokens, k), normal(1, k, 4096, scale=k**-0.5)

        def xla(a: jax.Array, b: jax.Array) -> jax.Array:
            return jax.lax.psum_scatter(a @ b, "model", scatter_dimension=0, tiled=True)

        yield Case(
            "matmul_reduce_scatter",
            (tokens, k // mesh.size, 4096, mesh.size),
            functools.partial(matmul_reduce_scatter.reference, axis_name="model"),
            {"matmul, then psum_scatter": xla},
            {"default": functools.partial(matmul_reduce_scatter.matmul_reduce_scatter, axis_name="model")},
            (placed(a, mesh, P(None, "model")), placed(b, mesh, P("model"))),
            limits=(jnp.matmul,),
            wrap=functools.partial(
                jax.shard_map, mesh=mesh, in_specs=(P(None, "model"), P("model")), out_specs=P("model"), check_vma=False
            ),
        )


def gathered() -> Iterator[Case]:
    """The projections before attention and in the MLP of Llama-3-8B, tensor-parallel, behind their all-gather."""
    if (mesh := whole_mesh()) is None:
        return
    for tokens, n in ((1024, 6144), (4096, 6144), (4096, 28672), (8192, 28672)):
        a, b = normal(0, tokens, 4096), normal(1, 4096, n, scale=4096**-0.5)

        def xla(a: jax.Array, b: jax.Array) -> jax.Array:
            return jax.lax.all_gather(a, "model", tiled=True) @ b

        yield Case(
            "all_gather_matmul",
            (tokens // mesh.size, 4096, n // mesh.size, mesh.size),
            functools.partial(all_gather_matmul.reference, axis_name="model"),
            {"all_gather, then matmul": xla},
            {
                f"panel {panel}": functools.partial(all_gather_matmul.all_gather_matmul, axis_name="model", panel=panel)
                for panel in ((1, 4, 8) if _SWEEP.value else (8,))
            },
            (placed(a, mesh, P("model")), placed(b, mesh, P(None, "model"))),
            limits=(lambda a, b: jnp.tile(a, (mesh.size, 1)) @ b,),
            wrap=functools.partial(
                jax.shard_map,
                mesh=mesh,
                in_specs=(P("model"), P(None, "model")),
                out_specs=P(None, "model"),
                check_vma=False,
            ),
        )


def experts() -> Iterator[Case]:
    """The matmuls of 32 experts, top 8, with the groups that a random router makes: plain, gated, and back."""
    groups = 32
    for rows, (k, n) in itertools.product((4096, 32768), ((4096, 1536), (4096, 3072), (1536, 4096))):
        x, weights = normal(0, rows, k), normal(1, groups, k, n, scale=k**-0.5)
        chosen = np.random.default_rng(0).integers(0, groups, rows)
        sizes = jnp.asarray(np.bincount(chosen, minlength=groups), jnp.int32)
        ours = {
            f"{stages} stages, panel {panel}": functools.partial(
                grouped_matmul.grouped_matmul, stages=stages, panel=panel
            )
            for stages, panel in (((6, 8), (2, 8), (4, 8), (4, 1), (4, 16)) if _SWEEP.value else ((6, 8),))
        }
        yield Case(
            "grouped_matmul",
            (rows, k, n, groups),
            grouped_matmul.reference,
            {"ragged_dot": jax.lax.ragged_dot},
            ours,
            (x, weights, sizes),
            limits=(lambda x, w, _: jnp.einsum("grk,gkn->grn", x.reshape(groups, -1, x.shape[-1]), w),),
        )


def whole_mesh() -> Any:
    """A mesh of all devices; ``None`` if there is only one."""
    if jax.device_count() < 2:
        print("only one device: no communication to measure", flush=True)
        return None
    return jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))


def placed(value: jax.Array, mesh: Any, spec: P) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, spec))


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "all_reduce_norm": all_reduces,
    "matmul_reduce_scatter": scattered,
    "all_gather_matmul": gathered,
    "grouped_matmul": experts,
    "add_rms_norm": norms,
    "rms_norm": norms_alone,
    "matmul_silu": matmuls_and_activations,
    "mixed_attention": mixed_batches,
    "persistent_matmul": matmuls,
}

if __name__ == "__main__":
    app.run(main)
