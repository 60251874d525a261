"""What a server runs on its devices: prefill and decode of the example decoder, compiled once for each bucket.

Batches have a power of two of rows, and prompts a power of two of tokens, so that there are few programs. How a
program's operators are scheduled depends on the load, and there are two ways to say so:

- ``"switch"``: the program holds a plan for few tokens and one for many, and the number of tokens really in the batch,
  which padding hides from shapes, picks (``df.strategies.Switch``);
- ``"context"``: there is a program for each load, its strategy knows which (``context=``), and the server picks.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from examples.attention.decoder import Config, apply, init, partition

AXIS = "model"
SCHEDULES = ("plain", "switch", "context")


class Batch(NamedTuple):
    """The texts that are being continued, a row for each; rows without one hold anything.

    Attributes:
      token: each row's last token, which is not in the cache yet, ``int32[rows]``.
      position: how many tokens are in the cache, ``int32[rows]``.
      cache: the decoder's, with rows on axis 0 of every value.
    """

    token: jax.Array
    position: jax.Array
    cache: Any


class ByLoad(df.strategies.NanoFlow):
    """Two micro-batches where the context says that there is much to do, one where there is little."""

    def split(self, info: df.InputInfo) -> Sequence[int]:
        return super().split(info) if info.context == "busy" else [info.batch_size]


@dataclasses.dataclass
class Engine:
    """Prefill and decode, under one way of scheduling.

    Attributes:
      config: the decoder; all of it, if it is sharded.
      schedule: ``"plain"``, just ``jax.jit``; or one of the two ways above.
      busy: from how many tokens in a batch on it is split in two.
      devices: over how many its heads and hidden units are sharded (tensor parallelism).
      seed: of the weights.
      dtype: of the weights and the cache.
      least_rows: fewest rows of a batch; a power of two. Fewer programs, with more padding.
      compiler_options: XLA's, for prefill and decode.
      picked: how often a batch was idle and how often busy.
    """

    config: Config
    schedule: str = "switch"
    busy: int = 64
    devices: int = 1
    seed: int = 0
    dtype: Any = jnp.float32
    least_rows: int = 1
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    picked: dict[str, int] = dataclasses.field(default_factory=lambda: {"idle": 0, "busy": 0})

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is one of {', '.join(SCHEDULES)}, not {self.schedule!r}.")
        prefill, decode = apply(self.config.on(self.devices, AXIS) if self.devices > 1 else self.config)

        # ``count``, the tokens really in the batch, is for the choice of a plan alone.
        def prefill_greedily(params: Any, tokens: jax.Array, lengths: jax.Array, count: Any) -> tuple[Any, Any]:
            logits, cache = prefill(params, tokens, lengths)
            return jnp.argmax(logits, -1).astype(jnp.int32), cache

        def decode_greedily(params: Any, token: jax.Array, position: jax.Array, cache: Any, count: Any) -> Batch:
            logits, cache = decode(params, token, position, cache)
            return Batch(jnp.argmax(logits, -1).astype(jnp.int32), position + 1, cache)

        self.params = jax.tree.map(lambda w: w.astype(self.dtype), init(self.config, self.seed))
        heads = P(None, None, AXIS)  # of a cache
        if self.devices > 1:
            mesh = jax.make_mesh((self.devices,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[: self.devices])
            sharded = functools.partial(jax.shard_map, mesh=mesh)
            specs = partition(self.params, AXIS)
            prefill_greedily = sharded(prefill_greedily, in_specs=(specs, P(), P(), P()), out_specs=(P(), heads))
            decode_greedily = sharded(
                decode_greedily, in_specs=(specs, P(), P(), heads, P()), out_specs=Batch(P(), P(), heads)
            )
            place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))  # noqa: E731
            self.params = jax.tree.map(place, self.params, specs)
        self._prefill = self._compiled(prefill_greedily, (None, 0, 0, None))
        self._decode = self._compiled(decode_greedily, (None, 0, 0, 0, None), donate=3)
        self._insert = jax.jit(_insert, donate_argnums=0)
        self._take = jax.jit(_take)

    def _compiled(self, fun: Callable[..., Any], axes: Any, donate: int | None = None) -> dict[str, Any]:
        """The function by load, jitted."""
        donated = () if donate is None else donate
        jit = functools.partial(jax.jit, donate_argnums=donated, compiler_options=dict(self.compiler_options))
        if self.schedule == "plain":
            return dict.fromkeys(("idle", "busy"), jit(fun))
        if self.schedule == "switch":
            plans = df.strategies.Switch([df.strategies.Sequential(), df.strategies.NanoFlow(2)], self._select)
            flow = df.dynaflow(fun, scheduler=plans, batch_axes=axes, donate_argnums=donated)
            return dict.fromkeys(("idle", "busy"), jit(flow))
        flow = functools.partial(df.dynaflow, fun, scheduler=ByLoad(2), batch_axes=axes, donate_argnums=donated)
        return {load: jit(flow(context=load)) for load in ("idle", "busy")}

    def _select(self, *args: Any) -> Any:
        """Whether the second plan of the two runs."""
        *_, count = args
        return count >= self.busy

    def _load(self, count: int) -> str:
        load = "busy" if count >= self.busy else "idle"
        self.picked[load] += 1
        return load

    def rows(self, count: int) -> int:
        """Rows of a batch that holds so many requests."""
        return bucket(count, self.least_rows)

    def prefill(self, prompts: Sequence[np.ndarray]) -> Batch:
        """Reads prompts, padded to a bucket of rows and one of tokens; the first rows are theirs."""
        rows, length = self.rows(len(prompts)), bucket(max(map(len, prompts)), least=8)
        tokens, lengths = np.zeros((rows, length), np.int32), np.ones(rows, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        count = sum(map(len, prompts))
        token, cache = self._prefill[self._load(count)](self.params, tokens, lengths, count)
        return Batch(token, jnp.asarray(lengths), cache)

    def decode(self, batch: Batch, active: int) -> Batch:
        """Adds a token to every row; the cache that goes in is used up."""
        return self._decode[self._load(active)](self.params, *batch, active)

    def insert(self, batch: Batch, new: Batch, rows: Sequence[int]) -> Batch:
        """``batch`` with the first rows of ``new`` in the places ``rows``; its cache is used up."""
        size = len(new.token)
        places = np.full(size, len(batch.token), np.int32)  # those out of range are dropped
        places[: len(rows)] = rows
        cache, rest = self._insert(batch.cache, batch[:2], new, places)
        return Batch(*rest, cache)

    def take(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """A batch of these rows, in a bucket that fits them; those that do not exist are new."""
        places = np.full(self.rows(len(rows)), -1, np.int32)
        places[: len(rows)] = rows
        return self._take(batch, places)


def bucket(count: int, least: int = 1) -> int:
    """The smallest power of two, and of ``least``, that holds ``count``."""
    return max(least, 1 << (count - 1).bit_length())


def _insert(cache: Any, rest: tuple[jax.Array, jax.Array], new: Batch, places: jax.Array) -> tuple[Any, Any]:
    put = lambda old, new: old.at[places].set(new, mode="drop")  # noqa: E731
    return jax.tree.map(put, cache, new.cache), jax.tree.map(put, rest, tuple(new[:2]))


def _take(batch: Batch, places: jax.Array) -> Batch:
    wrapped = jnp.where(places < 0, len(batch.token), places)
    return jax.tree.map(lambda x: x.at[wrapped].get(mode="fill", fill_value=0), batch)
