"""What the benchmarks of several GPUs share: Llama's blocks, XLA's ways to run them, and the comparison."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.benchmarks.timing import medians

XLA: dict[str, dict[str, Any]] = {
    "default": {},
    "latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "no command buffers": {"xla_gpu_enable_command_buffer": ""},
    "latency hiding, no command buffers": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_command_buffer": "",
    },
}
"""Compiler options under which XLA may overlap communication; the best one counts."""


WRONG = 0.1
"""More than bfloat16 and other products' orders of additions make of a few layers, as a part of the result's norm."""


def norm(x: jax.Array) -> jax.Array:
    """RMS norm without a scale."""
    return x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6).astype(x.dtype)


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of every head, on arrays of shape (batch, tokens, heads, width of a head)."""
    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)


def attention(x: jax.Array, qkv: jax.Array, out: jax.Array, head: int, attend: Attend = attend) -> jax.Array:
    """Causal attention on ``x`` of shape (batch, tokens, width), with as many heads as ``qkv`` has."""
    batch, tokens, _ = x.shape
    q, k, v = jnp.split((norm(x) @ qkv).reshape(batch, tokens, -1, head), 3, axis=2)
    return attend(q, k, v).reshape(batch, tokens, -1) @ out


def normal(mesh: Any, shape: tuple[int, ...], spec: Any, seed: int, scale: float = 0.02) -> jax.Array:
    """Random bfloat16 numbers, sharded."""
    return _drawing(tuple(shape), NamedSharding(mesh, spec), scale)(seed)


def mesh_of(axis: str, devices: int = 2) -> jax.sharding.Mesh:
    """The first devices, along one axis."""
    return jax.make_mesh((devices,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def layers(mesh: Any, shapes: Sequence[Sequence[int]], specs: Sequence[P], depth: int) -> list[tuple[jax.Array, ...]]:
    """Random weights: in each of so many layers one array for each shape, sharded as its spec says."""
    return [
        tuple(normal(mesh, tuple(s), spec, 4 * i + j) for j, (s, spec) in enumerate(zip(shapes, specs, strict=True)))
        for i in range(depth)
    ]


@functools.cache
def _drawing(shape: tuple[int, ...], sharding: NamedSharding, scale: float) -> Callable[[int], jax.Array]:
    """What draws arrays of a shape, compiled once for all of them."""
    return jax.jit(
        lambda seed: (jax.random.normal(jax.random.key(seed), shape) * scale).astype(jnp.bfloat16),
        out_shardings=sharding,
    )


@jax.jit
def _squares(got: jax.Array, want: jax.Array) -> jax.Array:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.stack([jnp.sum((got - want) ** 2), jnp.sum(want**2)])


def _difference(got: Any, want: Any) -> float:
    """The norm of the difference of two pytrees of arrays, relative to that of the second."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    difference, whole = np.sum([np.asarray(_squares(a, b), np.float64) for a, b in pairs], axis=0)
    return float(np.sqrt(difference / whole))


def contend(
    case: str,
    ours: dict[str, Callable[..., Any]],
    theirs: dict[str, Callable[..., Any]],
    limit: Callable[..., Any],
    reference: dict[str, str],
    arguments: Sequence[Any],
    rounds: int,
    calls: int,
) -> dict[str, Any]:
    """Measures contenders in turns and prints how they did.

    Args:
      case: its name.
      ours: dispatched plans.
      theirs: XLA's programs.
      limit: the function without communication.
      reference: for each of ours, whose result of theirs it is compared with.
      arguments: of all.
      rounds: how many turns.
      calls: how many calls in a turn.
    """
    differences = {}
    wanted = {name: theirs[name](*arguments) for name in set(reference.values())}
    for name, fun in ours.items():
        differences[name] = _difference(fun(*arguments), wanted[reference[name]])
        if differences[name] > WRONG:
            raise AssertionError(f"{case}: {name} is wrong: {differences[name]:.1e} from {reference[name]}.")
    wanted.clear()
    funs = {**ours, **theirs, "limit": limit}
    times = medians(funs, dict.fromkeys(funs, arguments), rounds, calls)
    best, own = min(theirs, key=times.__getitem__), min(ours, key=times.__getitem__)
    exposed = times[best] - times["limit"]
    hidden = round((times[best] - times[own]) / exposed, 3) if exposed > 0 else None
    print(
        f"{case:10s} XLA {times[best]:8.1f} µs ({best}), ours {times[own]:8.1f} µs ({own}), limit "
        f"{times['limit']:8.1f} µs; ratio {times[best] / times[own]:.3f}, at most {times[best] / times['limit']:.3f}, "
        f"hidden {hidden}, differences {', '.join(f'{d:.1e}' for d in differences.values())}\n    "
        + ", ".join(f"{name} {time}" for name, time in times.items()),
        flush=True,
    )
    return {
        "case": case,
        "best_xla_us": times[best],
        "best_xla": best,
        "ours_us": times[own],
        "ours": own,
        "limit_us": times["limit"],
        "hidden": hidden,
        "difference": max(differences.values()),
        "equal": not any(differences.values()),
    }
