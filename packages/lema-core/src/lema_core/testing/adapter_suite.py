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
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter, TensorSpec
from lema_core.checkpoint import read_manifest
from lema_core.errors import CheckpointError
from lema_core.kv import KVCache
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.runtime.batch import IGNORE_INDEX, TokenBatch
from lema_core.runtime.generation import generate_greedy
from lema_core.runtime.piece_run import Level
from lema_core.runtime.schedule import Groups
from lema_core.testing import adapter_files as files
from lema_core.testing import adapter_oracle as theirs
from lema_core.testing.adapter_case import Shape, batch_of, by_name, train
from lema_core.testing.adapter_quantized import QuantizedSuite
from lema_core.testing.adapter_weights import WeightSuite
from lema_core.testing.allocations import peak_allocated
from lema_core.testing.comparing import assert_all_close, assert_close, assert_equal
from lema_core.testing.forced import ForcedSchedule
from lema_core.testing.gradients import GradientsInMemory
from lema_core.testing.simulated import SimulatedAccelerator

#: one target, one token (nothing to learn), padding on both sides, no length a multiple of another
_UNEVEN: tuple[Shape, ...] = ((2, 9, "right"), (1, 5, ""), (3, 13, "left"), (1, 1, ""), (1, 2, ""), (1, 37, ""))
#: micro-batches of a step, step by step
_STEPS: tuple[tuple[Shape, ...], ...] = (_UNEVEN, ((1, 17, ""),), ((2, 7, "left"), (2, 7, "right")))
_NEW_TOKENS = 24
_R, _K, _G = Level.RECOMPUTE, Level.KEEP, Level.GRAPH


class AdapterSuite(WeightSuite, QuantizedSuite):
    """Tests of an adapter against transformers and PEFT, and of what streaming promises, through lema_core alone."""

    # -- the files

    def test_every_tensor_of_the_file_is_used(self, variant: str) -> None:
        folder = self.folder(variant)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            adapter, bound = self.bound(folder)
        unused = set(read_manifest(folder).tensors) - {info.name for info in bound.values()}
        assert not unused, f"not used: {sorted(unused)[:4]}"
        specs = list(adapter.tensors())
        assert len({spec.name for spec in specs}) == len(specs), "a name is declared twice"
        for spec in specs:
            number = re.search(r"(?:^|\.)(\d+)\.", spec.name)
            assert spec.layer == (None if number is None else int(number[1])), f"{spec.name}: layer {spec.layer}"

    def test_sizes_are_those_of_the_config(self, variant: str) -> None:
        adapter, _ = self.bound(self.folder(variant))
        config = theirs.load_config(self.folder(variant))
        found = adapter.n_layers, adapter.hidden_size, adapter.vocab_size, adapter.max_positions
        expected = config.num_hidden_layers, config.hidden_size, config.vocab_size, config.max_position_embeddings
        assert found == expected, f"layers, hidden size, vocabulary and positions: {expected} expected, {found} found"

    def test_lora_is_possible_on_every_linear(self, variant: str) -> None:
        adapter, _ = self.bound(self.folder(variant))
        modules = {spec.module for spec in adapter.linear_modules()}
        expected = self.linear_names(theirs.load_model(self.folder(variant)))
        missing, extra = sorted(expected - modules), sorted(modules - expected)
        assert not missing and not extra, f"not declared: {missing[:4]}; not linears in transformers: {extra[:4]}"

    def test_files_as_the_hub_has_them(self, variant: str) -> None:
        """Under every prefix, in shards, with buffers that carry no weights, tied tensors twice: the same bits without
        a warning."""
        folder = self.folder(variant)
        adapter, bound = self.bound(folder)
        ids = batch_of((2, 6, ""), adapter.vocab_size)
        expected = self.open(folder).logits(ids)
        for pattern in self.adapter.ignored:
            assert any(re.search(pattern, name) for name in self.buffers), f"buffers: none that {pattern!r} ignores"
        tensors = files.read_tensors(folder)
        twice = {spec.name: tensors[bound[spec.name].name].clone() for spec in adapter.tensors() if spec.tied_to}
        buffers = {name: torch.zeros(shape) for name, shape in self.buffers.items()}
        canonical = self.adapter.prefixes[0]
        for number, prefix in enumerate(self.adapter.prefixes):
            held = files.spelled(tensors | buffers | ({} if number % 2 else twice), canonical, prefix)
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
            batch = batch_of(shape, runner.adapter.vocab_size)
            with torch.no_grad():
                expected = self.oracle_logits(model, batch)
            real = batch.attention_mask
            assert_close(f"logits of {shape}", runner.logits(batch)[real], expected[real])
            if batch.n_targets:
                total, n_targets = runner.loss(batch)
                loss = theirs.mean_loss([expected], [batch])
                assert_close(f"loss of {shape}", torch.tensor(total / n_targets), loss)

    def test_padding_changes_nothing(self, variant: str) -> None:
        runner = self.open(self.folder(variant))
        row = batch_of((1, 6, ""), runner.adapter.vocab_size)
        expected = runner.logits(row)[0]
        for side in ("left", "right"):
            other = batch_of((2, 11, ""), runner.adapter.vocab_size, seed=9)
            place = slice(5, None) if side == "left" else slice(0, 6)
            ids, mask = other.input_ids.clone(), torch.zeros(2, 11, dtype=torch.bool)
            ids[0, place], mask[0, place], mask[1] = row.input_ids[0], True, True
            labels = ids.masked_fill(~mask, IGNORE_INDEX)
            labels[0, place] = row.labels[0]
            found = runner.logits(TokenBatch(ids, mask))[0, place]
            assert_close(f"logits of a row padded on the {side}", found, expected)
            longer = TokenBatch(ids[:1], mask[:1], labels[:1])
            alone, padded = (torch.tensor(runner.loss(each)) for each in (row, longer))
            assert_close(f"loss of a row padded on the {side}, and its targets", padded, alone, 1e-6)

    def test_logits_loss_and_gradients_of_training(self, variant: str) -> None:
        """LoRA on every linear; micro-batches of unequal lengths together; another number of them each step."""
        folder = self.folder(variant)
        adapter, _ = self.bound(folder)
        updates = self.lora(adapter)
        runner, model = self.open(folder, updates), self.peft(folder, adapter, updates)
        for step, shapes in enumerate(_STEPS):
            batches = [batch_of(shape, adapter.vocab_size, seed) for seed, shape in enumerate(shapes)]
            found = train(runner, updates, batches, step)
            assert_all_close(f"step {step}", found, self._oracle_step(adapter, model, batches, found))

    def _oracle_step(
        self, adapter: ModelAdapter, model: Any, batches: Sequence[TokenBatch], found: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What ``train`` gives, by PEFT. Logits of padding, which nobody reads, are those of ``found``."""
        model.zero_grad()
        logits_BTV = [self.oracle_logits(model, batch) for batch in batches]
        loss = self.oracle_loss(model, batches, logits_BTV)
        loss.backward()
        gradients = {
            key: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for key, parameter in theirs.trained(model).items()
        }
        logits = {
            f"logits {index}": torch.where(batch.attention_mask[..., None], each, found[f"logits {index}"])
            for index, (batch, each) in enumerate(zip(batches, logits_BTV, strict=True))
            if f"logits {index}" in found
        }
        return {"loss": loss, **logits, **by_name(self.from_peft(adapter, gradients))}

    def test_lora_on_one_kind_of_linear(self) -> None:
        """Nothing else of the last layer, or outside all, has a gradient: each linear by itself."""
        folder = self.folder(next(iter(self.variants)))
        adapter, _ = self.bound(folder)
        everything = self.lora(adapter)
        model = self.peft(folder, adapter, everything)
        last = [spec for spec in adapter.linear_modules() if spec.layer in (adapter.n_layers - 1, None)]
        batches = [batch_of(shape, adapter.vocab_size, seed) for seed, shape in enumerate(((2, 9, "left"), (1, 5, "")))]
        for spec in last:
            updates = {spec.module: everything[spec.module]}
            pairs = {module: update.parameters() for module, update in everything.items()}
            none = {module: tuple(map(torch.zeros_like, pair)) for module, pair in pairs.items()}
            given = self.to_peft(adapter, none | {spec.module: pairs[spec.module]})
            with torch.no_grad():
                for key, parameter in theirs.trained(model).items():
                    parameter.copy_(given[key])
            first_layer = adapter.n_layers if spec.layer is None else spec.layer
            found = train(self.open(folder, updates), updates, batches, 0, first_layer)
            expected = self._oracle_step(adapter, model, batches, found)
            assert_all_close(f"LoRA on {spec.module} alone", found, {name: expected[name] for name in found})

    def test_no_window_or_schedule_changes_a_bit(self, variant: str) -> None:
        """Streamed = resident, micro-batches together = apart, and whatever is kept or recomputed, dropout included; of
        LoRA's gradients and those of all weights, which change nothing of one another."""
        folder = self.folder(variant, **self.dropout)
        adapter, _ = self.bound(folder)
        updates = self.lora(adapter, dropout=0.2)
        batches = [batch_of(shape, adapter.vocab_size, seed) for seed, shape in enumerate(_UNEVEN)]
        n_learning = sum(batch.n_targets > 0 for batch in batches)
        apart: Groups = tuple((index,) for index in range(n_learning))
        together: Groups = (tuple(range(n_learning)),)
        mixed = tuple((_K, _R, _G)[layer % 3] for layer in range(adapter.n_layers))
        computed: dict[str, dict[str, Tensor]] = {}
        for what, groups, levels, resident, device in (
            ("resident, apart, recomputed", apart, [_R] * adapter.n_layers, True, None),
            ("streamed, together, recomputed", together, [_R] * adapter.n_layers, False, None),
            ("streamed, apart, products kept", apart, [_K] * adapter.n_layers, False, None),
            ("streamed, together, graph kept", together, [_G] * adapter.n_layers, False, None),
            ("resident, in two groups, mixed", (together[0][:2], together[0][2:]), mixed, True, None),
            ("accelerator, together, mixed", together, mixed, False, SimulatedAccelerator(latency_s=1e-4)),
        ):
            weights = self.all_gradients(adapter)
            runner = self.open(folder, updates, resident, device, weights)
            runner.scheduler = ForcedSchedule(runner.scheduler.costs, groups, levels)
            evaluated = {f"evaluated {shape}": runner.logits(batch_of(shape, adapter.vocab_size)) for shape in _UNEVEN}
            computed[what] = evaluated | train(runner, updates, batches, step=3, weights=weights)
            runner.close()
            assert device is None or device.overwrites_while_read == 0
        expected = computed.pop("resident, apart, recomputed")
        for what, found in computed.items():
            assert_equal(what, found, expected)
        frozen = train(self.open(folder, updates), updates, batches, step=3)
        assert_equal("weights frozen", frozen, {name: expected[name] for name in frozen})

    def test_a_step_holds_what_was_expected(self, variant: str) -> None:
        """Budgets rely on it, whether LoRA weights train or all of the model's own. The first step makes what a kernel
        keeps."""
        folder = self.folder(variant, **self.dropout)
        adapter, _ = self.bound(folder)
        self._check_expected_bytes(folder, self.lora(adapter, dropout=0.2), None)
        self._check_expected_bytes(folder, {}, self.all_gradients(adapter))

    def _check_expected_bytes(
        self, folder: Path, updates: Mapping[str, LowRankUpdate], weights: GradientsInMemory | None
    ) -> None:
        runner = self.open(folder, updates, resident=True, gradients=weights)
        adapter = runner.adapter
        batches = [
            batch_of(shape, adapter.vocab_size)
            for shape in ((2, 20, "right"), (1, 37, ""), (1, 13, ""), (3, 11, "left"))
        ]
        mixed = [(_K, _R)[layer % 2] for layer in range(adapter.n_layers)]
        for what, groups, levels in (
            ("together, graph kept", ((0, 1, 2, 3),), [_G] * adapter.n_layers),
            ("in two groups, mixed", ((0, 1), (2, 3)), mixed),
        ):
            runner.scheduler = forced = ForcedSchedule(runner.scheduler.costs, groups, levels)
            work = partial(train, runner, updates, batches, 3, weights=weights)
            work()
            taken, expected = peak_allocated(work), forced.expected_bytes
            assert taken <= expected <= 1.5 * taken, f"{what}: {expected:,} bytes expected, {taken:,} taken"

    def test_dropout_of_the_model(self, dropout_field: str) -> None:
        """It changes what is learnt from, by the step, and nothing of what is evaluated."""
        variant = next(iter(self.variants))
        losses, logits = [], []
        for changes in ({}, {dropout_field: self.dropout[dropout_field]}):
            folder = self.folder(variant, **changes)
            adapter, _ = self.bound(folder)
            updates = self.lora(adapter)
            runner, batch = self.open(folder, updates), batch_of((2, 9, "left"), adapter.vocab_size)
            logits.append(runner.logits(batch))
            losses.append([train(runner, updates, [batch], step)["loss"].item() for step in (0, 1, 0)])
        assert_equal("evaluated", {"logits": logits[1]}, {"logits": logits[0]})
        (without, *others), (first, second, again) = losses
        assert others == [without] * 2, f"without dropout: {losses[0]}"
        assert first == again and len({without, first, second}) == 3, f"{without} without, {losses[1]} with dropout"

    def test_half_precision_files(self) -> None:
        """Weights stored as bf16 and fp16 are those of the file, computed with in fp32."""
        folder = self.folder(next(iter(self.variants)))
        for dtype in (torch.bfloat16, torch.float16):
            tensors = {name: tensor.to(dtype) for name, tensor in files.read_tensors(folder).items()}
            path = files.write_tensors(folder, self.own / str(dtype), tensors)
            runner = self.open(path)
            batch = batch_of((2, 9, ""), runner.adapter.vocab_size)
            with torch.no_grad():
                expected = self.oracle_logits(theirs.load_model(path), batch)
            assert_close(f"{dtype}: logits", runner.logits(batch), expected)

    # -- generation

    def test_cached_generation(self, variant: str) -> None:
        """Token by token: the logits of a fresh forward pass over each row, and the ids of transformers' generate."""
        folder = self.folder(variant)
        runner = self.open(folder)
        prompts = [row.tolist()[:n] for row, n in zip(batch_of((3, 7, ""), 40).input_ids, (3, 1, 7), strict=True)]
        decoded: list[Tensor] = []
        next_logits = runner.next_logits
        runner.next_logits = lambda batch, cache: decoded.append(next_logits(batch, cache)) or decoded[-1]
        new_ids = generate_greedy(runner, prompts, _NEW_TOKENS, chunk_size=4)
        for row, prompt in enumerate(prompts):
            ids = torch.tensor(prompt + new_ids[row][:-1])
            fresh = runner.logits(TokenBatch.of(ids))[0, len(prompt) - 1 :]
            for count, logits_BV in enumerate(decoded):
                assert_close(f"row {row}, token {count}: logits", logits_BV[row], fresh[count])
        expected = theirs.generate(theirs.load_model(folder), prompts, _NEW_TOKENS)
        assert new_ids == expected, f"transformers generates {expected}, not {new_ids}"

    def test_a_cache_fed_in_pieces(self, variant: str) -> None:
        """One token, several, and several on a warm cache; the first row is padded on the left."""
        runner = self.open(self.folder(variant))
        adapter = runner.adapter
        ids = batch_of((2, 13, ""), adapter.vocab_size).input_ids
        mask = torch.ones(2, 13, dtype=torch.bool)
        mask[0, :3] = False
        rows = [runner.logits(TokenBatch.of(ids[row, mask[row]]))[0] for row in range(2)]
        answers = []
        for chunk_size in (5, 64):
            cache = KVCache(adapter.n_layers, (2, *adapter.cache_shape()), max_tokens=13, chunk_size=chunk_size)
            for start, stop in ((0, 1), (1, 6), (6, 7), (7, 13)):
                found = runner.next_logits(TokenBatch(ids[:, start:stop], mask[:, :stop]), cache)
                for row in range(2):
                    if mask[row, stop - 1]:
                        expected = rows[row][int(mask[row, :stop].sum()) - 1]
                        assert_close(f"row {row}, tokens {start} to {stop}", found[row], expected)
            assert cache.length == 13
            answers.append({"last logits": found})
        assert_equal("another chunk size of the cache", *answers)

    # -- LoRA's files, and merging

    def test_lora_round_trip_through_peft(self, variant: str) -> None:
        """PEFT computes the same logits from files in its layout, and saves what it was given, bit for bit."""
        folder = self.folder(variant)
        adapter, _ = self.bound(folder)
        updates = self.lora(adapter)
        model = self.peft(folder, adapter, updates)
        batch = batch_of((2, 9, ""), adapter.vocab_size)
        with torch.no_grad():
            expected = self.oracle_logits(model, batch)
        assert_close("logits", self.open(folder, updates).logits(batch), expected)
        model.save_pretrained(self.own / "saved", save_embedding_layers=False)
        saved = self.from_peft(adapter, theirs.read_lora(self.own / "saved"))
        own = {module: update.parameters() for module, update in updates.items()}
        assert_equal("what PEFT saved", by_name(saved), by_name(own))

    def test_merged_weights(self, variant: str) -> None:
        """W + scale B A in the files gives the logits of W with the update beside it, here and in transformers."""
        folder = self.folder(variant)
        adapter, bound = self.bound(folder)
        # What is merged into a tied head would change the embedding too.
        tied = {spec.module for spec in adapter.tensors() if spec.tied_to is not None}
        updates = {module: update for module, update in self.lora(adapter).items() if module not in tied}
        merged = files.merge(folder, self.own / "merged", adapter, bound, updates)
        batch = batch_of((2, 9, "left"), adapter.vocab_size)
        real = batch.attention_mask
        expected = self.open(folder, updates).logits(batch)[real]
        assert_close("logits of the merged model", self.open(merged).logits(batch)[real], expected)
        with torch.no_grad():
            found = self.oracle_logits(theirs.load_model(merged), batch)
        assert_close("logits of the merged model in transformers", found[real], expected)


def _one_of_each_kind(adapter: ModelAdapter) -> Iterator[TensorSpec]:
    """The last tensor of each role and last name parts (``q_proj.weight``), none that may lie where another does."""
    tied = {spec.tied_to for spec in adapter.tensors()} - {None}
    kinds = {
        (spec.role, *spec.name.split(".")[-2:]): spec
        for spec in adapter.tensors()
        if spec.tied_to is None and spec.name not in tied
    }
    yield from kinds.values()
