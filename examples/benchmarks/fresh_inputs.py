"""Dispatched plans of all example models, called with fresh inputs over and over: are the results right every time?

    JAX_PLATFORMS=cuda,cpu python -m examples.benchmarks.fresh_inputs [--quick] [--calls=1000] [--json=FILE]

Where there are two devices, plans that communicate are among them: tensor-parallel and expert-parallel layers, and the
training steps of data-parallel and fully sharded weights.

Every call's result is compared twice. With the same partitions run one after the other on one stream it must be equal
bit by bit: whatever differs is a race. From the same plan lowered to XLA it may differ, because XLA fuses across what
are partitions here, so that a value is rounded once more or once less. One rounding is at most half a unit in the last
place, each operator adds one at most to what flows through the model, and independent ones add up as the square root
of their number; so the relative difference (of norms) must stay below ``4 sqrt(operators)`` units, the 4 for layers
that magnify what they are given. The unit is that of the activations, or of TF32 where a GPU multiplies float32 in it.

Inputs, the three runs and the comparison are programs of their own, so that arrays move in memory from call to call.
With ``--together`` they are one, which is quicker: for tens of thousands of calls.

``--quick`` is for a machine without a GPU: small sizes, few calls, the host twin.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from examples.benchmarks import chains, llama, parallel, training
from examples.benchmarks.keep import keep
from examples.benchmarks.overlap import layers, mesh_of
from examples.minilm import model as minilm

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_QUICK = flags.DEFINE_bool("quick", False, "Whether only to see that it works.")
_CASES = flags.DEFINE_list("cases", None, "Names of the models; all by default.")
_TOGETHER = flags.DEFINE_bool("together", False, "Whether a call is one program.")
_CALLS = flags.DEFINE_integer("calls", 1000, "Calls of each model.", lower_bound=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
      fun: of the weights and the inputs.
      weights: its weights.
      fresh: draws inputs, from a key.
      apart: a strategy of several streams.
      axes: where the batch is.
      mapped: from a function of one device to that of all.
    """

    fun: Callable[..., Any]
    weights: Any
    fresh: Callable[[jax.Array], tuple[Any, ...]]
    apart: df.OpScheduler
    axes: Any = (None, 0)
    mapped: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda fun: fun


def main(argv: Sequence[str]) -> None:
    del argv
    cases = models(_QUICK.value)
    if jax.device_count() > 1:
        cases |= parallel_models(_QUICK.value)
    cases = {name: case for name, case in cases.items() if _CASES.value is None or name in _CASES.value}
    calls = min(_CALLS.value, 5) if _QUICK.value else _CALLS.value
    keep(_JSON.value, "fresh_inputs", [check(name, case(), calls) for name, case in cases.items()])


def models(quick: bool) -> dict[str, Callable[[], Case]]:
    """The example models; each is made when it is its turn, so that one at a time is in memory."""
    halves = chains.StreamForEachMicroBatch(2, streams=2)
    rows, tokens = (4, 8) if quick else (16, 64)

    def of_llama() -> Case:
        config = llama.Config(1) if quick else llama.Config(4, width=512, heads=8, hidden=1408, vocab=1024)
        model = llama.Llama(config)
        draw = lambda key: (jax.random.randint(key, (rows, tokens), 0, config.vocab),)  # noqa: E731
        weights = jax.jit(model.init)(jax.random.key(0), *draw(jax.random.key(1)))
        return Case(model.apply, weights, draw, halves)

    def of_minilm() -> Case:
        small = {"vocab_size": 100, "hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 48}
        config = minilm.Config(**small) if quick else minilm.Config()
        model = minilm.MiniLM(config)

        def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            words, lengths = jax.random.split(key)
            length = jax.random.randint(lengths, (rows, 1), 1, tokens + 1)
            return jax.random.randint(words, (rows, tokens), 0, config.vocab_size), jnp.arange(tokens) < length

        weights = jax.jit(model.init)(jax.random.key(0), *draw(jax.random.key(1)))
        return Case(model.apply, weights, draw, halves, (None, 0, 0))

    def of_chain() -> Case:
        count, width, depth = (8, 32, 4) if quick else (256, 1024, 16)
        draw = lambda key: (jax.random.normal(key, (count, width), jnp.bfloat16),)  # noqa: E731
        return Case(chains.chain, chains.weights(width, depth), draw, halves)

    def of_branches() -> Case:
        count, width, depth = (8, 32, 4) if quick else (128, 1024, 16)
        draw = lambda key: ([jax.random.normal(k, (count, width), jnp.bfloat16) for k in jax.random.split(key, 4)],)  # noqa: E731
        wss = [chains.weights(width, depth, seed) for seed in range(4)]
        return Case(chains.branches, wss, draw, chains.StreamForEachName(), None)

    return {"llama": of_llama, "minilm": of_minilm, "chain": of_chain, "branches": of_branches}


def parallel_models(quick: bool) -> dict[str, Callable[[], Case]]:
    """Models of two devices, with the strategies that are for them."""
    mesh = mesh_of("x")
    width, hidden, head, depth, rows, tokens = (64, 96, 16, 2, 4, 8) if quick else (1024, 2048, 64, 4, 8, 64)
    columns = (P(None, "x"), P("x"), P(None, "x"), P("x"))

    def fresh(spec: P, *shape: int) -> Callable[[jax.Array], tuple[jax.Array]]:
        def draw(key: jax.Array) -> tuple[jax.Array]:
            drawn = jax.random.normal(key, shape).astype(jnp.bfloat16)
            return (jax.lax.with_sharding_constraint(drawn, NamedSharding(mesh, spec)),)

        return draw

    def on_both(*specs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        weights, inputs, outputs = specs
        return lambda fun: jax.shard_map(fun, mesh=mesh, in_specs=(weights, inputs), out_specs=outputs, check_vma=False)

    def of_tensor_parallel() -> Case:
        total = functools.partial(jax.lax.psum, axis_name="x")
        fun = functools.partial(parallel.tensor_parallel, reduce=total, head=head)
        weights = layers(mesh, training.shapes(width, hidden), columns, depth)
        overlapped = df.strategies.NanoFlow(2, concurrent=True)
        return Case(
            fun, weights, fresh(P(), rows, tokens, width), overlapped, mapped=on_both([columns] * depth, P(), P())
        )

    def of_expert_parallel() -> Case:
        experts, chosen = 8, 2
        routing = parallel.routes(tokens, experts, chosen)
        fun = functools.partial(parallel.expert_parallel, **parallel.exchanges("x"), routing=routing, head=head)
        specs = (P(), P(), P("x"), P("x"))
        shapes = ((width, 3 * width), (width, width), (experts, width, 2 * hidden // 4), (experts, hidden // 4, width))
        strategy = df.strategies.DualBatchOverlap()
        split = fresh(P("x"), 2 * rows, tokens, width)
        return Case(
            fun, layers(mesh, shapes, specs, depth), split, strategy, mapped=on_both([specs] * depth, P("x"), P("x"))
        )

    def of_data_parallel() -> Case:
        mean = functools.partial(df.collectives.all_reduce, axis_name="x", op="mean")
        fun = functools.partial(training.step, reduce=mean, head=head)
        weights = layers(mesh, training.shapes(width, hidden), (P(),) * 4, depth)
        strategy = df.strategies.GradientBuckets(4 << 20)
        split = fresh(P("x"), 2 * rows, tokens, width)
        return Case(fun, weights, split, strategy, None, on_both(P(), P("x"), (P("x"), P())))

    def of_sharded_weights() -> Case:
        gather = functools.partial(df.collectives.all_gather, axis_name="x")
        fun = functools.partial(training.step, gather=gather, head=head)
        weights = layers(mesh, training.shapes(width, hidden), (P("x"),) * 4, depth)
        strategy = df.strategies.ParameterPrefetch()
        split = fresh(P("x"), 2 * rows, tokens, width)
        return Case(fun, weights, split, strategy, None, on_both(P("x"), P("x"), (P("x"), P("x"))))

    return {
        "tensor parallel": of_tensor_parallel,
        "expert parallel": of_expert_parallel,
        "data parallel": of_data_parallel,
        "sharded weights": of_sharded_weights,
    }


def check(name: str, case: Case, calls: int) -> dict[str, Any]:
    """Calls a model with fresh inputs; everything is compared on the device and fetched at the end."""

    def flow(backend: str) -> Any:
        return df.dynaflow(case.fun, scheduler=case.apart, batch_axes=case.axes, backend=backend)

    apart, serial, xla = flow("dispatch"), _Serial(flow("dispatch")), flow("xla")
    runs = [jax.jit(case.mapped(run)) for run in (apart, serial, xla)]
    fresh, compared = jax.jit(case.fresh), jax.jit(compare)

    def call_once(weights: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = fresh(key)
        return compared(*(run(weights, *inputs) for run in runs))

    once = jax.jit(call_once) if _TOGETHER.value else call_once
    start = time.perf_counter()
    found = []
    for call in range(calls):
        found.append(once(case.weights, jax.random.key(call + 1)))
        if call % 16 == 15:  # so that not all of them are in memory at once
            jax.block_until_ready(found[-1])
    equal, off = (jnp.stack(values) for values in zip(*found, strict=True))
    seconds = time.perf_counter() - start
    operators = 0

    def counted(*args: Any) -> Any:
        nonlocal operators
        operators = len(apart.graph(*args))
        return case.fun(*args)

    results = jax.eval_shape(case.mapped(counted), case.weights, *fresh(jax.random.key(0)))
    limit = 4 * operators**0.5 * unit(jax.tree.leaves(results)[-1].dtype)
    row = {"case": name, "calls": calls, "equal": int(equal.sum()), "operators": operators}
    row |= {"difference": float(off.max()), "limit": limit, "seconds": seconds}
    verdict = "as it must be" if row["equal"] == calls and row["difference"] <= limit else "WRONG"
    print(
        f"{name:15s} {calls} calls, {row['equal']} equal to one stream bit by bit; from XLA at most "
        f"{row['difference']:.2e} (limit {limit:.2e}): {verdict}; {seconds:.1f} s with compiling",
        flush=True,
    )
    return row


class _Serial:
    """A dispatched function whose partitions run one after the other, which is decided when it is traced."""

    def __init__(self, flow: Callable[..., Any]):
        self._flow = flow

    def __call__(self, *args: Any) -> Any:
        os.environ["DYNAFLOW_SERIAL"] = "1"
        try:
            return self._flow(*args)
        finally:
            del os.environ["DYNAFLOW_SERIAL"]


def compare(got: Any, same: Any, xla: Any) -> tuple[jax.Array, jax.Array]:
    """Whether two results are equal bit by bit, and how far a third is off, relative to its norm."""
    got, same, xla = jax.tree.leaves(got), jax.tree.leaves(same), jax.tree.leaves(xla)
    equal = jnp.all(jnp.stack([jnp.all(_bits(a) == _bits(b)) for a, b in zip(got, same, strict=True)]))
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in zip(got, xla, strict=True)]
    off = jnp.stack([jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in wide])
    return equal, off.max()


def unit(dtype: Any) -> float:
    """The distance from 1 to the next number, as products are computed."""
    tf32 = 2.0**-10
    exact = float(jnp.finfo(dtype).eps)
    return max(exact, tf32) if jax.default_backend() == "gpu" else exact


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


if __name__ == "__main__":
    app.run(main)
