"""Rotary position embeddings (Su et al. 2021, "RoFormer", arXiv:2104.09864), in the half-split layout of Hugging Face
files, and the ways there are to stretch them over longer sequences.

Shapes: B rows, T tokens, N = B * T tokens, D head size, R features of each head that turn (D unless partial).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from lema_core.errors import ConfigError
from lema_core.ops.context import ForwardContext

_NAMES = ("rope_type", "type")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Plain rotary embeddings, and what all kinds have. Fields are named as in ``config.json``; see KINDS.

    ``rope_theta``: the base of the frequencies. ``partial_rotary_factor``: the share of each head that turns.
    """

    #: whether frequencies depend on how long a sequence is
    by_length: ClassVar[bool] = False

    rope_theta: float
    partial_rotary_factor: float = 1.0

    @classmethod
    def from_hf_config(
        cls, hf_config: Mapping[str, Any], default_theta: float = 10000.0, partial: bool = False
    ) -> RopeConfig:
        """Reads ``rope_scaling`` (old, ``type`` or ``rope_type``), else ``rope_parameters`` (new), each with
        ``rope_theta`` inside or beside it. As in transformers the old block wins where both are given.

        ``partial``: the architecture can turn a part of each head. Raises ConfigError for kinds that are not in KINDS,
        missing numbers, and a part of each head where the architecture turns all of it.
        """
        block = {k: v for k, v in _block(hf_config).items() if v is not None}
        name = next((block[key] for key in _NAMES if key in block), "default")
        if name not in KINDS:
            raise ConfigError(f"config.json: rope_type {name!r} is not supported; this version has {', '.join(KINDS)}")
        kind = KINDS[name]
        given = {k: v for k, v in block.items() if k not in _NAMES}
        beside = ("rope_theta", "partial_rotary_factor", "max_position_embeddings")
        for key in beside:
            if hf_config.get(key) is not None:
                given.setdefault(key, hf_config[key])
        given.setdefault("rope_theta", default_theta)
        kind._complete(given, hf_config)
        known = {field.name: field for field in fields(kind)}
        missing = [key for key, field in known.items() if field.default is MISSING and key not in given]
        if missing:
            raise ConfigError(f"config.json: rope_type {name!r} lacks {', '.join(missing)}")
        unused = sorted(given.keys() - known.keys() - set(beside))
        if unused:
            warnings.warn(f"config.json: rope_type {name!r} has no use for {', '.join(unused)}", stacklevel=2)
        for key in known.keys() & given.keys():
            if not isinstance(given[key], (int, float)):
                raise ConfigError(f"config.json: {key}={given[key]!r} of rope_type {name!r}; a number expected")
        rope = kind(**{key: value for key, value in given.items() if key in known})
        if rope.partial_rotary_factor != 1 and not partial:
            raise ConfigError(
                f"config.json: partial_rotary_factor={rope.partial_rotary_factor}, but this architecture turns all of "
                "each head; set it to 1"
            )
        return rope

    @classmethod
    def _complete(cls, given: dict[str, Any], hf_config: Mapping[str, Any]) -> None:
        """Fill in what this kind takes from other fields."""

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    def inverse_frequencies(self, head_dim: int, tokens: int = 0) -> Tensor:
        """fp32 [R / 2], radians per position, of a sequence of so many tokens."""
        return 1.0 / self._wavenumbers(head_dim, self.rope_theta)

    def _rotated(self, head_dim: int) -> int:
        return int(head_dim * self.partial_rotary_factor)

    def _wavenumbers(self, head_dim: int, theta: float | Tensor) -> Tensor:
        size = self._rotated(head_dim)
        return theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)


@dataclass(frozen=True, kw_only=True)
class LinearRope(RopeConfig):
    """Positions divided by ``factor`` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    def inverse_frequencies(self, head_dim: int, tokens: int = 0) -> Tensor:
        return super().inverse_frequencies(head_dim) / self.factor


@dataclass(frozen=True, kw_only=True)
class DynamicRope(RopeConfig):
    """A base that grows with what a sequence has beyond ``max_position_embeddings`` (NTK-aware, as transformers)."""

    by_length: ClassVar[bool] = True

    factor: float
    max_position_embeddings: int

    def inverse_frequencies(self, head_dim: int, tokens: int = 0) -> Tensor:
        size, longest = self._rotated(head_dim), self.max_position_embeddings
        # in fp32 beyond the longest, as transformers computes it there
        length = torch.tensor(tokens) if tokens > longest else longest
        growth = (self.factor * length / longest - (self.factor - 1)) ** (size / (size - 2))
        return 1.0 / self._wavenumbers(head_dim, self.rope_theta * growth)


class _FromOriginal(RopeConfig):
    """Kinds that are given relative to the longest sequence that the model was trained on first."""

    @classmethod
    def _complete(cls, given: dict[str, Any], hf_config: Mapping[str, Any]) -> None:
        key = "original_max_position_embeddings"
        if hf_config.get(key) is not None:
            given[key] = hf_config[key]
        elif "max_position_embeddings" in given:
            given.setdefault(key, given["max_position_embeddings"])


@dataclass(frozen=True, kw_only=True)
class YarnRope(_FromOriginal):
    """YaRN (Peng et al. 2023, arXiv:2309.00071): long wavelengths divided by ``factor``, short ones kept, with a ramp
    between those that turn ``beta_slow`` and ``beta_fast`` times in ``original_max_position_embeddings`` tokens.

    ``truncate``: the ramp begins and ends at whole features. ``attention_factor``, else ``mscale`` and
    ``mscale_all_dim``, else ``factor`` says how much the logits of the softmax grow.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @classmethod
    def _complete(cls, given: dict[str, Any], hf_config: Mapping[str, Any]) -> None:
        explicit = given.get("original_max_position_embeddings")
        if "factor" not in given and explicit and "max_position_embeddings" in given:
            given["factor"] = given["max_position_embeddings"] / explicit
        super()._complete(given, hf_config)

    @property
    def table_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    def _growth(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def inverse_frequencies(self, head_dim: int, tokens: int = 0) -> Tensor:
        size = self._rotated(head_dim)
        low, high = (self._feature(turns, size) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        high += 0.001 if low == high else 0  # no division by zero
        ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        wavenumbers = self._wavenumbers(head_dim, self.rope_theta)
        kept = 1 - ramp
        return 1.0 / (self.factor * wavenumbers) * (1 - kept) + 1.0 / wavenumbers * kept

    def _feature(self, turns: float, size: int) -> float:
        """Which pair of features turns so many times in the original length."""
        length = self.original_max_position_embeddings
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.rope_theta))


@dataclass(frozen=True, kw_only=True)
class Llama3Rope(_FromOriginal):
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def inverse_frequencies(self, head_dim: int, tokens: int = 0) -> Tensor:
        frequencies = super().inverse_frequencies(head_dim)
        length, low, high = self.original_max_position_embeddings, self.low_freq_factor, self.high_freq_factor
        wavelengths = 2 * math.pi / frequencies
        longest, shortest = length / low, length / high
        blend = (length / wavelengths - low) / (high - low)
        between = (1 - blend) * frequencies / self.factor + blend * frequencies
        stretched = torch.where(wavelengths > longest, frequencies / self.factor, frequencies)
        return torch.where((wavelengths <= longest) & (wavelengths >= shortest), between, stretched)


#: ``rope_type`` in config.json -> what it means
KINDS: dict[str, type[RopeConfig]] = {
    "default": RopeConfig,
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "yarn": YarnRope,
    "llama3": Llama3Rope,
}


def _block(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    block = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    nested = [key for key, value in block.items() if isinstance(value, Mapping)]
    if nested:
        raise ConfigError(f"config.json: rope_parameters for {', '.join(nested)}; one set for all layers expected")
    return block


def rotary_tables(rope: RopeConfig, head_dim: int, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
    """cos and sin of the tokens of a pass, fp32 [B, 1, T, R / 2], feature-major as what they turn.

    Where frequencies depend on the length of a sequence, that is the largest position that a batch has seen; packed
    micro-batches have each their own.
    """
    positions_BT = ctx.positions_BT
    alone = [positions_BT]
    if rope.by_length and ctx.segments:
        alone = [positions_BT[:, segment.start : segment.stop] for segment in ctx.segments]
    angles_RN = torch.cat([_angles(rope, head_dim, positions) for positions in alone], dim=1)
    tables = (angles_RN.cos(), angles_RN.sin())
    if rope.table_factor != 1:
        tables = tuple(table_RN * rope.table_factor for table_RN in tables)
    cos, sin = (table_RN.t().view(*positions_BT.shape, -1)[:, None] for table_RN in tables)
    return cos, sin


def _angles(rope: RopeConfig, head_dim: int, positions_BT: Tensor) -> Tensor:
    tokens = int(positions_BT.max()) + 1 if rope.by_length else 0
    frequencies = rope.inverse_frequencies(head_dim, tokens).to(positions_BT.device)
    return frequencies[:, None] * positions_BT.flatten().float()
