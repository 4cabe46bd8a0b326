"""What a step is expected to borrow, compute and hold, against what a step does and what torch's allocator is asked
for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from lema_core.device import CpuDevice
from lema_core.kv import KVCache
from lema_core.ops.context import needs_mask
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.piece_run import Level
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_core.runtime.schedule import Groups, MicroBatch, StepSchedule, StepShape
from lema_core.testing.allocations import peak_allocated
from lema_core.testing.checking import CheckingStore
from lema_core.testing.forced import ForcedSchedule
from lema_core.testing.toy import ToyConfig, linear_names, open_toy, toy_updates, write_toy

R, K, G = Level.RECOMPUTE, Level.KEEP, Level.GRAPH
#: (rows, tokens, padded on the left)
Spec = tuple[int, int, bool]


def batches_of(config: ToyConfig, specs: Sequence[Spec]) -> list[TokenBatch]:
    batches = []
    for seed, (rows, tokens, padded) in enumerate(specs):
        ids = torch.randint(0, config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        mask[0, slice(0, 3) if padded else slice(-3, None)] = 0
        batches.append(TokenBatch.of(ids, mask, ids))
    return batches


LONG = ToyConfig(hidden_size=64, feed_forward=150, n_layers=5, max_positions=800)
WIDE = ToyConfig(hidden_size=72, feed_forward=403, n_layers=3, max_positions=100, dropout=0.1)
MANY_WORDS = ToyConfig(hidden_size=64, feed_forward=100, n_layers=2, vocab_size=60_000, max_positions=200)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ToyConfig, float], ModelRunner]:
    """Runners of a model with LoRA everywhere, from the lowest trained layer on."""

    @cache
    def of(config: ToyConfig, lora_dropout: float, first_layer: int = 0, rank: int = 4) -> ModelRunner:
        names = [n for n in linear_names(config) if "layers" not in n or int(n.split(".")[2]) >= first_layer]
        tensors = write_toy(tmp_path_factory.mktemp("toy"), config, dtypes=(torch.bfloat16,))
        updates = toy_updates(config, names, rank, lora_dropout)
        return open_toy(config, tensors, CpuDevice(), updates, make_store=partial(CheckingStore, tensors))

    return of


# -- memory

MIXED: tuple[Spec, ...] = ((2, 64, False), (1, 90, False), (1, 37, False))
PADDED: tuple[Spec, ...] = ((2, 64, True), (1, 90, True))


@pytest.mark.parametrize("lora_dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("config", "specs", "groups", "levels", "logits"),
    [
        (LONG, ((1, 800, False),), ((0,),), (R, R, R, R, R), False),
        (LONG, ((1, 400, True),), ((0,),), (R, K, K, G, G), False),
        (LONG, ((1, 400, False),), ((0,),), (K, K, K, K, K), True),
        (LONG, ((1, 70, False),), ((0,),), (G, G, G, G, G), False),
        (WIDE, MIXED, ((0, 1, 2),), (R, R, R), False),
        (WIDE, MIXED, ((0, 1), (2,)), (K, K, G), True),
        (WIDE, MIXED, ((0,), (1,), (2,)), (R, K, G), False),
        (WIDE, PADDED, ((0, 1),), (G, G, G), False),
        (WIDE, PADDED, ((0,), (1,)), (R, R, R), True),
        (MANY_WORDS, ((1, 180, False), (2, 150, False)), ((0,), (1,)), (R, R), False),
        (MANY_WORDS, ((1, 180, False),), ((0,),), (R, G), True),
    ],
)
def test_a_step_takes_what_was_expected_and_not_much_less(
    runners, config: ToyConfig, lora_dropout: float, specs: Sequence[Spec], groups: Groups, levels, logits: bool
) -> None:
    runner = runners(config, lora_dropout)
    batches = batches_of(config, specs)
    runner.scheduler = forced = ForcedSchedule(runner.scheduler.costs, groups, levels)

    def step() -> None:
        runner.train_step(batches, TrainPass(0, 0), 0, {} if logits else None)

    step()  # reads, and makes what stays
    taken, expected = peak_allocated(step), forced.expected_bytes
    assert taken <= expected, f"{taken:,} bytes were allocated, {expected:,} expected"
    assert expected <= 1.15 * taken, f"{expected:,} bytes are set aside, {taken:,} are used"


@pytest.mark.parametrize("tokens", [20, 90])
@pytest.mark.parametrize("levels", [(R, R, R), (G, G, G)])
def test_gradients_of_large_lora_weights_are_expected_for_few_tokens_as_for_many(runners, levels, tokens: int) -> None:
    """They take most of what few tokens take, and little of what many do."""
    runner = runners(WIDE, 0.0, rank=150)
    runner.scheduler = forced = ForcedSchedule(runner.scheduler.costs, ((0, 1),), levels)
    batches = batches_of(WIDE, [(1, tokens, False), (2, tokens, False)])

    def step() -> None:
        runner.train_step(batches, TrainPass(0, 0), 0)

    step()
    taken, expected = peak_allocated(step), forced.expected_bytes
    assert taken <= expected <= 1.15 * taken, f"{taken:,} {expected:,}"


@pytest.mark.parametrize("first_layer", [2, 3])
def test_what_is_below_the_lowest_trained_layer_keeps_nothing(runners, first_layer: int) -> None:
    runner = runners(WIDE, 0.0, first_layer)
    runner.scheduler = forced = ForcedSchedule(runner.scheduler.costs, ((0, 1, 2),), (R, R, K))

    def step() -> None:
        runner.train_step(batches_of(WIDE, MIXED), TrainPass(first_layer, 0), 0)

    step()
    taken, expected = peak_allocated(step), forced.expected_bytes
    assert taken <= expected <= 1.15 * taken, f"{taken:,} {expected:,}"


@pytest.mark.parametrize(("config", "spec"), [(LONG, (1, 800, False)), (WIDE, (5, 60, True)), (WIDE, (5, 60, False))])
def test_a_forward_pass_takes_what_was_expected(runners, config: ToyConfig, spec: Spec) -> None:
    runner = runners(config, 0.0)
    (batch,) = batches_of(config, [spec])
    runner.loss(batch)
    taken = peak_allocated(lambda: runner.loss(batch))
    expected = runner.scheduler.costs.evaluation_bytes(batch.input_ids.numel(), batch.input_ids.shape[1])
    assert taken <= expected <= 1.6 * taken, f"{taken:,} {expected:,}"


def step_bytes(runner: ModelRunner, level: Level, one: MicroBatch, n: int = 1, several: bool = False) -> int:
    groups = (tuple(range(n)),) if several else tuple((i,) for i in range(n))
    n_layers = runner.adapter.n_layers
    return runner.scheduler.costs.activation_bytes(StepShape((one,) * n, 0), StepSchedule(groups, (level,) * n_layers))


@pytest.mark.parametrize("level", list(Level))
def test_only_a_mask_costs_a_square_of_the_length(runners, level: Level) -> None:
    """A fused kernel keeps no [T, T] matrix; a mask is one, and a graph keeps one more of numbers for each layer."""
    runner = runners(WIDE, 0.0)
    size = {tokens: step_bytes(runner, level, MicroBatch(1, tokens, 10)) for tokens in (1000, 2000, 4000)}
    assert size[4000] - size[2000] == pytest.approx(2 * (size[2000] - size[1000]), rel=1e-3)
    masked = step_bytes(runner, level, MicroBatch(1, 4000, 10, True))
    copies = WIDE.n_layers if level is G else 1
    assert masked - size[4000] == pytest.approx((1 + 4 * copies) * 4000**2, rel=0.1)


def test_a_step_is_measured_with_a_mask_where_attention_needs_one() -> None:
    valid = torch.ones(2, 6, dtype=torch.bool)
    assert not needs_mask(valid, 6)
    valid[1, 4:] = False
    assert not needs_mask(valid, 6), "what is on the right of all tokens is never seen"
    valid[1, 0] = False
    assert needs_mask(valid, 6)


def test_each_level_costs_more_than_the_one_below_and_grows_with_layers(tmp_path: Path) -> None:
    sizes = {}
    one = MicroBatch(2, 30, 58)
    for layers in (2, 4):
        config = ToyConfig(n_layers=layers)
        folder = tmp_path / str(layers)
        folder.mkdir()
        runner = open_toy(config, write_toy(folder, config), CpuDevice(), toy_updates(config, linear_names(config)))
        with runner.store:
            for level in Level:
                sizes[layers, level] = step_bytes(runner, level, one)
    boundary = one.size * config.hidden_size * 4
    # One block's products: q, k, v, o, up.
    products = one.size * (3 * config.hidden_size + config.feed_forward) * 4
    assert sizes[4, R] - sizes[2, R] == 2 * boundary
    projected = one.size * 5 * 2 * 4
    assert sizes[4, K] - sizes[2, K] == 2 * (boundary + products + projected)
    assert sizes[4, G] - sizes[2, G] > 2 * (boundary + products)


# -- accesses


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("first_layer", [0, 1, 3])
@pytest.mark.parametrize(
    ("groups", "levels"),
    [
        (((0, 1, 2),), (R, R, R)),
        (((0,), (1,), (2,)), (R, K, G)),
        (((0, 1), (2,)), (K, G, K)),
        (((0, 1, 2),), (G, G, R)),
    ],
)
def test_a_step_borrows_what_was_expected(runners, groups: Groups, levels, first_layer: int, logits: bool) -> None:
    runner = runners(WIDE, 0.3, first_layer)
    runner.scheduler = forced = ForcedSchedule(runner.scheduler.costs, groups, levels)
    batches = batches_of(WIDE, [(2, 5, True), (1, 1, False), (1, 7, False), (1, 3, True), (2, 4, False)])
    learning = sum(batch.n_targets > 0 for batch in batches)
    assert learning == 3
    runner.store.visits.clear()
    runner.train_step(batches, TrainPass(first_layer, 0), 0, {} if logits else None)
    trace = forced.trace(forced.shape, forced.schedule)
    assert [part.granule for part in runner.store.visits] == list(trace.accesses)
    assert len(trace.work) == len(trace.accesses)


def test_a_forward_pass_borrows_what_was_expected(runners) -> None:
    runner = runners(WIDE, 0.3)
    costs, config = runner.scheduler.costs, WIDE
    (batch,) = batches_of(config, [(2, 6, True)])
    cache_ = KVCache(config.n_layers, (2, *runner.adapter.cache_shape()), 8, 4)
    for compute, trace in (
        (lambda: runner.logits(batch), costs.evaluation(12, 6, (12,))),
        (lambda: runner.loss(batch), costs.evaluation(12, 6, (batch.n_targets,))),
        (lambda: runner.next_logits(batch, cache_), costs.evaluation(12, 6, (2,))),
    ):
        runner.store.visits.clear()
        compute()
        assert [part.granule for part in runner.store.visits] == list(trace.accesses)


# -- what is computed


@pytest.mark.parametrize("level", list(Level))
def test_the_flops_of_a_step_are_those_of_its_formula(runners, level: Level) -> None:
    """2 per weight and token forward, as much for the gradient of an input; LoRA's products likewise."""
    c, rank, n, rows = WIDE, 4, 120, 2
    runner = runners(c, 0.0)
    kv = c.n_kv_heads * c.head_dim
    shapes = {"q": (c.hidden_size, c.hidden_size), "k": (kv, c.hidden_size), "v": (kv, c.hidden_size)}
    shapes |= {"o": (c.hidden_size, c.hidden_size), "up": (c.feed_forward, c.hidden_size)}
    shapes |= {"down": (c.hidden_size, c.feed_forward)}
    product = {name: 2 * (inputs + rank) * outputs for name, (outputs, inputs) in shapes.items()}
    through_a = {name: 2 * rank * inputs for name, (_, inputs) in shapes.items()}
    through_b = {name: 2 * rank * outputs for name, (outputs, _) in shapes.items()}
    to_input = {name: 2 * (outputs + rank) * inputs for name, (outputs, inputs) in shapes.items()}
    forward = sum(product.values()) + sum(through_a.values())
    again = {R: forward - product["down"], K: through_a["down"], G: 0}[level]
    backward = sum(through_b.values()) + sum(to_input.values())
    # The lowest block gives no gradient to what is below it.
    blocks = c.n_layers * (forward + again + backward) - sum(to_input[name] for name in "qkv")
    attention = (7 if level is G else 2 + 7) * c.n_layers * c.hidden_size * (n // rows)
    targets = n - rows
    head_product, head_a = 2 * (c.hidden_size + rank) * c.vocab_size, 2 * rank * c.hidden_size
    head = head_product + head_a + 2 * rank * c.vocab_size + 2 * (c.vocab_size + rank) * c.hidden_size
    shape = StepShape((MicroBatch(rows, n // rows, targets),), 0)
    trace = runner.scheduler.costs.trace(shape, StepSchedule(((0,),), (level,) * c.n_layers))
    assert sum(work.flops for work in trace.work) == pytest.approx(n * (blocks + attention) + targets * head, rel=1e-9)
    assert {work.tokens for work in trace.work} == {n, targets}


# -- what is imported

TRAINS = """
import sys, torch
from pathlib import Path
from lema_core.device import CpuDevice
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.runner import TrainPass
from lema_core.runtime.schedule import Scheduler
from lema_core.testing.toy import ToyConfig, linear_names, open_toy, toy_updates, write_toy

config = ToyConfig(n_layers=2, dropout=0.1)
updates = toy_updates(config, linear_names(config), dropout=0.1)
runner = open_toy(config, write_toy(Path(sys.argv[1]), config), CpuDevice(), updates)
ids = torch.arange(10).view(2, 5)
with runner.store:
    for recompute in (True, False):
        runner.scheduler = Scheduler(runner.scheduler.costs, recompute=recompute)
        runner.train_step([TokenBatch.of(ids, None, ids)] * 2, TrainPass(0, 0), 0, {})
    runner.logits(TokenBatch.of(ids))
print(*sorted({name.split(".")[1] if name.startswith("torch.") else name.split(".")[0] for name in sys.modules}))
"""


def test_neither_the_dry_run_nor_a_step_loads_torchs_compiler(tmp_path: Path) -> None:
    """torch._dynamo is 60 MB and seconds, SymPy 37 MB."""
    done = subprocess.run([sys.executable, "-c", TRAINS, tmp_path], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "autograd" in loaded and not loaded & {"_dynamo", "_inductor", "sympy"}
