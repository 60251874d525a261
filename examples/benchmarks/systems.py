"""Two GPUs: decoders of Flax Linen and Flax NNX as they are, trained and run, against the best that XLA does with them.

    JAX_PLATFORMS=cuda,cpu python -m examples.benchmarks.systems [--quick] [--json=FILE] [--cases=linen-train-2048,...]

The models of ``examples/integrations``, unchanged: four layers of width 4096 with 32 heads, vocabulary 32000, bfloat16.
Linen's have 16384 hidden units and are under ``nn.scan`` and ``nn.remat``, NNX's, which are gated, have 14336 and are
under ``nnx.remat``.

- ``train``: loss and gradients, data-parallel; tokens for each GPU. Gradients are added up at each use of a weight, as
  ``jax.grad`` does it under ``jax.shard_map``, or at the end, one by one.
- ``forward``: tensor-parallel; tokens of both GPUs. Heads and hidden units are shared, and what blocks of attention and
  feed-forward give is added up by what each system has for that: Linen's ``nn.intercept_methods``, and NNX's way of
  replacing a module by another one.

XLA's best of: ``jax.jit`` with sharded arguments, which partitions the model by itself, ``jax.shard_map`` in the forms
above and, forward, in two halves by hand. Each is tried by default and with the latency-hiding scheduler, and the
fastest of them with all other options of ``training.OPTIONS``, too. The limit is the same without communication.
Contenders take turns in one process; medians.

``--quick`` is for a machine without a GPU: small sizes, few contenders and calls, the host twin, and float32, in which
little separates what is right from XLA's; its times mean nothing.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from examples.benchmarks.decoders import AXIS, SYSTEMS, Model, Reduce, share_of, step
from examples.benchmarks.keep import keep
from examples.benchmarks.overlap import contend, mesh_of
from examples.benchmarks.timing import medians
from examples.benchmarks.training import OPTIONS, same
from examples.integrations.check import Sizes

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_QUICK = flags.DEFINE_bool("quick", False, "Whether only to see that it works.")
_CASES = flags.DEFINE_list("cases", None, "The cases to measure, such as nnx-train-2048; all by default.")

HIDDEN = {"linen": 16384, "nnx": 14336}
SCREENED = ("default", "latency hiding")
"""The options that every form is tried with; the others are tried with the fastest form."""


def main(argv: Sequence[str]) -> None:
    del argv
    mesh = mesh_of(AXIS)
    batches = {"train": (2, 8), "forward": (4, 8)} if _QUICK.value else {"train": (4, 512), "forward": (16, 512)}
    rows = []
    for name, make in SYSTEMS.items():
        sizes = Sizes(2, 128, 64, 96, 4, 16) if _QUICK.value else Sizes(4, 32000, 4096, HIDDEN[name], 32, 128)
        cases = {phase: f"{name}-{phase}-{batch * tokens}" for phase, (batch, tokens) in batches.items()}
        cases = {phase: case for phase, case in cases.items() if not _CASES.value or case in _CASES.value}
        if not cases:
            continue
        model = make(sizes, devices=2, dtype=jnp.float32 if _QUICK.value else jnp.bfloat16)
        for phase, case in cases.items():
            measure = train if phase == "train" else forward
            rows.append(measure(case, mesh, model, sizes.vocabulary, *batches[phase]))
            keep(_JSON.value, "systems", rows)


def train(case: str, mesh: Any, model: Model, vocabulary: int, batch: int, length: int) -> dict[str, Any]:
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    tokens = jax.random.randint(jax.random.key(0), (2 * batch, length + 1), 1, vocabulary)
    arguments = (jax.device_put(model.params, whole), jax.device_put(tokens, rows))

    def mapped(checked: bool, **options: Any) -> Callable[..., Any]:
        return jax.shard_map(
            functools.partial(step, model.apply, **options),
            mesh=mesh,
            in_specs=(P(), P(AXIS)),
            out_specs=(P(AXIS), P()),
            check_vma=checked,
        )

    # Where it is checked what varies over devices, ``jax.grad`` adds up the gradients of what does not.
    forms = {
        "reduced at use": mapped(True, devices=2),
        "reduced at the end": mapped(False, devices=2, reduce=functools.partial(jax.lax.psum, axis_name=AXIS)),
    }
    ours = {}
    for form, fun in forms.items():
        for mib in (25,) if _QUICK.value else (25, 200):
            ours[f"{form}, buckets of {mib} MiB"] = bucketed(fun, mib, "dispatch")
    ours["reduced at the end, buckets of 25 MiB, auto"] = bucketed(forms["reduced at the end"], 25, "auto")
    plain = functools.partial(jax.jit, functools.partial(step, model.apply), out_shardings=whole)
    jits = {"jit": plain} | {form: functools.partial(jax.jit, fun) for form, fun in forms.items()}
    reference = {name: f"{name.partition(', ')[0]}, default" for name in ours}
    rounds, calls = (1, 2) if _QUICK.value else (5, 6)
    limit = jax.jit(mapped(False, devices=2))
    return contend(case, ours, fastest(jits, arguments), limit, reference, arguments, rounds, calls)


def bucketed(fun: Callable[..., Any], mib: int, backend: str) -> Callable[..., Any]:
    """A training step whose gradients are reduced behind the backward pass."""
    strategy = df.strategies.GradientBuckets(mib << 20)
    return jax.jit(df.dynaflow(fun, scheduler=strategy, rules=[df.SplitFunc("psum")], backend=backend))


def forward(case: str, mesh: Any, model: Model, vocabulary: int, batch: int, length: int) -> dict[str, Any]:
    specs = share_of(model.params)
    tokens = jax.random.randint(jax.random.key(0), (batch, length), 1, vocabulary)
    place = lambda w, spec: jax.device_put(w, NamedSharding(mesh, spec))  # noqa: E731
    arguments = (jax.tree.map(place, model.params, specs), place(tokens, P()))

    def mapped(reduce: Reduce, parts: int = 1) -> Callable[..., Any]:
        def run(params: Any, tokens: jax.Array) -> jax.Array:
            return jnp.concatenate([model.shared(params, part, reduce) for part in jnp.split(tokens, parts)])

        return jax.shard_map(run, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False)

    total = functools.partial(jax.lax.psum, axis_name=AXIS)
    once, halves = mapped(total), mapped(total, 2)
    options = {"rules": [df.SplitFunc("psum")], "batch_axes": (None, 0)}
    ours = {
        f"k={k}": jax.jit(
            df.dynaflow(once, scheduler=df.strategies.NanoFlow(k, concurrent=True), backend="dispatch", **options)
        )
        for k in (1, 2)
    }
    ours["k=2, auto"] = jax.jit(df.dynaflow(once, scheduler=df.strategies.NanoFlow(2), **options))
    whole = NamedSharding(mesh, P())
    jits = {
        "jit": functools.partial(jax.jit, model.apply, out_shardings=whole),
        "shard_map": functools.partial(jax.jit, once),
        "halves": functools.partial(jax.jit, halves),
    }
    reference = {name: "shard_map, default" if name == "k=1" else "halves, default" for name in ours}
    rounds, calls = (1, 2) if _QUICK.value else (5, 10)
    limit = jax.jit(mapped(same))
    return contend(case, ours, fastest(jits, arguments), limit, reference, arguments, rounds, calls)


def fastest(jits: Mapping[str, Callable[..., Any]], arguments: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    """XLA's programs for every form under some options, and for the form that was fastest under all."""
    names = SCREENED[: 1 if _QUICK.value else None]
    found = {f"{form}, {name}": jit(compiler_options=OPTIONS[name]) for form, jit in jits.items() for name in names}
    times = medians(found, dict.fromkeys(found, arguments), 1, 3)
    best = min(times, key=times.__getitem__).partition(", ")[0]
    rest = {f"{best}, {name}": jits[best](compiler_options=options) for name, options in OPTIONS.items()}
    return found if _QUICK.value else rest | found


if __name__ == "__main__":
    app.run(main)
