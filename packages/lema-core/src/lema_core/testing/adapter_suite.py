"""What every model adapter must do; inherit it to test one. It needs transformers and peft, the oracles.

    class TestMyModel(AdapterSuite):
        adapter = MyAdapter
        hf_config = {"model_type": "my_model", "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, ...}
        variants = {"untied": {}, "tied": {"tie_word_embeddings": True}, "window": {"sliding_window": 5}}

pytest collects the subclass and runs each test on every variant: a random model that transformers makes and saves.
Shapes: B rows, T tokens, V vocabulary, r rank.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint import TensorInfo, bind_tensors, read_hf_config, read_manifest
from lema_core.device import CpuDevice, Device
from lema_core.errors import CheckpointError
from lema_core.ops.kernels import Kernels
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.generation import generate_greedy
from lema_core.runtime.piece_run import Level
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_core.runtime.schedule import Groups
from lema_core.store.model import cut_model
from lema_core.store.store import TensorStore
from lema_core.testing import adapter_files as files
from lema_core.testing import adapter_oracle as theirs
from lema_core.testing.comparing import assert_all_close, assert_close, assert_equal
from lema_core.testing.forced import ForcedSchedule
from lema_core.testing.simulated import SimulatedAccelerator

#: lora_A [r, in] and lora_B [out, r]
Pair = tuple[Tensor, Tensor]
#: rows, tokens, and where the first row is padded
Shape = tuple[int, int, str]

#: small matrices are cut into several row blocks
_GRANULE_BYTES = 9_000
_RANK, _SCALE = 3, 0.5
#: one target, one token (nothing to learn), padding on both sides, no length a multiple of another
_UNEVEN: tuple[Shape, ...] = ((2, 9, "right"), (1, 5, ""), (3, 13, "left"), (1, 1, ""), (1, 2, ""))
#: micro-batches of a step, step by step
_STEPS: tuple[tuple[Shape, ...], ...] = (_UNEVEN, ((1, 17, ""),), ((2, 7, "left"), (2, 7, "right")))
_R, _K, _G = Level.RECOMPUTE, Level.KEEP, Level.GRAPH


class AdapterSuite:
    """Tests of an adapter against transformers and PEFT, and of what streaming promises, through lema_core alone.

    ``hf_config``: fields of a small ``config.json``, ``model_type`` among them, without dropout. ``variants``: what
    each changes. ``dropout``: fields that turn the model's own dropout on, if it has any. ``buffers``: names and shapes
    of tensors that files may have and ``adapter.ignored`` covers, one at least for each pattern.
    """

    adapter: ClassVar[type[ModelAdapter]]
    hf_config: ClassVar[Mapping[str, Any]]
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {}}
    dropout: ClassVar[Mapping[str, Any]] = {}
    buffers: ClassVar[Mapping[str, tuple[int, ...]]] = {}

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

    def oracle_loss(self, model: Any, batches: Sequence[TokenBatch], logits_BTV: Sequence[Tensor]) -> Tensor:
        """The loss of a step, from the logits of its ``batches`` by transformers' ``model``: the mean over all targets,
        unless the architecture adds something."""
        return theirs.mean_loss(logits_BTV, batches)

    # -- what the tests are made of

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "variant" in metafunc.fixturenames:
            metafunc.parametrize("variant", list(self.variants))

    @classmethod
    def setup_class(cls) -> None:
        cls._root = Path(tempfile.mkdtemp(prefix="adapter-suite-"))
        cls._written: dict[str, Path] = {}

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
    ) -> ModelRunner:
        """Over the smallest windows there can be, or over all weights; closed when the test is over."""
        device = device or CpuDevice()
        adapter, bound = self.bound(folder)
        model = cut_model(adapter, bound, _GRANULE_BYTES)
        given = None if resident else model.smallest_bytes
        store = TensorStore(model, device, model.sizes(given, given, device.shares_ram))
        self._runners.append(ModelRunner(adapter, model, store, updates or {}, Kernels()))
        return self._runners[-1]

    def lora(self, adapter: ModelAdapter, dropout: float = 0.0, seed: int = 1) -> dict[str, LowRankUpdate]:
        """Random LoRA weights on every linear, neither of a pair zero."""
        generator = torch.Generator().manual_seed(seed)

        def update(spec: TensorSpec) -> LowRankUpdate:
            out_size, in_size = spec.linear_shape
            lora_A = torch.randn(_RANK, in_size, generator=generator) * in_size**-0.5
            lora_B = torch.randn(out_size, _RANK, generator=generator) * 0.2
            return LowRankUpdate(lora_A.requires_grad_(), lora_B.requires_grad_(), _SCALE, dropout)

        return {spec.module: update(spec) for spec in adapter.linear_modules()}

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

    # -- the files

    def test_every_tensor_of_the_file_is_used(self, variant: str) -> None:
        folder = self.folder(variant)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            adapter, bound = self.bound(folder)
        in_files = set(read_manifest(folder).tensors)
        assert {info.name for info in bound.values()} == in_files
        specs = list(adapter.tensors())
        assert len({spec.name for spec in specs}) == len(specs), "a name is declared twice"
        for spec in specs:
            number = re.search(r"(?:^|\.)(\d+)\.", spec.name)
            assert spec.layer == (None if number is None else int(number[1])), f"{spec.name}: layer {spec.layer}"

    def test_lora_is_possible_on_every_linear(self, variant: str) -> None:
        adapter, _ = self.bound(self.folder(variant))
        modules = {spec.module for spec in adapter.linear_modules()}
        expected = self.linear_names(theirs.load_model(self.folder(variant)))
        missing, extra = sorted(expected - modules), sorted(modules - expected)
        assert not missing and not extra, f"not declared: {missing[:4]}; not linears in transformers: {extra[:4]}"

    def test_files_as_the_hub_has_them(self, variant: str) -> None:
        """Under every prefix, in shards, with buffers that carry no weights: the same bits without a warning."""
        folder = self.folder(variant)
        ids = _batch((2, 6, ""), self.bound(folder)[0].vocab_size)
        expected = self.open(folder).logits(ids)
        tensors = files.read_tensors(folder)
        for pattern in self.adapter.ignored:
            assert any(re.search(pattern, name) for name in self.buffers), f"buffers: none that {pattern!r} ignores"
        buffers = {name: torch.zeros(shape) for name, shape in self.buffers.items()}
        canonical = self.adapter.prefixes[0]
        for number, prefix in enumerate(self.adapter.prefixes):
            held = files.spelled(tensors | buffers, canonical, prefix)
            path = files.write_tensors(folder, self.own / f"prefix{number}", held, shards=1 + number % 3)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = self.open(path).logits(ids)
            assert_equal(f"prefix {prefix!r}", {"logits": found}, {"logits": expected})

    def test_what_the_model_has_no_use_for_is_named(self, variant: str) -> None:
        folder = self.folder(variant)
        tensors = files.read_tensors(folder) | {"something.strange.weight": torch.ones(3)}
        path = files.write_tensors(folder, self.own / "extra", tensors)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.bound(path)
        assert any("something.strange.weight" in str(each.message) for each in caught)

    def test_missing_and_misshapen_tensors_are_named(self, variant: str) -> None:
        """One of each role and kind, and a layer that the config does not have."""
        folder = self.folder(variant)
        adapter, bound = self.bound(folder)
        tensors = files.read_tensors(folder)
        for spec in _one_of_each_kind(adapter):
            name = bound[spec.name].name
            number = len(list(self.own.iterdir()))
            rest = {each: tensor for each, tensor in tensors.items() if each != name}
            path = files.write_tensors(folder, self.own / f"missing{number}", rest)
            assert spec.name in (said := self._refused(path)) or name in said, said
            rest[name] = files.one_row_less(tensors[name])
            path = files.write_tensors(folder, self.own / f"misshapen{number}", rest)
            said = self._refused(path)
            assert name in said and str(list(rest[name].shape)) in said and str(list(tensors[name].shape)) in said, said
        last = adapter.n_layers - 1
        copies = {
            info.name.replace(f"{last}.", f"{last + 1}.", 1): tensors[info.name].clone()
            for spec in adapter.tensors()
            if spec.layer == last and (info := bound[spec.name])
        }
        said = self._refused(files.write_tensors(folder, self.own / "more", tensors | copies))
        assert f"{last + 1} layers" in said and f"{last + 2}" in said, said

    def _refused(self, folder: Path) -> str:
        """What opening a folder says that must fail."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.bound(folder)
        except CheckpointError as error:
            assert "\n" not in str(error)
            return str(error)
        raise AssertionError(f"{folder.name}: the folder was opened")

    # -- the numbers

    def test_logits_and_loss(self, variant: str) -> None:
        """Of rows of several lengths, one token among them, padded left, right and not at all."""
        folder = self.folder(variant)
        runner, model = self.open(folder), theirs.load_model(folder)
        for shape in ((1, 1, ""), (2, 9, ""), (3, 13, "left"), (2, 17, "right"), (4, 2, "left")):
            batch = _batch(shape, runner.adapter.vocab_size)
            with torch.no_grad():
                expected = theirs.logits(model, batch)
            real = batch.attention_mask
            assert_close(f"logits of {shape}", runner.logits(batch)[real], expected[real])
            if batch.n_targets:
                total, n_targets = runner.loss(batch)
                loss = theirs.mean_loss([expected], [batch])
                assert_close(f"loss of {shape}", torch.tensor(total / n_targets), loss)

    def test_padding_changes_nothing(self, variant: str) -> None:
        runner = self.open(self.folder(variant))
        row = _batch((1, 6, ""), runner.adapter.vocab_size)
        expected = runner.logits(row)[0]
        for side in ("left", "right"):
            other = _batch((2, 11, ""), runner.adapter.vocab_size, seed=9)
            place = slice(5, None) if side == "left" else slice(0, 6)
            ids, mask = other.input_ids.clone(), torch.zeros(2, 11, dtype=torch.bool)
            ids[0, place], mask[0, place], mask[1] = row.input_ids[0], True, True
            found = runner.logits(TokenBatch(ids, mask))[0, place]
            assert_close(f"logits of a row padded on the {side}", found, expected)

    def test_logits_loss_and_gradients_of_training(self, variant: str) -> None:
        """LoRA on every linear; micro-batches of unequal lengths together; another number of them each step."""
        folder = self.folder(variant)
        adapter, _ = self.bound(folder)
        updates = self.lora(adapter)
        runner, model = self.open(folder, updates), self.peft(folder, adapter, updates)
        for step, shapes in enumerate(_STEPS):
            batches = [_batch(shape, adapter.vocab_size, seed) for seed, shape in enumerate(shapes)]
            found = _train(runner, updates, batches, step)
            model.zero_grad()
            theirs_BTV = [theirs.logits(model, batch) for batch in batches]
            loss = self.oracle_loss(model, batches, theirs_BTV)
            loss.backward()
            gradients = {
                key: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for key, parameter in theirs.trained(model).items()
            }
            expected = {"loss": loss, **_by_name(self.from_peft(adapter, gradients))}
            for index, batch in enumerate(batches):
                if (logits := found.pop(f"logits {index}", None)) is not None:
                    real = batch.attention_mask
                    assert_close(f"step {step}, logits {index}", logits[real], theirs_BTV[index][real])
            assert_all_close(f"step {step}", found, expected)

    def test_no_window_or_schedule_changes_a_bit(self, variant: str) -> None:
        """Streamed = resident, micro-batches together = apart, and whatever is kept or recomputed, dropout included."""
        folder = self.folder(variant, **self.dropout)
        adapter, _ = self.bound(folder)
        updates = self.lora(adapter, dropout=0.2)
        batches = [_batch(shape, adapter.vocab_size, seed) for seed, shape in enumerate(_UNEVEN)]
        n_learning = sum(batch.n_targets > 0 for batch in batches)
        apart: Groups = tuple((index,) for index in range(n_learning))
        together: Groups = (tuple(range(n_learning)),)
        mixed = tuple((_K, _R, _G)[layer % 3] for layer in range(adapter.n_layers))
        computed: dict[str, dict[str, Tensor]] = {}
        costs = None
        for what, groups, levels, resident, device in (
            ("resident, apart, recomputed", apart, [_R] * adapter.n_layers, True, None),
            ("streamed, together, recomputed", together, [_R] * adapter.n_layers, False, None),
            ("streamed, apart, products kept", apart, [_K] * adapter.n_layers, False, None),
            ("streamed, together, graph kept", together, [_G] * adapter.n_layers, False, None),
            ("resident, in two groups, mixed", (together[0][:2], together[0][2:]), mixed, True, None),
            ("accelerator, together, mixed", together, mixed, False, SimulatedAccelerator(latency_s=1e-4)),
        ):
            runner = self.open(folder, updates, resident, device)
            # What pieces cost depends on none of these: one dry run serves all.
            costs = costs or runner.scheduler.costs
            runner.scheduler = ForcedSchedule(costs, groups, levels)
            evaluated = {f"evaluated {shape}": runner.logits(_batch(shape, adapter.vocab_size)) for shape in _UNEVEN}
            computed[what] = evaluated | _train(runner, updates, batches, step=3)
            runner.close()
            assert device is None or device.overwrites_while_read == 0
        expected = computed.pop("resident, apart, recomputed")
        for what, found in computed.items():
            assert_equal(what, found, expected)

    def test_half_precision_files(self) -> None:
        """Weights stored as bf16 and fp16 are those of the file, computed with in fp32."""
        folder = self.folder(next(iter(self.variants)))
        for dtype in (torch.bfloat16, torch.float16):
            tensors = {name: tensor.to(dtype) for name, tensor in files.read_tensors(folder).items()}
            path = files.write_tensors(folder, self.own / str(dtype), tensors)
            runner = self.open(path)
            batch = _batch((2, 9, ""), runner.adapter.vocab_size)
            with torch.no_grad():
                expected = theirs.logits(theirs.load_model(path), batch)
            assert_close(f"{dtype}: logits", runner.logits(batch), expected)

    # -- generation

    def test_cached_generation(self, variant: str) -> None:
        """Token by token: the logits of a fresh forward pass over each row, and the ids of transformers' generate."""
        folder = self.folder(variant)
        runner = self.open(folder)
        prompts = [row.tolist()[:n] for row, n in zip(_batch((3, 7, ""), 40).input_ids, (3, 1, 7), strict=True)]
        decoded: list[Tensor] = []
        next_logits = runner.next_logits
        runner.next_logits = lambda batch, cache: decoded.append(next_logits(batch, cache)) or decoded[-1]
        new_ids = generate_greedy(runner, prompts, 9, chunk_size=4)
        for row, prompt in enumerate(prompts):
            for count, logits_BV in enumerate(decoded):
                ids = torch.tensor([prompt + new_ids[row][:count]])
                fresh = runner.logits(TokenBatch.of(ids))[0, -1]
                assert_close(f"row {row}, token {count}: logits", logits_BV[row], fresh)
        expected = theirs.generate(theirs.load_model(folder), prompts, 9)
        assert new_ids == expected, f"transformers generates {expected}, not {new_ids}"

    # -- LoRA's files, and merging

    def test_lora_round_trip_through_peft(self, variant: str) -> None:
        """PEFT computes the same logits from files in its layout, and saves what it was given, bit for bit."""
        folder = self.folder(variant)
        adapter, _ = self.bound(folder)
        updates = self.lora(adapter)
        model = self.peft(folder, adapter, updates)
        batch = _batch((2, 9, ""), adapter.vocab_size)
        with torch.no_grad():
            expected = theirs.logits(model, batch)
        assert_close("logits", self.open(folder, updates).logits(batch), expected)
        model.save_pretrained(self.own / "saved")
        saved = self.from_peft(adapter, theirs.read_lora(self.own / "saved"))
        own = {module: update.parameters() for module, update in updates.items()}
        assert_equal("what PEFT saved", _by_name(saved), _by_name(own))

    def test_merged_weights(self, variant: str) -> None:
        """W + scale B A in the files gives the logits of W with the update beside it, here and in transformers."""
        folder = self.folder(variant)
        adapter, bound = self.bound(folder)
        # What is merged into a tied head would change the embedding too.
        tied = {spec.module for spec in adapter.tensors() if spec.tied_to is not None}
        updates = {module: update for module, update in self.lora(adapter).items() if module not in tied}
        merged = files.merge(folder, self.own / "merged", adapter, bound, updates)
        batch = _batch((2, 9, "left"), adapter.vocab_size)
        real = batch.attention_mask
        expected = self.open(folder, updates).logits(batch)[real]
        assert_close("logits of the merged model", self.open(merged).logits(batch)[real], expected)
        with torch.no_grad():
            found = theirs.logits(theirs.load_model(merged), batch)
        assert_close("logits of the merged model in transformers", found[real], expected)


def _batch(shape: Shape, vocab_size: int, seed: int = 0) -> TokenBatch:
    """Random ids, each fourth label left out; padding in the first row only."""
    rows, tokens, padding = shape
    ids = torch.randint(0, vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padding:
        n_padding = max(1, tokens // 3)
        mask[0, slice(0, n_padding) if padding == "left" else slice(-n_padding, None)] = 0
    return TokenBatch.of(ids, mask, ids.masked_fill(torch.arange(tokens) % 4 == 2, -100))


def _train(
    runner: ModelRunner, updates: Mapping[str, LowRankUpdate], batches: Sequence[TokenBatch], step: int
) -> dict[str, Tensor]:
    """Loss, logits by micro-batch and all gradients of one step."""
    for update in updates.values():
        update.lora_A.grad = update.lora_B.grad = None
    logits: dict[int, Tensor] = {}
    loss = runner.train_step(batches, TrainPass(0, seed=7), step, logits)
    gradients = {
        module: tuple(update.gradient(parameter).clone() for parameter in update.parameters())
        for module, update in updates.items()
    }
    return {
        "loss": torch.tensor(loss, dtype=torch.float64),
        **{f"logits {index}": each for index, each in logits.items()},
        **_by_name(gradients),
    }


def _by_name(pairs: Mapping[str, Pair]) -> dict[str, Tensor]:
    return {
        f"{module}.{name}": tensor.detach()
        for module, pair in pairs.items()
        for name, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
    }


def _one_of_each_kind(adapter: ModelAdapter) -> Iterator[TensorSpec]:
    """The last tensor of each role and last name parts (``q_proj.weight``), none that may lie where another does."""
    tied = {spec.tied_to for spec in adapter.tensors()} - {None}
    kinds = {
        (spec.role, *spec.name.split(".")[-2:]): spec
        for spec in adapter.tensors()
        if spec.tied_to is None and spec.name not in tied
    }
    yield from kinds.values()
