"""What a step with trained weights is expected to borrow, compute and hold, against what it does; and its rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from lema_core.device import CpuDevice
from lema_core.errors import PlanError
from lema_core.ops.kernels import Kernels
from lema_core.planning.hardware import Hardware
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.dry_run import DryRun
from lema_core.runtime.piece_run import Level
from lema_core.runtime.rehearsal import Rehearsal
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_core.runtime.schedule import Groups, MicroBatch, Scheduler, StepCosts, StepSchedule, StepShape
from lema_core.store.model import cut_model
from lema_core.testing.allocations import peak_allocated
from lema_core.testing.checking import CheckingStore
from lema_core.testing.forced import ForcedSchedule
from lema_core.testing.gradients import GradientsInMemory
from lema_core.testing.toy import ToyAdapter, ToyConfig, open_toy, toy_updates, write_toy

R, K, G = Level.RECOMPUTE, Level.KEEP, Level.GRAPH
#: rows, tokens, padded on the left
Spec = tuple[int, int, bool]
WIDE = ToyConfig(hidden_size=72, feed_forward=403, n_layers=3, max_positions=100, dropout=0.1)
TIED = ToyConfig(hidden_size=64, feed_forward=100, n_layers=2, vocab_size=20_000, max_positions=200, tied=True)


def batches_of(config: ToyConfig, specs: Sequence[Spec]) -> list[TokenBatch]:
    batches = []
    for seed, (rows, tokens, padded) in enumerate(specs):
        ids = torch.randint(0, config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        mask[0, slice(0, 3) if padded else slice(-3, None)] = 0
        batches.append(TokenBatch.of(ids, mask, ids))
    return batches


#: what trains: everything, some kinds of the last two blocks, what is outside blocks, one bias
TRAINED: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "some": lambda name: any(f".{layer}.{kind}." in name for layer in (1, 2) for kind in ("q", "down", "norm_2")),
    "outside": lambda name: "layers" not in name,
    "a bias": lambda name: name.endswith("1.q.bias"),
}
#: the lowest block with something of it, and whether what is below trains
PASSES = {"all": (0, True), "some": (1, False), "outside": (0, True), "a bias": (1, False)}


def trained_names(config: ToyConfig, what: str) -> list[str]:
    return [spec.name for spec in ToyAdapter(config).tensors() if TRAINED[what](spec.name)]


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ToyConfig, str], ModelRunner]:
    @cache
    def of(config: ToyConfig, what: str, lora: bool = False) -> ModelRunner:
        tensors = write_toy(tmp_path_factory.mktemp("toy"), config)
        gradients = GradientsInMemory(ToyAdapter(config), trained_names(config, what))
        updates = toy_updates(config, ["model.layers.2.v", "head"]) if lora else {}
        make_store = partial(CheckingStore, tensors)
        return open_toy(config, tensors, CpuDevice(), updates, make_store=make_store, gradients=gradients)

    return of


MIXED: tuple[Spec, ...] = ((2, 64, False), (1, 90, False), (1, 37, False))
PADDED: tuple[Spec, ...] = ((2, 64, True), (1, 90, True))


@pytest.mark.parametrize("what", list(TRAINED))
@pytest.mark.parametrize(
    ("config", "specs", "groups", "levels", "logits"),
    [
        (WIDE, MIXED, ((0, 1, 2),), (R, R, R), False),
        (WIDE, MIXED, ((0, 1), (2,)), (K, K, G), True),
        (WIDE, PADDED, ((0,), (1,)), (G, G, G), False),
        (TIED, ((1, 180, False), (2, 150, False)), ((0, 1),), (R, G), False),
    ],
    ids=["recomputed", "mixed", "graphs", "tied"],
)
def test_a_step_takes_what_was_expected(
    runners, config: ToyConfig, what: str, specs: Sequence[Spec], groups: Groups, levels, logits: bool
) -> None:
    runner = runners(config, what)
    batches = batches_of(config, specs)
    runner.scheduler = forced = ForcedSchedule(runner.scheduler.costs, groups, levels)
    first_layer, embeds = PASSES[what]

    def step() -> None:
        runner._gradients.completed.clear()
        runner.train_step(batches, TrainPass(first_layer, 0, embeds), 0, {} if logits else None)

    step()  # reads, and makes what stays
    taken, expected = peak_allocated(step), forced.expected_bytes
    assert taken <= expected, f"{taken:,} bytes were allocated, {expected:,} expected"
    assert expected <= 1.15 * taken, f"{expected:,} bytes are set aside, {taken:,} are used"


@pytest.mark.parametrize("what", list(TRAINED))
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("groups", "levels"), [(((0, 1, 2),), (R, K, G)), (((0,), (1,), (2,)), (R, R, R)), (((0, 1), (2,)), (K, G, K))]
)
def test_a_step_borrows_what_was_expected(runners, what: str, lora: bool, groups: Groups, levels) -> None:
    runner = runners(WIDE, what, lora)
    runner.scheduler = forced = ForcedSchedule(runner.scheduler.costs, groups, levels)
    batches = batches_of(WIDE, [(2, 5, True), (1, 1, False), (1, 7, False), (2, 4, False)])
    runner.store.visits.clear()
    runner._gradients.completed.clear()
    first_layer, embeds = PASSES[what]
    runner.train_step(batches, TrainPass(first_layer, 0, embeds), 0)
    trace = forced.trace(forced.shape, forced.schedule)
    assert [part.granule for part in runner.store.visits] == list(trace.accesses)
    assert len(trace.work) == len(trace.accesses)


def test_what_borrows_nothing_is_counted_too(tmp_path: Path) -> None:
    """The gradient of the lowest block, where its graph was kept and only its last weight trains."""
    adapter = ToyAdapter(WIDE)
    model = cut_model(adapter, write_toy(tmp_path, WIDE))
    dry = DryRun(adapter, model, {}, torch.float32, Kernels(), frozenset({"model.layers.2.down.weight"}))
    assert not dry.backward(2, G, False).accesses
    costs, shape = StepCosts(dry), StepShape((MicroBatch(1, 50, 49),), 2)
    flops = sum(work.flops for work in costs.trace(shape, StepSchedule(((0,),), (R, R, G))).work)
    frozen = StepCosts(DryRun(adapter, model, {}, torch.float32, Kernels()))
    without = sum(work.flops for work in frozen.trace(shape, StepSchedule(((0,),), (R, R, G))).work)
    assert flops - without == pytest.approx(2 * 50 * WIDE.hidden_size * WIDE.feed_forward, rel=1e-9)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("what", ["all", "some"])
def test_the_flops_of_a_step_are_those_of_its_formula(runners, level: Level, what: str) -> None:
    """2 per weight and token forward, as much for the gradient of an input, and as much for that of a weight."""
    c, n, rows = WIDE, 120, 2
    kv = c.n_kv_heads * c.head_dim
    sizes = {"q": c.hidden_size**2, "k": kv * c.hidden_size, "v": kv * c.hidden_size, "o": c.hidden_size**2}
    sizes |= {"up": c.feed_forward * c.hidden_size, "down": c.feed_forward * c.hidden_size}
    first_layer, embeds = PASSES[what]
    names = trained_names(c, what)
    block = 2 * sum(sizes.values())
    again = {R: block - 2 * sizes["down"], K: 0, G: 0}[level]
    layers = range(first_layer, c.n_layers)
    to_weights = 2 * sum(sizes[s] for s in sizes for layer in layers if f"model.layers.{layer}.{s}.weight" in names)
    blocks = c.n_layers * block + len(layers) * (again + block) + to_weights
    blocks -= 0 if embeds else 2 * sum(sizes[name] for name in "qkv")
    trained_pairs = (7 if level is G else 2 + 7) * len(layers) + 2 * (c.n_layers - len(layers))
    attention = trained_pairs * c.hidden_size * (n // rows)
    targets = n - rows
    head = 2 * c.hidden_size * c.vocab_size * (2 + ("head.weight" in names))
    shape = StepShape((MicroBatch(rows, n // rows, targets),), first_layer, embeds=embeds)
    costs = runners(c, what).scheduler.costs
    levels = (R,) * first_layer + (level,) * len(layers)
    trace = costs.trace(shape, StepSchedule(((0,),), levels))
    assert sum(work.flops for work in trace.work) == pytest.approx(n * (blocks + attention) + targets * head, rel=1e-9)


def test_embeddings_train_where_gradients_pass_all_layers() -> None:
    with pytest.raises(PlanError, match="stop at 1"):
        StepShape((MicroBatch(1, 2, 1),), 1, embeds=True)


def test_nothing_of_a_weights_size_is_made_to_find_out(tmp_path: Path) -> None:
    config = ToyConfig(n_layers=1, hidden_size=400, feed_forward=4000)
    model = cut_model(ToyAdapter(config), write_toy(tmp_path, config))
    names = frozenset(trained_names(config, "all"))
    dry = DryRun(ToyAdapter(config), model, {}, torch.float32, Kernels(), names)
    assert peak_allocated(lambda: dry.backward(0, R, True)) < 4 * config.hidden_size * config.feed_forward


def test_a_rehearsal_adds_to_gradients_that_are_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: set[tuple[int, ...]] = set()

    def addmm_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        added.add(tuple(total.shape))
        assert bool(total.isfinite().all()) and total.is_contiguous()
        return total.add_(left @ right)

    monkeypatch.setattr(torch.Tensor, "addmm_", addmm_)
    adapter = ToyAdapter(WIDE)
    model = cut_model(adapter, write_toy(tmp_path, WIDE))
    names = frozenset(trained_names(WIDE, "all"))
    costs = StepCosts(DryRun(adapter, model, {}, torch.float32, Kernels(), names))
    rehearsal = Rehearsal(adapter, model, {}, torch.float32, Kernels(), CpuDevice(), names)
    rates = Hardware("by hand", 10**9, None, 1e9, None, 1e9, ((1, 1e9),), "float32", 1e-6, "by hand")
    shape = StepShape((MicroBatch(2, 6, 10), MicroBatch(1, 9, 8, masks=1)), 0, embeds=True)
    assert rehearsal.pace(costs, shape, Scheduler(costs).choose(shape), rates, 0) > 0
    weights = {part.shape for parts in model.layout.parts.values() for part in parts if len(part.shape) == 2}
    assert weights <= added
