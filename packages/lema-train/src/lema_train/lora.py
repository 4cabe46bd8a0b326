"""LoRA weights: the low-rank updates that train beside frozen linear layers.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685); the rank-stabilised scale
is Kalajdzievski 2023 (arXiv:2312.03732). Initialisation is PEFT's: ``lora_A`` Kaiming-uniform with a = sqrt(5),
``lora_B`` zero, so that training starts at the base model.

Shapes: r rank, in/out the linear layer's sizes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from lema_core.adapter import TensorSpec
from lema_core.errors import ConfigError
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.selection import ALL_LINEAR


@dataclass(frozen=True)
class LoraConfig:
    """How LoRA weights are shaped and scaled.

    ``rank`` r; ``alpha``, so that the update's scale is alpha / r, or alpha / sqrt(r) with ``use_rslora``;
    ``dropout`` the probability on the branch's input; ``target_modules`` and ``layers`` as
    :func:`lema_core.selection.select_modules` takes them. ``rank_pattern`` and ``alpha_pattern`` give single
    modules another rank or alpha, as PEFT's files can: the first key that matches the end of the module's path at a
    dot, as a regular expression, counts. Raises ConfigError for a value out of range.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: str | Sequence[str] = ALL_LINEAR
    use_rslora: bool = False
    layers: str | int | Sequence[str | int] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in (self.rank, *self.rank_pattern.values()):
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
                raise ConfigError(f"lora_rank: a whole number from 1 on expected, {rank!r} found")
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            if not _is_number(alpha) or not 0 < alpha < math.inf:
                raise ConfigError(f"lora_alpha: a finite number above 0 expected, {alpha!r} found")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ConfigError(f"lora_dropout: a number from 0 to below 1 expected, {self.dropout!r} found")
        for key in (*self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(key)
            except re.error as error:
                raise ConfigError(
                    f"rank_pattern or alpha_pattern: {key!r} is no regular expression: {error}"
                ) from error

    def rank_of(self, spec: TensorSpec) -> int:
        return _by_pattern(self.rank_pattern, spec.stack, self.rank)

    def alpha_of(self, spec: TensorSpec) -> float:
        return _by_pattern(self.alpha_pattern, spec.stack, self.alpha)

    def scale_of(self, spec: TensorSpec) -> float:
        rank = self.rank_of(spec)
        return self.alpha_of(spec) / (math.sqrt(rank) if self.use_rslora else rank)


class LoraWeights:
    """The LoRA weights of some linear layers: fp32 parameters ``lora_A`` [r, in] and ``lora_B`` [out, r] per module.

    ``lora_A`` is drawn from a generator keyed by (seed, module), so it depends neither on the order of modules nor
    on which others train. Parameters are always made on the CPU and then moved, so that every device starts from
    the same values.
    """

    def __init__(
        self, config: LoraConfig, modules: Iterable[TensorSpec], *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.config = config
        self.modules = tuple(modules)
        self._pairs: dict[str, tuple[Parameter, Parameter]] = {}
        for spec in self.modules:
            shape_A, shape_B = lora_shapes(config, spec)
            lora_A = torch.empty(shape_A, dtype=torch.float32)
            torch.nn.init.kaiming_uniform_(lora_A, a=math.sqrt(5), generator=_generator(seed, spec.module))
            lora_B = torch.zeros(shape_B, dtype=torch.float32)
            self._pairs[spec.module] = (Parameter(lora_A.to(device)), Parameter(lora_B.to(device)))

    def parameters(self) -> dict[str, Parameter]:
        """All parameters by name, ``<module>.lora_A`` then ``<module>.lora_B``, modules in forward order."""
        return {
            f"{module}.{part}": parameter
            for module, pair in self._pairs.items()
            for part, parameter in zip(("lora_A", "lora_B"), pair, strict=True)
        }

    def updates(self) -> dict[str, LowRankUpdate]:
        """The record each streamed linear takes, by module; it holds the parameters themselves, not copies."""
        dropout = self.config.dropout
        return {
            spec.module: LowRankUpdate(*self._pairs[spec.module], self.config.scale_of(spec), dropout)
            for spec in self.modules
        }

    def first_layer(self, n_layers: int) -> int:
        """The lowest block that has something to train; ``n_layers`` when only the head has."""
        layers = (n_layers if spec.layer is None else spec.layer for spec in self.modules)
        return min(layers, default=n_layers)

    def names_by_layer(self) -> dict[int | None, list[str]]:
        """Parameter names per block in forward order; None holds those outside every block."""
        grouped: dict[int | None, list[str]] = {}
        for spec in self.modules:
            grouped.setdefault(spec.layer, []).extend((f"{spec.module}.lora_A", f"{spec.module}.lora_B"))
        return grouped

    @property
    def num_parameters(self) -> int:
        return sum(lora_A.numel() + lora_B.numel() for lora_A, lora_B in self._pairs.values())

    @torch.no_grad()
    def copy_(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite parameters in place with ``values`` by parameter name, cast to fp32; shapes must be equal."""
        parameters = self.parameters()
        for name, value in values.items():
            parameters[name].copy_(value)


def lora_shapes(config: LoraConfig, spec: TensorSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of ``lora_A`` and ``lora_B`` on the linear layer ``spec`` [out, in]."""
    out_features, in_features = spec.linear_shape
    rank = config.rank_of(spec)
    return (rank, in_features), (out_features, rank)


def count_parameters(config: LoraConfig, modules: Iterable[TensorSpec]) -> int:
    """Trainable numbers that LoRA weights on ``modules`` will have, without making them."""
    return sum(math.prod(shape) for spec in modules for shape in lora_shapes(config, spec))


def _by_pattern(pattern: Mapping[str, int | float], module: str, default: int | float) -> int | float:
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _generator(seed: int, module: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {module}".encode()).digest()
    # manual_seed takes 64 bits signed
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
