"""An adapter under test: models to try it on, and what computes with them here and in transformers.

Shapes: B rows, T tokens, V vocabulary, r rank.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint import TensorInfo, bind_tensors, read_hf_config, read_manifest
from lema_core.device import CpuDevice, Device
from lema_core.ops.kernels import Kernels
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_core.runtime.schedule import Scheduler, StepCosts
from lema_core.store.model import StreamedModel, cut_model
from lema_core.store.store import TensorStore
from lema_core.testing import adapter_oracle as theirs
from lema_core.testing.gradients import GradientsInMemory

#: lora_A [r, in] and lora_B [out, r]
Pair = tuple[Tensor, Tensor]
#: rows, tokens, and where the first row is padded
Shape = tuple[int, int, str]

#: small matrices are cut into several row blocks
_GRANULE_BYTES = 9_000
_RANK, _SCALE = 3, 0.5


class AdapterCase:
    """What :class:`~lema_core.testing.adapter_suite.AdapterSuite` is made of.

    ``hf_config``: fields of a small ``config.json``, ``model_type`` among them, without dropout, for 40 tokens or
    more. ``variants``: what each changes. ``dropout``: fields that turn the model's own dropout on, if it has any.
    ``buffers``: names and shapes of tensors that files may have and ``adapter.ignored`` covers, one at least for each
    pattern. ``slow``: variants whose tests are marked so.
    """

    adapter: ClassVar[type[ModelAdapter]]
    hf_config: ClassVar[Mapping[str, Any]]
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {}}
    dropout: ClassVar[Mapping[str, Any]] = {}
    buffers: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    slow: ClassVar[frozenset[str]] = frozenset()
    #: wire formats of quantized weights to try, and those whose tests are marked slow
    formats: ClassVar[tuple[str, ...]] = ("int4-32",)
    slow_formats: ClassVar[frozenset[str]] = frozenset()

    # -- what an architecture with tensors of its own kind overrides

    def write(self, folder: Path, hf_config: Mapping[str, Any]) -> None:
        """Save a random model of ``hf_config`` as the Hub has it."""
        theirs.write_model(folder, hf_config)

    def linear_names(self, model: Any) -> set[str]:
        """Module paths of all linear layers of transformers' ``model``, which LoRA must be possible on."""
        return {n for n, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}

    def peft_config(self, adapter: ModelAdapter) -> dict[str, Any]:
        """``adapter_config.json`` for LoRA on every linear."""
        linears = list(adapter.linear_modules())
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": _RANK,
            "lora_alpha": _RANK * _SCALE,
            "target_modules": [spec.module for spec in linears],
            "fan_in_fan_out": any(spec.transposed for spec in linears),
        }

    def to_peft(self, adapter: ModelAdapter, pairs: Mapping[str, Pair]) -> dict[str, Tensor]:
        """LoRA weights by module -> tensors by PEFT's keys."""
        return {
            f"base_model.model.{module}.{name}.weight": tensor
            for module, pair in pairs.items()
            for name, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
        }

    def from_peft(self, adapter: ModelAdapter, tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
        """The inverse of :meth:`to_peft`; gradients of PEFT's tensors are brought back by it too."""
        keys = {spec.module: f"base_model.model.{spec.module}" for spec in adapter.linear_modules()}
        return {
            module: (tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"])
            for module, key in keys.items()
            if f"{key}.lora_A.weight" in tensors
        }

    def weight_gradients(self, adapter: ModelAdapter, model: Any) -> dict[str, Tensor]:
        """The gradients of transformers' ``model`` as the adapter names its tensors."""
        return theirs.gradients(model)

    def oracle_logits(self, model: Any, batch: TokenBatch) -> Tensor:
        """[B, T, V] by transformers' ``model``; what stands at padding is not looked at."""
        return theirs.logits(model, batch)

    def oracle_loss(self, model: Any, batches: Sequence[TokenBatch], logits_BTV: Sequence[Tensor]) -> Tensor:
        """The loss of a step, from the logits of its ``batches`` by transformers' ``model``: the mean over all targets,
        unless the architecture adds something."""
        return theirs.mean_loss(logits_BTV, batches)

    # -- what the tests are made of

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "variant" in metafunc.fixturenames:
            pytest = theirs.oracle("pytest")
            marks = {name: (pytest.mark.slow,) if name in self.slow else () for name in self.variants}
            metafunc.parametrize("variant", [pytest.param(name, marks=marks[name]) for name in self.variants])
        if "form" in metafunc.fixturenames:
            pytest = theirs.oracle("pytest")
            forms = [(name, (pytest.mark.slow,) if name in self.slow_formats else ()) for name in self.formats]
            metafunc.parametrize("form", [pytest.param(name, marks=marks) for name, marks in forms])
        if "dropout_field" in metafunc.fixturenames:
            metafunc.parametrize("dropout_field", list(self.dropout))

    @classmethod
    def setup_class(cls) -> None:
        cls._root = Path(tempfile.mkdtemp(prefix="adapter-suite-"))
        cls._written: dict[str, Path] = {}
        cls._cut: dict[Path, StreamedModel] = {}
        cls._costs: dict[object, StepCosts] = {}

    @classmethod
    def teardown_class(cls) -> None:
        shutil.rmtree(cls._root)

    def setup_method(self) -> None:
        # Tiny products gain nothing from threads, and lose a lot where other work runs.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._runners: list[ModelRunner] = []
        self._own = tempfile.TemporaryDirectory(dir=self._root)
        self.own = Path(self._own.name)

    def teardown_method(self) -> None:
        torch.set_num_threads(self._threads)
        for runner in self._runners:
            runner.close()
        self._own.cleanup()

    def folder(self, variant: str, **changes: Any) -> Path:
        """The variant's model folder, made once; only read."""
        key = f"{variant} {sorted(changes.items())}"
        if key not in self._written:
            path = self._root / f"model{len(self._written)}"
            self.write(path, {**self.hf_config, **self.variants[variant], **changes})
            self._written[key] = path
        return self._written[key]

    def bound(self, folder: Path) -> tuple[ModelAdapter, dict[str, TensorInfo]]:
        """The adapter of a folder, and where each of its tensors is."""
        adapter = self.adapter.from_hf_config(read_hf_config(folder))
        return adapter, bind_tensors(read_manifest(folder), adapter)

    def open(
        self,
        folder: Path,
        updates: Mapping[str, LowRankUpdate] | None = None,
        resident: bool = False,
        device: Device | None = None,
        gradients: GradientsInMemory | None = None,
    ) -> ModelRunner:
        """Over the smallest windows there can be, or over all weights; closed when the test is over. ``gradients``: of
        the weights that train."""
        device, updates = device or CpuDevice(), updates or {}
        adapter, bound = self.bound(folder)
        if folder not in self._cut:
            self._cut[folder] = cut_model(adapter, bound, _GRANULE_BYTES)
        model = self._cut[folder]
        given = None if resident else model.smallest_bytes
        store = TensorStore(model, device, model.sizes(given, given, device.shares_ram))
        # What pieces cost depends on these alone: one dry run serves all.
        trained = frozenset() if gradients is None else frozenset(gradients.totals)
        key = folder, tuple(updates), any(update.dropout for update in updates.values()), trained
        scheduler = Scheduler(self._costs[key]) if key in self._costs else None
        runner = ModelRunner(adapter, model, store, updates, Kernels(), scheduler, gradients=gradients)
        self._costs[key] = runner.scheduler.costs
        self._runners.append(runner)
        return runner

    def lora(self, adapter: ModelAdapter, dropout: float = 0.0, seed: int = 1) -> dict[str, LowRankUpdate]:
        """Random LoRA weights on every linear, neither of a pair zero."""
        generator = torch.Generator().manual_seed(seed)

        def update(spec: TensorSpec) -> LowRankUpdate:
            out_size, in_size = spec.linear_shape
            lora_A = torch.randn(_RANK, in_size, generator=generator) * in_size**-0.5
            lora_B = torch.randn(out_size, _RANK, generator=generator) * 0.2
            return LowRankUpdate(lora_A.requires_grad_(), lora_B.requires_grad_(), _SCALE, dropout)

        return {spec.module: update(spec) for spec in adapter.linear_modules()}

    def all_gradients(self, adapter: ModelAdapter) -> GradientsInMemory:
        """Of every tensor that can train."""
        return GradientsInMemory(adapter, [spec.name for spec in adapter.tensors() if spec.role != "buffer"])

    def peft(self, folder: Path, adapter: ModelAdapter, updates: Mapping[str, LowRankUpdate]) -> Any:
        """transformers' model with ``updates``, which PEFT reads from files in its layout."""
        lora_folder = self.own / f"lora{len(list(self.own.iterdir()))}"
        pairs = {module: update.parameters() for module, update in updates.items()}
        theirs.write_lora(lora_folder, self.peft_config(adapter), self.to_peft(adapter, pairs))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = theirs.load_lora(theirs.load_model(folder), lora_folder)
        unused = [str(warning.message) for warning in caught if "missing adapter keys" in str(warning.message)]
        assert not unused, unused[0]
        return model


def batch_of(shape: Shape, vocab_size: int, seed: int = 0) -> TokenBatch:
    """Random ids, each fourth label left out; padding in the first row only."""
    rows, tokens, padding = shape
    ids = torch.randint(0, vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padding:
        n_padding = max(1, tokens // 3)
        mask[0, slice(0, n_padding) if padding == "left" else slice(-n_padding, None)] = 0
    return TokenBatch.of(ids, mask, ids.masked_fill(torch.arange(tokens) % 4 == 2, -100))


def train(
    runner: ModelRunner,
    updates: Mapping[str, LowRankUpdate],
    batches: Sequence[TokenBatch],
    step: int,
    first_layer: int = 0,
    weights: GradientsInMemory | None = None,
) -> dict[str, Tensor]:
    """Loss, logits by micro-batch and all gradients of one step, those of ``weights`` by name."""
    for update in updates.values():
        update.lora_A.grad = update.lora_B.grad = None
    embeds = False
    if weights is not None:
        weights.begin_step()
        embeds = any(spec.role == "embedding" and weights.trains(spec.name) for spec in runner.adapter.tensors())
    logits: dict[int, Tensor] = {}
    loss = runner.train_step(batches, TrainPass(first_layer, seed=7, embeds=embeds), step, logits)
    gradients = {
        module: tuple(update.gradient(parameter).clone() for parameter in update.parameters())
        for module, update in updates.items()
    }
    return {
        "loss": torch.tensor(loss, dtype=torch.float64),
        **{f"logits {index}": each for index, each in logits.items()},
        **by_name(gradients),
        **({} if weights is None else {name: total.clone() for name, total in weights.totals.items()}),
    }


def by_name(pairs: Mapping[str, Pair]) -> dict[str, Tensor]:
    return {
        f"{module}.{name}": tensor.detach()
        for module, pair in pairs.items()
        for name, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
    }
