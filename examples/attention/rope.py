"""Rotary position embeddings: plain (arXiv 2104.09864), and stretched to longer contexts by YaRN (arXiv 2309.00071)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RoPE:
    """Rotates pairs of a head's dimensions by an angle that grows with the position (RoFormer, section 3.2.2).

    Dimension ``d`` is paired with ``d + head_dim / 2``; both turn by ``position * base ** (-2 d / head_dim)`` radians.

    Attributes:
      base: of the geometric series of frequencies.
    """

    base: float = 10_000.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each pair: ``float64[head_dim / 2]``."""
        return self.base ** (-2 * np.arange(head_dim // 2) / head_dim)

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied with."""
        return 1.0

    def __call__(self, x: jax.Array, position: jax.Array) -> jax.Array:
        """Queries or keys, ``[rows, tokens, heads, head_dim]``, turned to ``position``, ``int[rows or 1, tokens]``."""
        angle = position[..., None, None] * jnp.asarray(self.frequencies(x.shape[-1]), jnp.float32)
        sin, cos = self.magnitude * jnp.sin(angle), self.magnitude * jnp.cos(angle)
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class YaRN(RoPE):
    """RoPE for a context ``scale`` times as long as the model was trained with.

    Dimensions that turn often within the original context keep their frequency, those that never complete a turn are
    interpolated (slowed down by ``scale``), and a ramp joins the two (section 3.2, "NTK-by-parts"). The softmax gets a
    temperature: its logits are divided by ``t``, where ``sqrt(1 / t) = 0.1 ln(scale) + 1``, which is done by scaling
    queries and keys (section 3.4).

    Attributes:
      scale: how much longer the context becomes, ``s`` in the paper.
      original: the context that the model was trained with, in tokens, ``L`` in the paper.
      alpha: dimensions with fewer turns than this within ``original`` are interpolated in full.
      beta: those with more turns than this are not interpolated.
    """

    scale: float = 4.0
    original: int = 64
    alpha: float = 1.0
    beta: float = 32.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """As ``RoPE.frequencies``, interpolated by wavelength."""
        plain = super().frequencies(head_dim)
        turns = self.original * plain / (2 * math.pi)
        kept = np.clip((turns - self.alpha) / (self.beta - self.alpha), 0, 1)
        return (1 - kept) * plain / self.scale + kept * plain

    @property
    def magnitude(self) -> float:
        """The square root of the inverse temperature."""
        return 0.1 * math.log(self.scale) + 1 if self.scale > 1 else 1.0
