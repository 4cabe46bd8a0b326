"""Rotary position embeddings (Su et al. 2021, "RoFormer", arXiv:2104.09864), in the half-split layout of Hugging Face
files.

Shapes: B rows, T tokens, N = B * T tokens, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lema_core.errors import ConfigError

SUPPORTED = ("default", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """``theta``: the base; the rest belongs to ``llama3`` scaling (Llama 3.1 model card)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any], default_theta: float = 10000.0) -> RopeConfig:
        """Reads ``rope_theta`` with ``rope_scaling`` (old, ``type`` or ``rope_type``), else ``rope_parameters`` (new).

        As in transformers the old block wins where both are given.

        Raises ConfigError for a type other than SUPPORTED and for missing numbers.
        """
        block = dict(hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {})
        theta = float(block.get("rope_theta", hf_config.get("rope_theta") or default_theta))
        kind = block.get("rope_type", block.get("type", "default"))
        if kind not in SUPPORTED:
            raise ConfigError(
                f"config.json: rope_type {kind!r} is not supported; this version has {', '.join(SUPPORTED)}"
            )
        if kind == "default":
            return cls(theta)
        names = ("factor", "low_freq_factor", "high_freq_factor")
        missing = [name for name in names if name not in block]
        original = block.get("original_max_position_embeddings", hf_config.get("original_max_position_embeddings"))
        if original is None:
            missing.append("original_max_position_embeddings")
        if missing or original is None:
            raise ConfigError(f"config.json: rope_type 'llama3' lacks {', '.join(missing)}")
        factor, low, high = (float(block[name]) for name in names)
        return cls(theta, kind, factor, low, high, int(original))

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """fp32 [D / 2], radians per position."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.kind == "default":
            return frequencies
        # llama3: long wavelengths are stretched by `factor`, short ones kept, those between are blended.
        wavelengths = 2 * math.pi / frequencies
        longest = self.original_max_positions / self.low_freq_factor
        shortest = self.original_max_positions / self.high_freq_factor
        blend = (self.original_max_positions / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - blend) * frequencies / self.factor + blend * frequencies
        stretched = torch.where(wavelengths > longest, frequencies / self.factor, frequencies)
        return torch.where((wavelengths <= longest) & (wavelengths >= shortest), between, stretched)


def rotary_tables(rope: RopeConfig, head_dim: int, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [B, 1, T, D / 2], feature-major as what they turn."""
    frequencies = rope.inverse_frequencies(head_dim).to(positions_BT.device)
    angles_DN = frequencies[:, None] * positions_BT.flatten().float()
    cos, sin = (table_DN.t().view(*positions_BT.shape, -1)[:, None] for table_DN in (angles_DN.cos(), angles_DN.sin()))
    return cos, sin
