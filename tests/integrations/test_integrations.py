"""Systems nobody here wrote, scheduled: the same results, few lines, and operators by the names their users know."""

import jax.numpy as jnp
import pytest

from examples.integrations import __main__ as cli
from examples.integrations import check

# Some operators of each system, by key; those of loops are inside them.
NAMES = {
    "linen": {"Decoder/token_embedder", "Decoder/layers/self_attention", "Decoder/layers/mlp"},
    "nnx": {"embed", "layers/0/attention", "layers/1/ffn"},
    "equinox": {"embed", "layers/attention", "layers/mlp", "unembed"},
    "gemma": {f"Transformer/Transformer._apply_attention/layer_{i}/{name}" for i in (0, 1) for name in ("attn", "mlp")},
    "tunix": {"layers/0/attn", "layers/1/mlp", "lm_head"},
    "maxtext": {"decoder/token_embedder", "decoder/layers/self_attention", "decoder/layers/mlp"},
}


@pytest.fixture(scope="module", params=check.SYSTEMS)
def system(request):
    try:
        return request.param, check.load(request.param)
    except ImportError as error:
        pytest.skip(f"needs the environment of examples/integrations/README.md for {request.param}: {error}")


def test_the_forward_pass_is_the_systems_own(system):
    _, system = system
    assert len(system.forward.plan(*system.arguments).sizes) == 2
    assert system.forward_difference() <= system.bound


def test_a_training_step_is_the_systems_own(system):
    _, system = system
    graph = system.step.graph(*system.arguments)
    assert any(op.phase == "backward" for op in check.operators(graph))
    assert system.step_difference() <= system.bound


def test_operators_have_the_names_that_users_know(system):
    name, system = system
    forward, step = (check.operators(flow.graph(*system.arguments)) for flow in (system.forward, system.step))
    assert {op.key for op in forward} >= NAMES[name]
    # What a key names forward it names backward: the parameters of these operators have gradients.
    assert {op.key for op in step} >= {f"{key}.backward" for key in NAMES[name]}


@pytest.mark.parametrize("name", check.SYSTEMS)
def test_few_lines_are_added(name):
    assert 1 < check.lines_added(name) <= 15


def test_a_difference_is_relative_to_the_largest_entry_of_all():
    want = {"a": jnp.array([1.0, -4.0]), "b": jnp.array([0.0])}
    got = {"a": jnp.array([1.0, -4.0]), "b": jnp.array([1.0])}
    assert check.difference(want, want) == 0
    assert check.difference(got, want) == 0.25
    with pytest.raises(ValueError, match="Compared are"):
        check.difference(got, want["a"])


def test_a_system_that_is_not_installed_has_a_row(monkeypatch):
    def load(name):
        raise ImportError("No module named 'gemma'")

    monkeypatch.setattr(check, "load", load)
    assert cli.row("gemma") == ("gemma", *[""] * 7, "cannot be imported: No module named 'gemma'")


def test_the_command_line_knows_its_systems():
    with pytest.raises(SystemExit, match="There is no system 'torch'; there are linen"):
        cli.main(["", "torch"])
