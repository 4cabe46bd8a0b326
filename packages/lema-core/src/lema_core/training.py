"""What a training method is: what it trains, and how an optimizer step changes that.

There are two kinds of things to train. *Updates* are small tensors beside frozen weights (LoRA): they live where they
are computed with, their gradients in ``.grad``. *Weights* are the model's own tensors: they, their gradients and
moments are streams of the store, and a step only decides how they change (:class:`~lema_core.store.updates.Decision`);
each is changed just before it is used next.

A method of one's own is a class whose ``create`` makes a :class:`Training` of a run's options
(:class:`TrainingMethodClass`), named by a :class:`~lema_core.records.TrainingMethod`. For the model's own weights it
derives from :class:`WeightTraining`, which has all but the choice of what trains when; these weights are saved as a
delta, with their moments. For updates it derives from :class:`Training`, and says how they are saved
(:meth:`Training.files`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint import TensorInfo, TensorToWrite
from lema_core.ops.adamw import AdamWKernel, AdamWRates
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.runtime.runner import TrainPass
from lema_core.selection import decayed
from lema_core.store.store import TensorStore


@dataclass(frozen=True)
class Outcome:
    """``norm`` of all gradients before clipping; ``culprit``: what is not finite, None where the step counts."""

    norm: float
    culprit: str | None = None


class Optimizer(Protocol):
    """What a training asks of an optimizer; every ``torch.optim.Optimizer`` has it."""

    param_groups: list[dict[str, Any]]

    def step(self) -> object: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class SavedRun(Protocol):
    """What a checkpoint says of the run: steps done, and what its optimizer was called."""

    step: int
    optimizer: str


class TrainedFiles(Protocol):
    """What a training has in files: what it trains, and the optimizer's states."""

    @property
    def weights_nbytes(self) -> int:
        """Of what :meth:`write_weights` writes, at most."""

    @property
    def nbytes(self) -> int:
        """Of all of it, at most."""

    def write_weights(self, folder: Path) -> None:
        """Write the files of what trained. Raises CheckpointError when the disk refuses."""

    def states(self, step: int) -> Sequence[TensorToWrite]:
        """What goes into optimizer.safetensors, for step ``step`` (from 0) to go on from; asked for when the weights
        are written."""

    def read(self, folder: Path, states: Mapping[str, TensorInfo], saved: SavedRun) -> None:
        """Go on from a checkpoint. Raises CheckpointError or ConfigError when it is of another training."""


class Training(ABC):
    """What one run trains.

    ``updates``: by module. ``weights``: names of the model's tensors; a training that has any is a
    :class:`WeightTraining`.
    """

    updates: Mapping[str, LowRankUpdate] = {}
    weights: Collection[str] = ()
    #: what its optimizer is called in checkpoints
    optimizer_name: str = "AdamW"
    #: changes :meth:`parameters`; given before the first step
    optimizer: Optimizer | None = None

    def parameters(self) -> list[Parameter]:
        """What an optimizer is given: the caller's, or AdamW with the run's options. Empty where the training changes
        what it trains by itself."""
        return []

    def files(self, adapter: ModelAdapter, base_name: str) -> TrainedFiles:
        """How ``updates`` are saved, and read again; the model that they are beside is called ``base_name`` there.
        Not asked of weights."""
        raise NotImplementedError(f"{type(self).__name__}.files: it has to say how its updates are saved")

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

    def largest_pass(self, seed: int) -> TrainPass:
        """The most that any step computes, which memory is set aside for."""
        return self.train_pass(0, seed)

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


class OptimizerOptions(Protocol):
    """The options of a run that say how AdamW goes."""

    learning_rate: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    weight_decay: float


class TrainingMethodClass(Protocol):
    """What a :class:`~lema_core.records.TrainingMethod` names: a class, or whatever has this method.

    ``options`` are the run's, a ``LemaConfig``. A method reads of them what it needs, and says in a Protocol of its own
    what that is: :class:`OptimizerOptions`; ``trainable_modules`` and ``trainable_layers``, for
    :func:`lema_core.selection.select_tensors`; ``seed``. Options that only this method has are the user's
    ``method_options``, which :func:`lema_core.method_options.read_options` reads.
    """

    def create(self, adapter: ModelAdapter, options: Any, device: torch.device, kernel: AdamWKernel) -> Training:
        """A training of the model of ``adapter``, as if nothing had been trained yet: what was is read later.

        Called once, before a weight is read or memory is shared out. ``device``: where updates live. ``kernel``: what
        AdamW is computed with. Raises ConfigError, naming the option, for what the model has not or cannot be.
        """


@dataclass(frozen=True)
class AdamWOptions:
    """``decayed``: names of the tensors that weight decay applies to."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decayed: Collection[str] = ()

    @classmethod
    def of(cls, options: OptimizerOptions, tensors: Collection[TensorSpec]) -> AdamWOptions:
        """As a run's ``options`` say, decay on those of ``tensors`` that it is for."""
        names = frozenset(spec.name for spec in tensors if decayed(spec))
        return cls((options.adam_beta1, options.adam_beta2), options.adam_eps, options.weight_decay, names)


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
    which tensors train at which step in :meth:`active`, and where their moments start anew in :meth:`restarts`: both
    follow from the step's number alone, so that a run that goes on from a checkpoint is the run that never stopped.

    ``weights``: all that ever train, canonical names of ``adapter.tensors()``; a tied head goes by its embedding's.
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
        #: optimizer steps that changed weights, since moments started
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
        """What of ``weights`` trains in step ``step`` (from 0); all else is frozen meanwhile.

        Of a layer, and of what lies outside layers, all or nothing; tables of embeddings that no head shares are apart
        from the rest outside.
        """
        return self.weights

    def restarts(self, step: int) -> bool:
        """Whether moments start from zero in step ``step``, and the bias correction from 1. Asked before the step;
        always so in the first one."""
        return False

    @property
    def turns(self) -> Sequence[Collection[str]]:
        """All of ``weights``, where they train in turns: what is :meth:`active` in a step is one of these, and whenever
        it is another than in the step before, that step :meth:`restarts`. Their states share room then. Empty: each
        tensor has room of its own."""
        return ()

    def carried(self, step: int) -> Collection[str]:
        """The tensors whose moments step ``step`` goes on from."""
        return () if self.restarts(step) else self.active(step)

    def train_pass(self, step: int, seed: int) -> TrainPass:
        return self._pass(self.active(step), seed)

    def largest_pass(self, seed: int) -> TrainPass:
        return self._pass(self.weights, seed)

    def _pass(self, names: Collection[str], seed: int) -> TrainPass:
        active = set(names)
        embeds = any(spec.role == "embedding" and spec.name in active for spec in self.adapter.tensors())
        return TrainPass(first_trained_layer(self.adapter, active), seed, embeds)

    def begin_step(self, step: int, lr: float | None = None, waits: bool = True) -> None:
        self._waits = waits
        if self.restarts(step):
            self.updates_made = 0
        active = self.active(step)
        self._store.gradients.begin_step(None if len(active) == len(self.weights) else active)
        if not waits:
            self._store.updates.decide_now(self._decision(lr, 1.0))

    def _decision(self, lr: float | None, grad_scale: float) -> AdamWDecision:
        rate = self.lr if lr is None else lr
        return AdamWDecision.of(self._kernel, self.options, rate, self.updates_made + 1, grad_scale)

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
        self._store.gradients.forget()
