"""Models whose operators have kernels in them, against the best that XLA does with the same functions.

    JAX_PLATFORMS=cuda python -m examples.benchmarks.with_kernels [--quick] [--json=FILE] [--update_table]

``dense`` is a stack of norms, additions and gated matmuls of Llama-3-8B's sizes; ``experts`` one of 32 experts, 8 to a
token, multiplied by ``jax.lax.ragged_dot``. The models know of no kernel: ``WithKernels(Sequential())`` finds the
places, here all of them, worthwhile or not. The limit is the same without norms, or with all rows in one group as a
plain matmul.

``--quick`` simulates the kernels on the CPU, to see that it works; its times mean nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import dynaflow_jax as df
from examples.benchmarks.chains import rows
from examples.benchmarks.keep import keep
from examples.benchmarks.timing import OPTIONS, medians
from pallas_kernels import Kernels, measured

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_UPDATE = flags.DEFINE_bool("update_table", False, "Whether to write pallas_kernels/measured.json.")
_QUICK = flags.DEFINE_bool("quick", False, "Whether only to see that it works.")

BOUND = 0.02
"""The most that results may differ, of the largest magnitude: kernels round elsewhere, in bfloat16."""

Places = tuple[str, list[tuple[int, ...]]]
"""A kernel, and the shapes by which its measurements are kept (its module's ``key``)."""
Norm = Callable[[jax.Array, jax.Array], jax.Array]


def rms_norm(weight: jax.Array, x: jax.Array) -> jax.Array:
    h = x.astype(jnp.float32)
    return (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * weight).astype(x.dtype)


def dense(layers: Sequence[Any], x: jax.Array, norm: Norm = rms_norm) -> jax.Array:
    """Layers of an addition, a norm, and two matmuls with a gated activation between them."""
    h, residual = x, jnp.zeros_like(x)
    for i, (weight, up, down) in enumerate(layers):
        with df.mark(f"layer_{i}"):
            residual = residual + h
            gate, value = jnp.split(norm(weight, residual) @ up, 2, axis=-1)
            h = (jax.nn.silu(gate) * value) @ down
    return residual + h


def experts(layers: Sequence[Any], x: jax.Array, multiply: Callable[..., jax.Array] = jax.lax.ragged_dot) -> jax.Array:
    """Layers in which each token goes through the experts that its router likes best."""
    for i, (router, up, down) in enumerate(layers):
        count, chosen = up.shape[0], min(8, up.shape[0] // 2)
        with df.mark(f"layer_{i}"):
            scores, which = jax.lax.top_k(x @ router, chosen)
            order = jnp.argsort(which.reshape(-1))
            sizes = jnp.bincount(which.reshape(-1), length=count).astype(jnp.int32)
            gate, value = jnp.split(multiply(x[order // chosen], up, sizes), 2, axis=-1)
            out = multiply(jax.nn.silu(gate) * value, down, sizes)
            parts = jnp.zeros_like(out).at[order].set(out).reshape(len(x), chosen, -1)
            x = x + (parts * jax.nn.softmax(scores)[..., None]).sum(1)
    return x


def main(argv: Sequence[str]) -> None:
    del argv
    quick, found = _QUICK.value, []
    for tokens in (128,) if quick else (64, 1024, 4096):
        width, hidden, depth = (128, 256, 2) if quick else (4096, 14336, 4)
        layers = [(jnp.ones(width), normal((width, 2 * hidden)), normal((hidden, width))) for _ in range(depth)]
        places = ("add_rms_norm", [(tokens, width, 0)])
        found.append(measure(f"dense-{tokens}", places, dense, layers, rows(tokens, width), norm=lambda _, x: x))
        keep(_JSON.value, "with_kernels", found)
    for tokens in (64,) if quick else (512, 4096):
        width, hidden, count, depth = (128, 128, 4, 1) if quick else (4096, 1536, 32, 2)
        layers = [
            (normal((width, count)), normal((count, width, 2 * hidden)), normal((count, hidden, width)))
            for _ in range(depth)
        ]
        sizes = tokens * min(8, count // 2)
        places = ("grouped_matmul", [(sizes, width, 2 * hidden, count), (sizes, hidden, width, count)])
        plain = {"multiply": lambda x, w, _: x @ w[0]}
        found.append(measure(f"experts-{tokens}", places, experts, layers, rows(tokens, width), **plain))
        keep(_JSON.value, "with_kernels", found)


def normal(shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) / shape[-2] ** 0.5


def measure(
    case: str, places: Places, fun: Callable[..., Any], layers: Any, x: jax.Array, **without: Any
) -> dict[str, Any]:
    """One model; ``without`` is what makes it the limit."""
    kernel, shapes = places
    kernels = Kernels(only=(kernel,), everywhere=True, interpret=_QUICK.value)
    scheduler = df.strategies.WithKernels(df.strategies.Sequential(), kernels)
    on_gpu = jax.default_backend() == "gpu"
    flows = {
        backend: df.dynaflow(fun, scheduler=scheduler, batch_axes=(None, None), backend=backend)
        for backend in (("xla", "dispatch") if on_gpu else ("xla",))
    }
    ways = OPTIONS if on_gpu else {"default": {}}
    contenders: dict[str, Any] = {
        f"XLA, {name}": jax.jit(fun, compiler_options=options) for name, options in ways.items()
    }
    contenders |= {f"ours, {backend}": jax.jit(flow) for backend, flow in flows.items()}
    contenders["limit"] = jax.jit(lambda layers, x: fun(layers, x, **without))
    # XLA takes tens of milliseconds for a ``ragged_dot``.
    times = medians(contenders, dict.fromkeys(contenders, (layers, x)), *((1, 1) if _QUICK.value else (5, 6)))
    best, ours = (min((n for n in times if n.startswith(who)), key=times.__getitem__) for who in ("XLA", "ours"))
    want, got = (np.asarray(contenders[name](layers, x), np.float32) for name in (best, ours))
    difference = float(np.abs(got - want).max() / np.abs(want).max())
    replaced = sum(step.fn is not None for step in flows["xla"].plan(layers, x).steps)
    row = {
        "case": case,
        "kernel": kernel,
        "shapes": shapes,
        "best_xla_us": times[best],
        "best_xla": best.removeprefix("XLA, "),
        "ours_us": times[ours],
        "ours": ours.removeprefix("ours, "),
        "limit_us": times["limit"],
        "operators_with_kernels": replaced,
        "difference": difference,
        "equal": difference <= BOUND,
    }
    print(
        f"{case:14s} XLA {times[best]:9.1f} µs ({best}), with kernels {times[ours]:9.1f} µs ({ours}), "
        f"ratio {times[best] / times[ours]:.3f}, limit {times['limit']:9.1f} µs, {replaced} operators with kernels, "
        f"difference {difference:.1e}{'' if row['equal'] else ', WRONG'}",
        flush=True,
    )
    if _UPDATE.value:
        update(row)
    return row


def update(row: dict[str, Any]) -> None:
    """Writes a model's speedup into the shipped table; none where the results are wrong."""
    table, kind = measured.load(), jax.devices()[0].device_kind
    ratio = row["best_xla_us"] / row["ours_us"] if row["equal"] else 0.0
    for shape in row["shapes"]:
        table = measured.recorded(table, row["kernel"] + measured.IN_PLACE, kind, shape, ratio)
    measured.save(table)


if __name__ == "__main__":
    app.run(main)
