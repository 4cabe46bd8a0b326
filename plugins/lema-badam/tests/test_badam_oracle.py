"""Block training through lema_core alone, against BAdam's algorithm in plain torch on transformers' Llama."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from lema_badam.method import BlockTraining
from lema_core.blocks.attention import SelfAttention
from lema_core.blocks.config import HfConfig
from lema_core.blocks.decoder import DecoderConfig, PreNormDecoder
from lema_core.blocks.mlp import GatedMlp
from lema_core.checkpoint import bind_tensors, read_elements, read_hf_config, read_manifest
from lema_core.device import CpuDevice
from lema_core.ops.adamw import TorchAdamW
from lema_core.ops.kernels import Kernels
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.runner import ModelRunner
from lema_core.store.granules import WorkingSpace
from lema_core.store.model import cut_model
from lema_core.store.state_plan import StatePlan
from lema_core.store.store import TensorStore

STEPS, LR, DECAY, BETAS, EPS, CLIP, LAYERS = 12, 1e-3, 0.1, (0.9, 0.999), 1e-8, 0.5, 4
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class Llama(PreNormDecoder):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.attention = SelfAttention(config.hidden_size, config.heads)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> Llama:
        return cls(DecoderConfig(**DecoderConfig.common(HfConfig(hf_config))))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("badam")


def folder_of(root: Path, tied: bool = False) -> Path:
    path = root / f"tied {tied}"
    if not path.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=56, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def rows(step: int) -> Tensor:
    return torch.randint(1, 96, (2, 10), generator=torch.Generator().manual_seed(step))


# ----------------------------------------------------------------------------------------------------------------- lema


@contextmanager
def opened(
    folder: Path, output: Path, on_disk: bool = False, layers: list[int | str] | None = None, **method_options: Any
) -> Iterator[tuple[BlockTraining, ModelRunner]]:
    """``on_disk``: windows and states as small as they can be."""
    output.mkdir()
    adapter = Llama.from_hf_config(read_hf_config(folder))
    options = SimpleNamespace(
        trainable_modules=[], trainable_layers=layers or [], method_options=method_options, seed=3, learning_rate=LR,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPS, weight_decay=DECAY,
    )  # fmt: skip
    training = BlockTraining.create(adapter, options, torch.device("cpu"), TorchAdamW())
    space = WorkingSpace(output / "weights in training")
    bound = bind_tensors(read_manifest(folder), adapter)
    model = cut_model(adapter, bound, 16_000, trained=training.weights, space=space)
    window = model.smallest_bytes if on_disk else None
    states = StatePlan(output, *((0, 0) if on_disk else (None, None)), turns=training.turns)
    store = TensorStore(model, CpuDevice(), model.sizes(window, None, True), states=states)
    store.set_weights(lambda name, start, count: read_elements(model.originals[name], start, count).float())
    training.opened(store)
    runner = ModelRunner(adapter, model, store, {}, Kernels(), gradients=store.gradients)
    try:
        yield training, runner
    finally:
        runner.close()


def make_step(training: BlockTraining, runner: ModelRunner, step: int) -> tuple[float, float]:
    """Loss and gradient norm of a step of two micro-batches."""
    training.begin_step(step)
    batches = [TokenBatch.of(row[None], None, row[None]) for row in rows(step)]
    loss = runner.train_step(batches, training.train_pass(step, 0), step)
    return loss, training.finish_step(None, CLIP, 1.0).norm


def weights_of(runner: ModelRunner) -> dict[str, Tensor]:
    """Every weight that ever trains, as it is once the last update is applied."""
    model, updates = runner.store.model, runner.store.updates
    updates.flush()
    return {
        model.canonical(name): torch.cat([updates.weights_of(part).clone() for part in model.parts(name)])
        for name in model.originals
    }


# ---------------------------------------------------------------------------------------------------------- plain torch


def blocks_of(parameters: Mapping[str, Tensor], per_block: int) -> list[list[str]]:
    """Embedding, layers, norm and head; the outer ones together where they share a tensor."""

    def layers(first: int) -> list[str]:
        wanted = [f"model.layers.{i}." for i in range(first, first + per_block)]
        return [name for name in parameters if any(name.startswith(prefix) for prefix in wanted)]

    inside = [layers(first) for first in range(0, LAYERS, per_block)]
    if HEAD in parameters:
        return [[EMBEDDING], *inside, [NORM, HEAD]]
    return [[EMBEDDING, NORM], *inside]


def plain_badam(
    folder: Path, per_block: int, every: int, turn: Callable[[int, int], int]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and weights; ``turn(number, blocks)`` is the block of a turn."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    parameters = dict(model.named_parameters())
    blocks = blocks_of(parameters, per_block)
    losses, norms = [], []
    for step in range(STEPS):
        number, t = step // every, step % every + 1
        block = {name: parameters[name] for name in blocks[turn(number, len(blocks))]}
        if t == 1:
            m = {name: torch.zeros_like(p) for name, p in block.items()}
            v = {name: torch.zeros_like(p) for name, p in block.items()}
        for name, p in parameters.items():
            p.requires_grad_(name in block)
            p.grad = None
        ids = rows(step)
        loss = cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in block.values()))
        with torch.no_grad():
            for name, p in block.items():
                g = p.grad * min(1.0, CLIP / (norm + 1e-6))
                m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * g
                v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * g * g
                p *= 1 - LR * (DECAY if p.dim() > 1 else 0.0)
                p -= LR * (m[name] / (1 - BETAS[0] ** t)) / ((v[name] / (1 - BETAS[1] ** t)).sqrt() + EPS)
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms, {name: p.detach().flatten() for name, p in parameters.items()}


def ascending(number: int, blocks: int) -> int:
    return number % blocks


def descending(number: int, blocks: int) -> int:
    return blocks - 1 - number % blocks


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    "on_disk", [pytest.param(False, marks=pytest.mark.slow, id="in RAM"), pytest.param(True, id="on disk")]
)
@pytest.mark.parametrize(
    "tied, per_block, every, mode, turn",
    [
        (False, 1, 2, "ascending", ascending),
        (True, 1, 2, "descending", descending),
        (False, 3, 3, "descending", descending),
    ],
)
def test_twelve_steps_are_those_of_plain_torch(
    tied: bool, per_block: int, every: int, mode: str, turn: Any, on_disk: bool, root: Path, tmp_path: Path
) -> None:
    folder = folder_of(root, tied)
    losses, norms, expected = plain_badam(folder, per_block, every, turn)
    options = {"layers_per_block": per_block, "switch_block_every": every, "switch_mode": mode}
    with opened(folder, tmp_path / "out", on_disk, **options) as (training, runner):
        found = [make_step(training, runner, step) for step in range(STEPS)]
        weights = weights_of(runner)
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-5)
    assert [norm for _, norm in found] == pytest.approx(norms, rel=1e-4)
    start = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        moved = (weight - start[name].flatten()).norm()
        assert moved > 0 and (weights[name] - weight).norm() <= 1e-3 * moved, name


def test_an_order_that_is_drawn(root: Path, tmp_path: Path) -> None:
    folder, options = folder_of(root), {"switch_block_every": 2, "switch_mode": "random"}
    with opened(folder, tmp_path / "out", **options) as (training, runner):
        turns = [training.schedule.block(step) for step in range(0, STEPS, 2)]
        losses, _, _ = plain_badam(folder, 1, 2, lambda number, blocks: turns[number])
        assert [make_step(training, runner, step)[0] for step in range(STEPS)] == pytest.approx(losses, rel=1e-5)
    assert turns != sorted(turns)


def test_what_is_not_its_turn_keeps_every_byte(root: Path, tmp_path: Path) -> None:
    with opened(folder_of(root), tmp_path / "out", True, switch_block_every=2) as (training, runner):
        before = weights_of(runner)
        for step in range(6):
            make_step(training, runner, step)
            now, active = weights_of(runner), training.active(step)
            assert {name for name in now if not torch.equal(now[name], before[name])} == set(active)
            before = now


@pytest.mark.parametrize("on_disk", [False, True], ids=["in RAM", "on disk"])
def test_there_is_room_for_the_states_of_one_block(on_disk: bool, root: Path, tmp_path: Path) -> None:
    """Four bytes of a gradient and eight of moments for each number of the largest block, in whole sectors of its
    granules; what is not its turn is not asked for."""
    options = {"switch_block_every": 1, "switch_mode": "ascending", "layers_per_block": 2}
    with opened(folder_of(root), tmp_path / "out", on_disk, **options) as (training, runner):
        updates, model = runner.store.updates, runner.store.model
        block_of = {name: number for number, block in enumerate(training.blocks) for name in block}
        blocks: list[list[int]] = [[] for _ in training.blocks]
        for each in model.trained:
            blocks[block_of[model.canonical(each.parts[0].tensor)]].append(each.granule.nbytes)
        largest = sum(max(sizes) for sizes in zip_longest(*(sorted(each)[::-1] for each in blocks), fillvalue=0))
        assert largest <= 1.3 * max(map(sum, blocks)) and largest < 0.6 * sum(map(sum, blocks))
        grads, optim = updates.grads.stream, updates.moments.stream
        assert (grads.nbytes, optim.nbytes) == (largest, 2 * largest)
        assert grads.disk_bytes + optim.disk_bytes == (3 * largest if on_disk else 0)
        assert optim.ram_bytes == (3 * 2 * max(map(max, blocks)) if on_disk else 2 * largest)
        taken: set[int] = set()
        for stream in (optim, grads):
            stream.take = remembering(stream.take, taken)
        for step in range(len(training.blocks)):
            make_step(training, runner, step)
            updates.flush()
            tensors = {model.canonical(part.tensor) for number in taken for part in model.trained[number].parts}
            assert tensors == set(training.active(step))
            taken.clear()


def remembering(take: Callable[..., Tensor], taken: set[int]) -> Callable[..., Tensor]:
    def remembered(number: int, fresh: bool = False) -> Tensor:
        taken.add(number)
        return take(number, fresh)

    return remembered


def test_selected_layers_take_turns(root: Path, tmp_path: Path) -> None:
    """Nothing below the lowest of them is passed on the way back."""
    options = {"layers": ["last:2", "head"], "switch_block_every": 1, "switch_mode": "ascending"}
    with opened(folder_of(root), tmp_path / "out", **options) as (training, runner):
        assert [training.train_pass(step, 0).first_layer for step in range(4)] == [2, 3, 4, 2]
        assert training.largest_pass(0).first_layer == 2
        losses = [make_step(training, runner, step)[0] for step in range(3)]
    assert all(map(math.isfinite, losses))
