"""One process of several that run every distributed strategy together; ``test_multihost.py`` starts them.

Prints a line for each strategy. Every process has two (virtual) devices, and meshes reach over all processes.
"""

import sys
import warnings

import jax
import numpy as np

import dynaflow_jax as df


def cases():
    """The strategies, each with a model that needs it."""
    import models_parallel as models  # computes, which has to wait until the processes know of each other

    strategies = df.strategies
    return {
        "NanoFlow": (models.tensor_parallel(), strategies.NanoFlow()),
        "TokenWeave": (models.tensor_parallel(rows=24), strategies.TokenWeave(tile=8, min_rows=16)),
        "SingleBatchOverlap": (models.tensor_parallel(), strategies.SingleBatchOverlap()),
        "DualBatchOverlap": (models.tensor_parallel(), strategies.DualBatchOverlap()),
        "GradientBuckets": (models.data_parallel(), strategies.GradientBuckets(1500)),
        "ParameterPrefetch": (models.fully_sharded(), strategies.ParameterPrefetch()),
        "AsyncTensorParallel": (models.sequence_parallel(), strategies.AsyncTensorParallel()),
    }


def main(rank, processes, port):
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(rank))
    devices = jax.device_count()
    assert devices == 2 * int(processes)
    for name, (model, strategy) in cases().items():
        args = jax.tree.map(np.asarray, model.args)
        flow = df.dynaflow(model.fun, scheduler=strategy, backend="dispatch", batch_axes=model.axes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = jax.jit(model.mapped(devices, flow))(*args)
        warned = [str(w.message) for w in caught if issubclass(w.category, df.DispatchWarning)]
        assert warned, f"{name} was dispatched"
        assert all(f"of a program of {processes} processes" in text for text in warned), warned
        assert f"program of {processes} processes" in model.inside(devices, flow.explain)
        want = jax.jit(model.mapped(devices))(*args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            for mine, whole in zip(a.addressable_shards, b.addressable_shards, strict=True):
                np.testing.assert_allclose(mine.data, whole.data, rtol=2e-5, atol=2e-5, err_msg=name)
        print(name, flush=True)
    # What runs on one device of this process is dispatched all the same.
    alone = df.dynaflow(lambda x: x * 2, scheduler=df.strategies.Sequential(), backend="dispatch")
    with warnings.catch_warnings():
        warnings.simplefilter("error", df.DispatchWarning)
        np.testing.assert_array_equal(jax.jit(alone)(np.ones(4, np.float32)), 2)
        assert "Lowering: dispatched" in alone.explain(np.ones(4, np.float32))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
