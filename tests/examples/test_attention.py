"""The example decoder: every kind of attention against a reference of loops, and under every strategy."""

import functools
import math
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import run, same

import dynaflow_jax as df
from examples.attention.decoder import Config, Decoder, apply, init
from examples.attention.fastgen import POLICIES, FastGen
from examples.attention.full import Full
from examples.attention.quest import Quest
from examples.attention.rope import RoPE, YaRN
from examples.attention.window import Longformer, StreamingLLM

ROPES = {"plain": RoPE(), "yarn": YaRN(base=100.0, scale=4.0, original=32)}
KINDS = {
    "full": Full(),
    "longformer": Longformer(window=5, global_tokens=2),
    "streaming": StreamingLLM(window=5, sinks=2),
    "quest": Quest(page=4, top_pages=2, dense_layers=1),
    "fastgen": FastGen(recovery=0.7),
}
EXACT = ("full", "longformer", "streaming")
STRATEGIES = [df.strategies.Sequential(), df.strategies.NanoFlow(2), df.strategies.DualBatchOverlap()]

# Row lengths that end inside a window, at its end, at the end of a page, and before any of them.
LENGTHS, STEPS = [16, 7, 1, 12], 14
PROMPT, TOTAL, CAPACITY = max(LENGTHS), max(LENGTHS) + STEPS, 32

QUICK = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)

# float32 against float64: logits of a few units, sums of up to 30 products.
TOLERANCE = 2e-5


# -- references, written from the papers with loops, in float64 ------------------------------------------------------


def frequency(rope, d, head_dim):
    """Radians per position of pair ``d``."""
    theta = rope.base ** (-2 * d / head_dim)
    if not isinstance(rope, YaRN):
        return theta
    wavelength = 2 * math.pi / theta
    ratio = rope.original / wavelength
    if ratio < rope.alpha:
        gamma = 0.0
    elif ratio > rope.beta:
        gamma = 1.0
    else:
        gamma = (ratio - rope.alpha) / (rope.beta - rope.alpha)
    return (1 - gamma) * theta / rope.scale + gamma * theta


def turned(x, position, rope):
    """A vector of one head at a position: pairs as complex numbers."""
    half = len(x) // 2
    result = np.zeros_like(x)
    for d in range(half):
        z = complex(x[d], x[d + half]) * np.exp(1j * position * frequency(rope, d, len(x)))
        result[d], result[d + half] = z.real, z.imag
    return result


def softmax(logits):
    e = [math.exp(x - max(logits)) for x in logits]
    return [x / sum(e) for x in e]


def seen(q, keys, rope, positions, at):
    """What a query at position ``at`` sees of keys at their positions; YaRN divides logits by its temperature."""
    temperature = 1.0
    if isinstance(rope, YaRN):
        temperature = 1 / (0.1 * math.log(rope.scale) + 1) ** 2
    query = turned(q, at, rope)
    products = [float(query @ turned(k, p, rope)) for k, p in zip(keys, positions, strict=True)]
    return softmax([x / (temperature * math.sqrt(len(q))) for x in products])


def attended(q, k, v, visible, rope, positions=None, at=None):
    """The output of the last query of ``q`` over the tokens in ``visible``; positions are the text's unless given."""
    positions = visible if positions is None else positions
    at = len(q) - 1 if at is None else at
    weights = seen(q[-1], [k[j] for j in visible], rope, positions, at)
    return sum(w * v[j] for w, j in zip(weights, visible, strict=True))


def full(kind, rope, q, k, v, tokens, length):
    return [attended(q[: i + 1], k, v, range(i + 1), rope) for i in range(len(q))]


def longformer(kind, rope, q, k, v, tokens, length):
    return [
        attended(q[: i + 1], k, v, [j for j in range(i + 1) if i - j < kind.window or j < kind.global_tokens], rope)
        for i in range(len(q))
    ]


def streaming(kind, rope, q, k, v, tokens, length):
    outs = []
    for i in range(len(q)):
        text = list(range(i + 1))
        cache = text[: kind.sinks] + text[kind.sinks :][-kind.window :]
        outs.append(attended(q[: i + 1], k, v, cache, rope, range(len(cache)), len(cache) - 1))
    return outs


def quest(kind, rope, q, k, v, tokens, length):
    outs = full(kind, rope, q[:length], k, v, tokens, length)
    for i in range(length, len(q)):
        query, keys = turned(q[i], i, rope), [turned(k[j], j, rope) for j in range(i + 1)]
        bounds = []
        for start in range(0, i + 1, kind.page):
            page = keys[start : start + kind.page]
            bound = 0.0
            for d in range(len(query)):
                column = [key[d] for key in page]
                bound += max(query[d] * min(column), query[d] * max(column))
            bounds.append((bound, start))
        best = [start for _, start in sorted(bounds, reverse=True)[: kind.top_pages]]
        visible = sorted(j for start in best for j in range(start, min(start + kind.page, i + 1)))
        outs.append(attended(q[: i + 1], k, v, visible, rope))
    return outs


def fastgen(kind, rope, q, k, v, tokens, length):
    outs = full(kind, rope, q[:length], k, v, tokens, length)
    maps = [seen(q[i], k[: i + 1], rope, range(i + 1), i) for i in range(length)]
    score = [sum(row[j] for row in maps if j < len(row)) for j in range(length)]
    window = math.ceil(kind.local * length)

    def keeps(policy, j, at, frequent):
        if policy == 4:
            return True
        return (
            tokens[j] in kind.special
            or (policy >= 1 and tokens[j] in kind.punctuation)
            or (policy >= 2 and j in frequent)
            or (policy >= 3 and at - j < window)
        )

    def most_seen(kept, count):
        order = sorted(kept, key=lambda j: -score[j])
        return set(order[: math.ceil(kind.frequent * count)])

    policy = 0
    while policy < 4:
        frequent = most_seen(range(length), length)
        recovered = sum(w for i, row in enumerate(maps) for j, w in enumerate(row) if keeps(policy, j, i, frequent))
        if recovered / length >= kind.recovery:
            break
        policy += 1
    kept = [j for j in range(length) if keeps(policy, j, length - 1, most_seen(range(length), length))]
    for i in range(length, len(q)):
        kept, score = [*kept, i], [*score, 0.0]
        weights = seen(q[i], [k[j] for j in kept], rope, kept, i)
        outs.append(sum(w * v[j] for w, j in zip(weights, kept, strict=True)))
        for j, w in zip(kept, weights, strict=True):
            score[j] += w
        frequent = most_seen(kept, i + 1)
        kept = [j for j in kept if keeps(policy, j, i, frequent)]
    return outs, policy, kept


REFERENCES = {"full": full, "longformer": longformer, "streaming": streaming, "quest": quest, "fastgen": fastgen}


def random_heads(heads=2, head_dim=8, seed=0):
    """Queries, keys and values of one head each, and tokens."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.normal(size=(3, len(LENGTHS), TOTAL, heads, head_dim))
    return q, k, v, rng.integers(0, 12, (len(LENGTHS), TOTAL))


def heads_of_five_kinds():
    """Five heads that look at special tokens, at punctuation too, at a few others too, at what is near, and at all."""
    q, k, v, tokens = random_heads(heads=5)
    slow = q.shape[-1] // 2 - 1  # a dimension that hardly turns
    q, k = q / 8, k / 8
    q[..., slow] = 12.0
    is_special, is_punctuation = tokens < 2, (tokens >= 2) & (tokens < 5)
    tokens[:, 0] = 0  # as texts begin
    is_special[:, 0], is_punctuation[:, 0] = True, False
    k[:, :, 0, slow] += 3 * is_special
    k[:, :, 1, slow] += 3 * is_special + 3 * is_punctuation
    k[:, :, 2, slow] += 3 * (np.arange(TOTAL) % 6 == 1)
    k[:, :, 3, slow] += np.arange(TOTAL)
    return q, k, v, tokens


def evaluated(kind, rope, q, k, v, tokens):
    """Outputs of prefill and of every step after it, for each row those of its own tokens; and the last cache."""
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    tokens, lengths, rows = jnp.asarray(tokens, jnp.int32), jnp.asarray(LENGTHS), jnp.arange(len(LENGTHS))
    prefill = QUICK(functools.partial(kind.prefill, rope=rope, capacity=CAPACITY))
    decode = QUICK(functools.partial(kind.decode, rope=rope))
    at_first = [x[:, :PROMPT] for x in (q, k, v, tokens)]
    out, cache = prefill(*at_first, lengths)
    outs = [[*np.asarray(out[r, :n])] for r, n in enumerate(LENGTHS)]
    for step in range(STEPS):
        at = lengths + step
        now = [x[rows, at][:, None] for x in (q, k, v)]
        out, cache = decode(*now, tokens[rows, at], at, cache)
        for r in range(len(LENGTHS)):
            outs[r].append(np.asarray(out[r, 0]))
    return outs, cache


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", [name for name in KINDS if name != "fastgen"])
def test_prefill_and_decode_are_what_the_paper_says(name, rope):
    kind, rope = KINDS[name], ROPES[rope]
    q, k, v, tokens = random_heads()
    outs, _ = evaluated(kind, rope, q, k, v, tokens)
    for r, length in enumerate(LENGTHS):
        for h in range(q.shape[2]):
            own = [x[r, : length + STEPS, h] for x in (q, k, v)]
            want = REFERENCES[name](kind, rope, *own, tokens[r], length)
            got = [out[h] for out in outs[r]]
            np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        (FastGen(), RoPE()),
        (FastGen(), ROPES["yarn"]),
        (FastGen(recovery=0.6, local=Fraction(1, 8), frequent=Fraction(1, 2)), RoPE()),
    ],
)
def test_every_head_keeps_what_its_profile_says(kind, rope):
    q, k, v, tokens = heads_of_five_kinds()
    outs, cache = evaluated(kind, rope, q, k, v, tokens)
    policies = set()
    for r, length in enumerate(LENGTHS):
        for h in range(q.shape[2]):
            own = [x[r, : length + STEPS, h] for x in (q, k, v)]
            want, policy, kept = fastgen(kind, rope, *own, tokens[r], length)
            assert int(cache.policy[r, h]) == policy, (r, h)
            assert np.flatnonzero(cache.kept[r, h]).tolist() == kept, (r, h)
            np.testing.assert_allclose([out[h] for out in outs[r]], want, rtol=TOLERANCE, atol=TOLERANCE)
            policies.add(policy)
    if kind == FastGen() and rope == RoPE():  # what the heads were made for
        assert len(policies) == len(POLICIES), policies


def test_quest_with_enough_pages_is_full_attention():
    heads = random_heads()
    enough, _ = evaluated(Quest(page=4, top_pages=8), RoPE(), *heads)
    dense, _ = evaluated(Full(), RoPE(), *heads)
    same(enough, dense, TOLERANCE)


def test_quest_reads_no_page_that_a_bound_excludes():
    """The bound is one: no key's product with the query exceeds that of its page."""
    kind = Quest(page=4, top_pages=2)
    q, k, v, tokens = random_heads()
    _, cache = evaluated(kind, RoPE(), q, k, v, tokens)
    bound = np.maximum(q[:, -1, :, None] * cache.low, q[:, -1, :, None] * cache.high).sum(-1)
    products = np.einsum("rhd,rhpkd->rhpk", q[:, -1], cache.k)
    for r, length in enumerate(LENGTHS):
        for j in range(length + STEPS):
            page, slot = divmod(j, kind.page)
            assert (products[r, :, page, slot] <= bound[r, :, page] + 1e-5).all()


@pytest.mark.parametrize("head_dim", [4, 16, 128])
@pytest.mark.parametrize("rope", [RoPE(), *(YaRN(scale=s, original=n) for s in (1.0, 4.0, 16.0) for n in (64, 4096))])
def test_frequencies(rope, head_dim):
    want = [frequency(rope, d, head_dim) for d in range(head_dim // 2)]
    np.testing.assert_allclose(rope.frequencies(head_dim), want, rtol=1e-12)
    if isinstance(rope, YaRN) and rope.scale == 1:
        np.testing.assert_allclose(rope.frequencies(head_dim), RoPE().frequencies(head_dim), rtol=1e-12)
        assert rope.magnitude == 1


# -- the decoder ---------------------------------------------------------------------------------------------------


@functools.cache
def decoder(name, rope="plain"):
    config = Config(
        width=16, heads=2, head_dim=8, hidden=24, vocab=32, capacity=CAPACITY, attention=KINDS[name], rope=ROPES[rope]
    )
    return config, init(config), *map(QUICK, apply(config))


def prompts(seed=3):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, 32, (len(LENGTHS), TOTAL)), jnp.int32), jnp.asarray(LENGTHS)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", EXACT)
def test_decoding_after_prefill_is_reading_the_whole_text(name, rope):
    config, params, prefill, decode = decoder(name, rope)
    tokens, lengths = prompts()
    rows = jnp.arange(len(LENGTHS))
    whole = QUICK(Decoder(config).apply)(params, tokens, jnp.full(len(LENGTHS), TOTAL))
    logits, cache = prefill(params, tokens[:, :PROMPT], lengths)
    same(logits, whole[rows, lengths - 1], TOLERANCE)
    for step in range(STEPS):
        at = lengths + step
        logits, cache = decode(params, tokens[rows, at], at, cache)
        same(logits, whole[rows, at], TOLERANCE)


@pytest.mark.parametrize("name", KINDS)
def test_rows_do_not_depend_on_each_other_or_on_padding(name):
    _, params, prefill, decode = decoder(name)
    tokens, lengths = prompts()
    other = jnp.where(jnp.arange(PROMPT) < lengths[:, None], tokens[:, :PROMPT], 31 - tokens[:, :PROMPT])

    def two_tokens(tokens, lengths, following):
        first, cache = prefill(params, tokens, lengths)
        return first, decode(params, following, lengths, cache)[0]

    want = two_tokens(tokens[:, :PROMPT], lengths, tokens[:, 0])
    same(two_tokens(other, lengths, tokens[:, 0]), want, tolerance=0)
    for r in range(len(LENGTHS)):
        alone = two_tokens(other[r : r + 1], lengths[r : r + 1], tokens[r : r + 1, 0])
        same(alone, jax.tree.map(lambda x, r=r: x[r : r + 1], want), TOLERANCE)


@pytest.mark.parametrize("scheduler", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", KINDS)
def test_the_same_strategies_run_on_every_kind(name, phase, scheduler):
    config, params, read, step = decoder(name, "plain" if name == "full" else "yarn")
    tokens, lengths = prompts()
    prefill, decode = apply(config)
    args, axes, fun = (params, tokens[:, :PROMPT], lengths), (None, 0, 0), prefill
    if phase == "decode":
        _, cache = read(*args)
        args, axes, fun = (params, tokens[:, 0], lengths, cache), (None, 0, 0, 0), decode
    flow = df.dynaflow(fun, scheduler=scheduler, batch_axes=axes)
    same(run(flow, *args), (read if phase == "prefill" else step)(*args), TOLERANCE)
    assert len(flow.plan(*args).sizes) == (1 if isinstance(scheduler, df.strategies.Sequential) else 2)
    names = [op.name for op in flow.graph(*args)]
    assert names == ["embed", *["attention", "ffn", "residual"] * config.layers, "head"]


def test_the_table():
    """Every kind has a row for both phases, and what is scheduled gives what is not."""
    command = [sys.executable, "-m", "examples.attention", "--rows=2", "--tokens=24", "--calls=1"]
    shown = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert shown.returncode == 0, shown.stderr
    for kind in ("Full", "Longformer", "StreamingLLM", "Quest", "FastGen"):
        rows = [line.split() for line in shown.stdout.splitlines() if re.match(rf"{kind}\b", line)]
        assert [row[1] for row in rows] == ["prefill", "decode"], kind
        assert all(float(row[-5]) < TOLERANCE for row in rows), kind
