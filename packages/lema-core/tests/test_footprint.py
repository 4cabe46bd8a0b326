"""The activations that a step is expected to take, against what torch's allocator is asked for while one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lema_core.device import CpuDevice
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.footprint import activation_bytes
from lema_core.runtime.runner import TrainPass
from lema_core.testing.toy import ToyConfig, linear_names, open_toy, toy_updates, write_toy


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def peak_allocated(work: Callable[[], object]) -> int:
    """Bytes that ``work`` had allocated at its worst, by the profiler's record of every allocation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    found = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


LONG = ToyConfig(hidden_size=32, feed_forward=60, n_layers=6, max_positions=400)
WIDE = ToyConfig(hidden_size=64, feed_forward=300, n_layers=2, max_positions=64, dropout=0.1)
MANY_WORDS = ToyConfig(hidden_size=16, n_layers=2, vocab_size=6000, max_positions=100)


@pytest.mark.parametrize(
    ("config", "rows", "tokens"), [(LONG, 1, 400), (WIDE, 3, 50), (MANY_WORDS, 2, 90)], ids=["long", "wide", "words"]
)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("lora_dropout", [0.0, 0.3])
def test_a_step_takes_what_was_expected_and_not_much_less(
    tmp_path: Path, config: ToyConfig, rows: int, tokens: int, recompute: bool, lora_dropout: float
) -> None:
    updates = toy_updates(config, linear_names(config), 4, lora_dropout)
    runner = open_toy(config, write_toy(tmp_path, config, dtypes=(torch.bfloat16,)), CpuDevice(), updates)
    ids = torch.randint(0, config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    batches = [TokenBatch.of(ids, mask, ids)]
    with runner.store as store:

        def step() -> None:
            runner.train_step(batches, TrainPass(0, recompute, 0), 0)

        step()  # traces, reads, and makes what stays
        taken = peak_allocated(step)
        expected = activation_bytes(runner.adapter, store.model, updates, torch.float32, rows, tokens, recompute)
    assert taken <= expected, f"{taken:,} bytes were allocated, {expected:,} expected"
    assert expected <= 2.5 * taken, f"{expected:,} bytes are set aside, {taken:,} are used"


def test_attention_costs_no_square_of_the_length(tmp_path: Path) -> None:
    """A fused kernel keeps no [T, T] matrix; where there is none, it is counted."""
    config = ToyConfig(n_layers=1)
    model = open_toy(config, write_toy(tmp_path, config), CpuDevice())
    with model.store as store:

        def expected(tokens: int, fused: bool) -> int:
            return activation_bytes(model.adapter, store.model, {}, torch.float32, 1, tokens, True, fused)

        mask = 5 * 4000**2
        assert expected(4000, True) - mask < 6 * expected(1000, True)
        assert expected(4000, False) - expected(4000, True) > 4 * 4000**2 * config.n_heads


def test_keeping_costs_more_than_recomputing_and_grows_with_layers(tmp_path: Path) -> None:
    sizes = {}
    for layers in (2, 4):
        config = ToyConfig(n_layers=layers)
        folder = tmp_path / str(layers)
        folder.mkdir()
        model = open_toy(config, write_toy(folder, config), CpuDevice())
        with model.store as store:
            for recompute in (True, False):
                sizes[layers, recompute] = activation_bytes(
                    model.adapter, store.model, {}, torch.float32, 2, 30, recompute
                )
    boundary = 2 * 30 * 16 * 4
    assert sizes[4, True] - sizes[2, True] == 2 * boundary
    assert sizes[4, False] - sizes[2, False] > 10 * boundary
