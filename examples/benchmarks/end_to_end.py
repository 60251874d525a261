"""Two GPUs: Llama-3-8B's shape end to end, prefill and decode, tensor-parallel, against XLA: tokens per second.

    JAX_PLATFORMS=cuda,cpu python -m examples.benchmarks.end_to_end [--quick] [--json=FILE] [--cases=decode-16,...]

32 layers (width 4096, 32 heads, 8 of keys and values, hidden 14336, vocabulary 128256, bfloat16) inside ``shard_map``:
each GPU has half of the heads, of the hidden units and of the vocabulary. Prefill takes prompts of 1024 tokens and
gives the last token's logits and all keys and values; a step of decoding takes one token of every sequence and 1024
earlier keys and values, and gives logits and the new keys and values (a cache is appended to after the step, in either
case). XLA's best of: by default, with the latency-hiding scheduler, and without command buffers. The limit is the same
function without communication. Contenders take turns in one process; medians.

``--quick`` is for a machine without a GPU: small sizes, few calls, the host twin; its numbers mean nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from examples.benchmarks.keep import keep
from examples.benchmarks.overlap import XLA, attend, contend, layers, mesh_of, norm, normal
from examples.benchmarks.parallel import mlp

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_QUICK = flags.DEFINE_bool("quick", False, "Whether only to see that it works.")
_CASES = flags.DEFINE_list("cases", None, "The cases to measure, such as prefill-8192; all by default.")

OPTIONS = {name: XLA[name] for name in ("default", "latency hiding", "no command buffers")}
Reduce = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model's, on all devices together."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    hidden: int = 14336
    vocabulary: int = 128256
    context: int = 1024

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Of a layer's weights: queries, keys and values; attention's output; gate and up; down."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head
        return (
            (self.width, qkv),
            (self.heads * self.head, self.width),
            (self.width, 2 * self.hidden),
            (self.hidden, self.width),
        )


SMALL = Sizes(layers=2, width=64, heads=4, kv_heads=2, head=16, hidden=96, vocabulary=128, context=8)
COLUMNS, ROWS = P(None, "tp"), P("tp")
LAYER = (COLUMNS, ROWS, COLUMNS, ROWS)
CACHE = P(None, "tp")  # (sequences, heads, tokens, width of a head)


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions (arXiv 2104.09864) on ``x`` of shape (batch, tokens, heads, width of a head)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 500_000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def projected(x: jax.Array, qkv: jax.Array, positions: jax.Array, sizes: Sizes) -> tuple[jax.Array, ...]:
    """This device's queries, keys and values, each of shape (batch, tokens, heads, width of a head)."""
    y = (norm(x) @ qkv).reshape(*x.shape[:2], -1, sizes.head)
    own = y.shape[2] * sizes.kv_heads // (sizes.heads + 2 * sizes.kv_heads)
    q, k, v = y[:, :, : -2 * own], y[:, :, -2 * own : -own], y[:, :, -own:]
    return rotated(q, positions), rotated(k, positions), v


def attend_cached(q: jax.Array, k: jax.Array, v: jax.Array, cache: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Attention of one token to itself and to the cache, in the manner of grouped queries."""
    batch, _, heads, head = q.shape
    q = q.reshape(batch, k.shape[2], -1, head) * head**-0.5
    earlier = jnp.einsum("bkgd,bktd->bkgt", q, cache[0], preferred_element_type=jnp.float32)
    own = jnp.einsum("bkgd,bkd->bkg", q, k[:, 0], preferred_element_type=jnp.float32)[..., None]
    weights = jax.nn.softmax(jnp.concatenate([earlier, own], -1), -1).astype(v.dtype)
    mixed = jnp.einsum("bkgt,bktd->bkgd", weights[..., :-1], cache[1]) + weights[..., -1:] * v[:, 0, :, None]
    return mixed.reshape(batch, 1, heads * head)


def decoder(
    weights: Any, tokens: jax.Array, caches: Any, *, sizes: Sizes, reduce: Reduce
) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Logits of the last token, of this device's share of the vocabulary, and the new keys and values of every layer.

    Args:
      weights: this device's.
      tokens: of shape (batch, tokens).
      caches: earlier keys and values of every layer, for one more token; ``None`` for prompts.
      sizes: the model's.
      reduce: adds up the devices' parts.
    """
    positions = jnp.arange(tokens.shape[1]) + (sizes.context if caches else 0)
    with df.mark("embed"):
        x = weights["embed"][tokens]
    new = []
    for i, (qkv, out, up, down) in enumerate(weights["layers"]):
        with df.mark("attention"):
            q, k, v = projected(x, qkv, positions, sizes)
            if caches:
                y = attend_cached(q, k, v, caches[i]) @ out
            else:
                y = attend(q, k, v).reshape(*x.shape[:2], -1) @ out
            new.append((jnp.moveaxis(k, 2, 1), jnp.moveaxis(v, 2, 1)))
        x = x + reduce(y)
        with df.mark("mlp"):
            y = mlp(x, up, down)
        x = x + reduce(y)
    with df.mark("logits"):
        return (norm(x[:, -1]) @ weights["logits"]).astype(jnp.float32), new


def main(argv: Sequence[str]) -> None:
    del argv
    mesh = mesh_of("tp")
    sizes = SMALL if _QUICK.value else Sizes()
    cases = (("prefill", 2), ("decode", 4)) if _QUICK.value else (("prefill", 8), ("decode", 16), ("decode", 256))
    weights = {
        "embed": normal(mesh, (sizes.vocabulary, sizes.width), P(), 1, 1.0),
        "layers": layers(mesh, sizes.shapes, LAYER, sizes.layers),
        "logits": normal(mesh, (sizes.width, sizes.vocabulary), COLUMNS, 2),
    }
    rows = []
    for phase, batch in cases:
        name = f"{phase}-{batch * sizes.context if phase == 'prefill' else batch}"
        if _CASES.value is None or name in _CASES.value:
            rows.append(measure(mesh, name, sizes, weights, batch, phase == "decode"))
            keep(_JSON.value, "end_to_end", rows)


def measure(mesh: Any, name: str, sizes: Sizes, weights: Any, batch: int, decode: bool) -> dict[str, Any]:
    count = 1 if decode else sizes.context
    tokens = jax.random.randint(jax.random.key(0), (batch, count), 0, sizes.vocabulary)
    shape = (batch, sizes.kv_heads, sizes.context, sizes.head)
    caches = [tuple(normal(mesh, shape, CACHE, 2 * i + j, 1.0) for j in range(2)) for i in range(sizes.layers)]
    arguments = (weights, tokens, caches if decode else None)
    parts = {"embed": P(), "layers": [LAYER] * sizes.layers, "logits": COLUMNS}
    specs = (parts, P(), [(CACHE, CACHE)] * sizes.layers if decode else None)

    def mapped(fun: Callable[..., Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
        outs = (COLUMNS, [(CACHE, CACHE)] * sizes.layers)
        inner = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
        return jax.jit(inner, compiler_options=options)

    total = functools.partial(jax.lax.psum, axis_name="tp")
    model = functools.partial(decoder, sizes=sizes, reduce=total)
    axes = (None, 0, 0 if decode else None)
    ours = {
        f"k={k}": mapped(df.dynaflow(model, scheduler=strategy, batch_axes=axes, backend="dispatch"))
        for k, strategy in ((1, df.strategies.Sequential()), (2, df.strategies.NanoFlow(2, concurrent=True)))
    }
    theirs = {option: mapped(model, options) for option, options in OPTIONS.items()}
    limit = mapped(functools.partial(decoder, sizes=sizes, reduce=lambda y: y))
    rounds, calls = (1, 2) if _QUICK.value else (5, 40 if decode else 4)
    row = contend(name, ours, theirs, limit, dict.fromkeys(ours, "default"), arguments, rounds, calls)
    each = batch * count * 1e6
    row |= {"best_xla_tokens_per_s": each / row["best_xla_us"], "ours_tokens_per_s": each / row["ours_us"]}
    print(f"    tokens/s: XLA {row['best_xla_tokens_per_s']:.0f}, ours {row['ours_tokens_per_s']:.0f}", flush=True)
    return row


if __name__ == "__main__":
    app.run(main)
