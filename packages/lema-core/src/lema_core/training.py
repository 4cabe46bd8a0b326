"""What a training method is: what it trains, and how an optimizer step changes that.

There are two kinds of things to train. *Updates* are small tensors beside frozen weights (LoRA): they live where they
are computed with, their gradients in ``.grad``. *Weights* are the model's own tensors: they, their gradients and moments
are streams of the store, and a step only decides how they change (:class:`~lema_core.store.updates.Decision`); each is
changed just before it is used next.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.ops.adamw import AdamWKernel, AdamWRates
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.runtime.runner import TrainPass
from lema_core.store.store import TensorStore


@dataclass(frozen=True)
class Outcome:
    """``norm`` of all gradients before clipping; ``culprit``: what is not finite, None where the step counts."""

    norm: float
    culprit: str | None = None


class Training(ABC):
    """What one run trains. A :class:`~lema_core.records.TrainingMethod` names a class with a ``create`` that makes one.

    ``updates``: by module. ``weights``: names of the model's tensors.
    """

    updates: Mapping[str, LowRankUpdate] = {}
    weights: Collection[str] = ()
    #: what its optimizer is called in checkpoints
    optimizer_name: str = "AdamW"

    @abstractmethod
    def describe(self) -> str:
        """What was selected, in one line."""

    @property
    @abstractmethod
    def numbers(self) -> int:
        """How many numbers train."""

    @property
    @abstractmethod
    def rate(self) -> float:
        """The learning rate where no schedule sets one."""

    @abstractmethod
    def train_pass(self, step: int, seed: int) -> TrainPass:
        """How step ``step`` (from 0) is computed."""

    @abstractmethod
    def begin_step(self, step: int, lr: float | None = None, waits: bool = True) -> None:
        """From here on all gradients are zeros. ``waits``: nothing changes before :meth:`finish_step`; otherwise what
        can may change at once, at the rate ``lr`` (None: its own)."""

    @abstractmethod
    def finish_step(self, lr: float | None, max_norm: float | None, loss_scale: float) -> Outcome:
        """Clip by the global norm (None: no clipping) and change what trains, at the rate ``lr`` (None: its own); or
        change nothing where a gradient is not finite. Gradients are ``loss_scale`` times too large."""

    @abstractmethod
    def discard_step(self) -> None:
        """Gradients are dropped, nothing changes."""


def first_trained_layer(adapter: ModelAdapter, weights: Collection[str]) -> int:
    """The lowest block that has one of ``weights``; ``n_layers`` when only the head has."""
    specs = [spec for spec in adapter.tensors() if spec.name in weights]
    if any(spec.role == "embedding" for spec in specs):
        return 0
    return min((adapter.n_layers if spec.layer is None else spec.layer for spec in specs), default=adapter.n_layers)


@dataclass(frozen=True)
class AdamWOptions:
    """``decayed``: names of the tensors that weight decay applies to."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decayed: Collection[str] = ()


@dataclass(frozen=True)
class AdamWDecision:
    """One AdamW step of the weights that train; its states are ``exp_avg`` and ``exp_avg_sq``.

    ``fresh``: this is the first one, whatever the states hold.
    """

    kernel: AdamWKernel
    decayed: AdamWRates
    plain: AdamWRates
    names: Collection[str]
    fresh: bool = False

    @classmethod
    def of(cls, kernel: AdamWKernel, options: AdamWOptions, lr: float, step: int, grad_scale: float) -> AdamWDecision:
        """``step`` counts from 1; ``grad_scale``: of gradients, as clipping wants it."""
        betas, eps = options.betas, options.eps
        decayed, plain = (AdamWRates(lr, *betas, eps, decay, step, grad_scale) for decay in (options.weight_decay, 0.0))
        return cls(kernel, decayed, plain, options.decayed, fresh=step == 1)

    def apply(self, tensor: str, weights: Tensor, gradient: Tensor, states: Sequence[Tensor]) -> None:
        if self.fresh:
            for state in states:
                state.zero_()
        rates = self.decayed if tensor in self.names else self.plain
        self.kernel.update(weights, gradient, *states, rates, threads=1)


class WeightTraining(Training):
    """AdamW on the model's own tensors; moments and gradients are streams of the store.

    Decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101) on ``options.decayed`` alone. A subclass says
    which tensors train at which step in :meth:`active`.
    """

    #: what the store keeps of each number beside its gradient
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, adapter: ModelAdapter, weights: Collection[str], options: AdamWOptions, lr: float, kernel: AdamWKernel
    ) -> None:
        self.adapter = adapter
        self.weights = tuple(weights)
        self.options = options
        self.lr = lr
        self._kernel = kernel
        self._store: TensorStore | None = None
        #: optimizer steps that changed the weights
        self.updates_made = 0

    @property
    def numbers(self) -> int:
        sizes = {spec.name: math.prod(spec.shape) for spec in self.adapter.tensors()}
        return sum(sizes[name] for name in self.weights)

    @property
    def rate(self) -> float:
        return self.lr

    def opened(self, store: TensorStore) -> None:
        """The weights are in ``store`` from now on."""
        self._store = store

    def active(self, step: int) -> Collection[str]:
        """What of ``weights`` trains in step ``step``; whole layers, or all."""
        return self.weights

    def count(self, step: int) -> int:
        """The number of the update that would follow ``updates_made`` others, for the bias correction, from 1."""
        return self.updates_made + 1

    def train_pass(self, step: int, seed: int) -> TrainPass:
        active = set(self.active(step))
        embeds = any(spec.role == "embedding" and spec.name in active for spec in self.adapter.tensors())
        return TrainPass(first_trained_layer(self.adapter, active), seed, embeds)

    def begin_step(self, step: int, lr: float | None = None, waits: bool = True) -> None:
        self._step, self._waits = step, waits
        active = self.active(step)
        self._store.gradients.begin_step(None if len(active) == len(self.weights) else active)
        if not waits:
            self._store.updates.decide_now(self._decision(lr, 1.0))

    def _decision(self, lr: float | None, grad_scale: float) -> AdamWDecision:
        rate, step = self.lr if lr is None else lr, self.count(self._step)
        return AdamWDecision.of(self._kernel, self.options, rate, step, grad_scale)

    def finish_step(self, lr: float | None, max_norm: float | None, loss_scale: float) -> Outcome:
        norm, culprit = self._store.gradients.norm()
        if not self._waits:
            self.updates_made += 1
            return Outcome(norm, culprit)
        if culprit is not None:
            self.discard_step()
            return Outcome(norm / loss_scale, culprit)
        norm /= loss_scale
        scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        self._store.updates.decide(self._decision(lr, scale / loss_scale))
        self.updates_made += 1
        return Outcome(norm)

    def discard_step(self) -> None:
        self._store.gradients.stream.forget()
