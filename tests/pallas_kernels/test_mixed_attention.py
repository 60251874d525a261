"""Prefill beside decode against plain JAX, against JAX's own attention, its program for a GPU, and its limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import arrays, lowered_for_cuda

from dynaflow_jax import compat
from pallas_kernels.mixed_attention import Tuning, _part, _Work, key, mixed_attention, reference, supports
from pallas_kernels.support import KernelError

S = jax.ShapeDtypeStruct
lowers = pytest.mark.skipif(compat.JAX_VERSION < (0, 11), reason="Mosaic GPU compiles it since JAX 0.11")


def operands(tokens=128, rows=2, capacity=128, heads=4, kv_heads=2, head_dim=64, prompts=(), dtype=jnp.bfloat16):
    keys, cache = S((*prompts, tokens, kv_heads, head_dim), dtype), S((rows, capacity, kv_heads, head_dim), dtype)
    queries = S((*prompts, tokens, heads, head_dim), dtype), S((rows, heads, head_dim), dtype)
    return queries[0], keys, keys, queries[1], cache, cache, S((rows,), jnp.int32)


def filled(types, lengths):
    return *arrays(*types[:-1]), jnp.array(lengths, jnp.int32)


@pytest.mark.parametrize(
    ("types", "lengths", "tuning", "sms"),
    [
        (operands(rows=4, capacity=192), [0, 1, 100, 192], Tuning(), 2),
        (operands(heads=3, kv_heads=1, head_dim=128, dtype=jnp.float16), [65, 128], Tuning(2, 4, 64), 1),
        (operands(256, rows=1, heads=10, kv_heads=1, prompts=(2,)), [127], Tuning(4, 2, 64), 3),
    ],
    ids=["lengths", "group of 3, f16", "prompts, group of 10"],
)
def test_equals_the_reference(types, lengths, tuning, sms):
    args = filled(types, lengths)
    got = mixed_attention(*args, num_sms=sms, tuning=tuning, interpret=True)
    q, k, v, decode_q, k_cache, v_cache, _ = args
    magnitudes = jax.jit(reference)(q, k, abs(v), decode_q, k_cache, abs(v_cache), args[-1])
    for a, b, magnitude in zip(got, jax.jit(reference)(*args), magnitudes, strict=True):
        # Both round the weights, relative to peaks that may differ, and then the sums: half a unit of the last place.
        bound = float(jnp.finfo(b.dtype).eps) * (np.asarray(magnitude, np.float32) + abs(np.asarray(b, np.float32)))
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.all(abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)) <= bound)


def test_the_reference_is_jaxs_attention():
    args = filled(operands(96, rows=3, capacity=80, heads=6, prompts=(2,), dtype=jnp.float32), [1, 40, 80])
    q, k, v, decode_q, k_cache, v_cache, lengths = args
    want = (
        jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=0.2),
        jax.nn.dot_product_attention(decode_q[:, None], k_cache, v_cache, key_value_seq_lengths=lengths, scale=0.2)[
            :, 0
        ],
    )
    for a, b in zip(reference(*args, scale=0.2), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_rows_without_tokens_get_zeros():
    args = filled(operands(), [0, 5])
    assert not np.any(reference(*args)[1][0])
    assert np.all(reference(*args)[1][1])


@pytest.mark.parametrize("blocks", [1, 5, 132, 300])
@pytest.mark.parametrize("tokens", [128, 1024, 4096])
def test_every_tile_and_every_part_is_dealt_out_once(tokens, blocks):
    work = _Work(1, tokens, 4, 2, 128, 3, 320, 128, blocks)
    tiles, parts, steps = [], [], []
    with jax.ensure_compile_time_eval():
        for block in map(np.int32, range(blocks)):
            own = [work.tile(np.int32(i), block) for i in range(int(work.own_tiles(block)))]
            tiles += [tuple(map(int, one)) for one in own]
            steps.append(sum(int(place) + 1 for _, _, place in own))
            parts += [tuple(map(int, work.cache_part(np.int32(i), block))) for i in range(int(work.own_parts(block)))]
    assert sorted(tiles) == [(0, head, place) for head in range(4) for place in range(tokens // 128)]
    assert sorted(parts) == [(split, row, head) for split in range(3) for row in range(3) for head in range(2)]
    assert max(steps) <= max(tokens // 128, sum(steps) / blocks * 1.25)


def test_parts_are_as_long_as_the_device_stays_full():
    assert _part(128 * 8, 8192, 132) == 2048
    assert _part(16 * 8, 8192, 132) == 512
    assert _part(1, 1024, 132) == 128


@lowers
@pytest.mark.parametrize(("tokens", "rows", "capacity"), [(1024, 16, 8192), (2048, 64, 1024), (4096, 128, 4096)])
def test_lowers_for_a_gpu(tokens, rows, capacity):
    _, kernels = lowered_for_cuda(mixed_attention, *operands(tokens, rows, capacity, 32, 8, 128, (1,)))
    assert kernels == 1


@lowers
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [8, 32, 80])
def test_lowers_for_a_gpu_with_groups_of_any_size(heads, head_dim):
    types = operands(256, 3, 192, heads, 8, head_dim, dtype=jnp.float16)
    assert lowered_for_cuda(functools.partial(mixed_attention, tuning=Tuning(2, 4)), *types)[1] == 1


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (operands(tokens=100), "prompts of 100 tokens"),
        (operands(capacity=100), "caches of 100 tokens"),
        (operands(head_dim=96), "head_dim is 96"),
        (operands(heads=5), "no multiple of 2 key heads"),
        (operands(heads=34, kv_heads=2), "17 query heads share"),
        (operands(dtype=jnp.float32), "q is float32"),
        (operands(rows=0), "nothing to decode"),
        ((*operands()[:4], S((2, 128, 2, 64), jnp.float16), *operands()[5:]), "k_cache is float16"),
        ((*operands()[:6], S((3,), jnp.int32)), r"lengths has shape \(3,\) for 2 rows"),
        ((*operands()[:6], S((2,), jnp.uint32)), "lengths is uint32"),
        ((operands()[0], operands(256)[1], *operands()[2:]), r"k has shape \(256, 2, 64\)"),
        ((S((4, 64), jnp.bfloat16), *operands()[1:]), "q is to be"),
    ],
)
def test_limits_are_told(types, message):
    with pytest.raises(KernelError, match=message):
        jax.eval_shape(mixed_attention, *types)
    assert not supports(*types)


@pytest.mark.parametrize(
    ("tuning", "message"),
    [(Tuning(tiles=5), "exceeds the shared memory"), (Tuning(part=100), "parts of 100"), (Tuning(1), "fewer than 2")],
)
def test_limits_of_the_tuning_are_told(tuning, message):
    types = operands(head_dim=128)
    with pytest.raises(KernelError, match=message):
        jax.eval_shape(functools.partial(mixed_attention, tuning=tuning), *types)
    assert message.split()[0] in supports(*types, tuning=tuning).reason


def test_hardware_is_told():
    assert "NVIDIA GPU" in supports(*operands()).reason


def test_measurements_are_kept_by_all_sizes():
    assert key(*operands()) == (2, 128, 1, 128, 4, 2, 64)
    assert key(*operands(256, prompts=(3,))) == (2, 128, 3, 256, 4, 2, 64)
