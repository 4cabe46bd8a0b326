"""Micro-batches that pass a layer together, and what layers leave for their gradient: no schedule changes a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema_core.checkpoint import TensorInfo
from lema_core.device import CpuDevice, Device
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.runtime import head_loss, runner
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.piece_run import Level
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_core.runtime.schedule import Groups
from lema_core.testing.forced import ForcedSchedule
from lema_core.testing.simulated import SimulatedAccelerator
from lema_core.testing.toy import ToyConfig, granules_of, linear_names, open_toy, toy_updates, write_toy

#: no size is a multiple of a vector register's
CONFIG = ToyConfig(vocab_size=43, hidden_size=20, feed_forward=53, n_layers=3, max_positions=70, dropout=0.2)
GRANULE_BYTES = 2500
R, K, G = Level.RECOMPUTE, Level.KEEP, Level.GRAPH


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TensorInfo]:
    return write_toy(tmp_path_factory.mktemp("toy"), CONFIG, 3, (torch.bfloat16, torch.float32))


@dataclass(frozen=True)
class Result:
    loss: float
    grads: dict[str, Tensor]
    logits: dict[int, Tensor]

    def differs_from(self, other: Result) -> list[str]:
        found = [] if self.loss == other.loss else [f"loss {self.loss} {other.loss}"]
        found += [name for name, grad in self.grads.items() if not torch.equal(grad, other.grads[name])]
        assert self.logits.keys() == other.logits.keys()
        return found + [f"logits {i}" for i, ours in self.logits.items() if not torch.equal(ours, other.logits[i])]


def batch(seed: int, rows: int, tokens: int, pad: str = "none", labels: str = "some") -> TokenBatch:
    """``pad``: none, left or right, more in later rows. ``labels``: all, some, or none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CONFIG.vocab_size, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    for row in range(rows):
        missing = 0 if pad == "none" else min(row + 1, tokens - 2)
        if missing > 0:
            mask[row, slice(0, missing) if pad == "left" else slice(tokens - missing, None)] = False
    wanted = ids.clone()
    if labels == "none":
        wanted.fill_(-100)
    elif labels == "some":
        wanted[:, 1::3] = -100
        wanted[-1, -1] = ids[-1, -1]
    return TokenBatch.of(ids, mask, wanted)


def mixed() -> list[TokenBatch]:
    return [
        batch(0, 2, 7, "right"),
        batch(1, 1, 2, labels="all"),
        batch(2, 2, 9, labels="none"),
        batch(3, 3, 5, "left"),
        batch(4, 1, 1, labels="all"),
        batch(5, 1, 33),
        batch(6, 2, 8, labels="all"),
    ]


#: of ``mixed()``, those with a target
LEARNING = 5


def modules_from(first_layer: int) -> list[str]:
    """The modules of blocks from ``first_layer`` on, and the head."""
    return [n for n in linear_names(CONFIG) if "layers" not in n or int(n.split(".")[2]) >= first_layer]


@pytest.fixture(scope="module")
def resident(tensors) -> Iterator[Callable[[int, float], ModelRunner]]:
    """Runners that hold everything, by the lowest trained layer and LoRA's dropout."""
    with ExitStack() as stack:

        @cache
        def of(first_layer: int = 0, lora_dropout: float = 0.3) -> ModelRunner:
            made = open_toy(
                CONFIG, tensors, CpuDevice(), updates_from(first_layer, lora_dropout), None, None, GRANULE_BYTES
            )
            stack.enter_context(made.store)
            return made

        yield of


def updates_from(first_layer: int, lora_dropout: float) -> dict[str, LowRankUpdate]:
    """LoRA on the blocks from ``first_layer`` on, and on the head."""
    names = [n for n in linear_names(CONFIG) if "layers" not in n or int(n.split(".")[2]) >= first_layer]
    return toy_updates(CONFIG, names, 3, lora_dropout)


@contextmanager
def streamed(tensors, like: ModelRunner, slots: int | None, device: Device | None = None) -> Iterator[ModelRunner]:
    """A runner with windows of so many slots, and otherwise as ``like``."""
    cut = granules_of(CONFIG, tensors, GRANULE_BYTES)
    near = None if slots is None else slots * cut.layout.slot_bytes
    ram = None if slots is None else cut.smallest_bytes - cut.layout.slot_bytes + near
    made = open_toy(CONFIG, tensors, device or CpuDevice(), like._ops.updates, ram, near, GRANULE_BYTES)
    # What a step borrows depends on no window, and finding it is most of the time that a step here takes.
    made.scheduler = like.scheduler
    with made.store:
        yield made


def step(
    on: ModelRunner,
    batches: Sequence[TokenBatch],
    groups: Groups,
    levels: Sequence[Level],
    first_layer: int = 0,
    with_logits: bool = True,
) -> Result:
    updates = on._ops.updates
    for update in updates.values():
        update.lora_A.grad = update.lora_B.grad = None
    on.scheduler = ForcedSchedule(on.scheduler.costs, groups, levels)
    logits: dict[int, Tensor] | None = {} if with_logits else None
    loss = on.train_step(batches, TrainPass(first_layer, 7), 5, logits)
    grads = gradients(updates)
    assert all(grad is not None and torch.isfinite(grad).all() for grad in grads.values())
    return Result(loss, grads, logits or {})


def gradients(updates: Mapping[str, LowRankUpdate]) -> dict[str, Tensor]:
    return {f"{name}.{k}": getattr(update, k).grad for name, update in updates.items() for k in ("lora_A", "lora_B")}


def apart(n: int) -> Groups:
    return tuple((i,) for i in range(n))


def together(n: int) -> Groups:
    return (tuple(range(n)),)


def test_a_step_is_its_micro_batches_one_after_another(tensors, resident, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone in a step of its own, with everything resident, adds to the same gradients."""
    batches = mixed()
    with streamed(tensors, resident(), 2) as on:
        packed = step(on, batches, together(LEARNING), [K, R, G])
    n_targets = sum(one.n_targets for one in batches)
    monkeypatch.setattr(runner, "total_targets", lambda given: n_targets)
    alone, nothing = resident(), batch(0, 1, 3, labels="none")
    alone.scheduler = ForcedSchedule(alone.scheduler.costs, apart(1), [R] * 3)
    for parameter in (p for update in alone._ops.updates.values() for p in update.parameters()):
        parameter.grad = None
    loss, logits = 0.0, {}
    for index, one in enumerate(batches):
        if one.n_targets:
            # The place of a micro-batch in its step keys its dropout.
            taken: dict[int, Tensor] = {}
            loss += alone.train_step([nothing] * index + [one], TrainPass(0, 7), 5, taken)
            logits |= taken
    assert packed.loss == pytest.approx(loss, rel=1e-14)
    assert not Result(packed.loss, gradients(alone._ops.updates), logits).differs_from(packed)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize(
    ("groups", "levels"),
    [
        (((0, 1, 2, 3, 4),), (R, R, R)),
        (((0, 1, 2, 3, 4),), (K, K, K)),
        (((0, 1, 2, 3, 4),), (G, G, G)),
        (((0,), (1,), (2,), (3,), (4,)), (R, K, G)),
        (((0, 1), (2,), (3, 4)), (G, R, K)),
        (((0, 1, 2), (3, 4)), (R, K, G)),
    ],
    ids=["one group", "products kept", "graphs kept", "apart", "three groups", "two groups"],
)
def test_groups_and_levels_change_no_bit(tensors, resident, groups: Groups, levels, slots: int) -> None:
    expected = step(resident(), mixed(), apart(LEARNING), [R] * 3)
    with streamed(tensors, resident(), slots) as on:
        assert not step(on, mixed(), groups, levels).differs_from(expected)
        without = step(on, mixed(), groups, levels, with_logits=False)
    assert not Result(without.loss, without.grads, expected.logits).differs_from(expected)


@dataclass(frozen=True)
class Case:
    """``cuts``: where a group ends."""

    batches: tuple[tuple[int, int, str, str], ...]
    cuts: tuple[bool, ...]
    levels: tuple[Level, ...]
    first_layer: int
    lora_dropout: float
    chunk_tokens: int
    slots: int | None
    accelerated: bool


one_batch = st.tuples(
    st.integers(1, 3),
    st.sampled_from([2, 3, 5, 8, 13, 16, 17, 31]),
    st.sampled_from(["none", "left", "right"]),
    st.sampled_from(["all", "some"]),
)
cases = st.builds(
    Case,
    batches=st.lists(one_batch, min_size=2, max_size=6).map(tuple),
    cuts=st.lists(st.booleans(), min_size=6, max_size=6).map(tuple),
    levels=st.lists(st.sampled_from(list(Level)), min_size=3, max_size=3).map(tuple),
    first_layer=st.integers(0, 3),
    lora_dropout=st.sampled_from([0.0, 0.4]),
    chunk_tokens=st.sampled_from([16, 21, 1000]),
    slots=st.sampled_from([1, 3, None]),
    accelerated=st.booleans(),
)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(case=cases)
def test_no_schedule_of_any_step_changes_a_bit(tensors, resident, case: Case) -> None:
    batches = [batch(i, *one) for i, one in enumerate(case.batches)]
    n = sum(one.n_targets > 0 for one in batches)
    assume(n > 0)
    groups: list[tuple[int, ...]] = [(0,)]
    for i in range(1, n):
        groups = [*groups, (i,)] if case.cuts[i] else [*groups[:-1], (*groups[-1], i)]
    alone = resident(case.first_layer, case.lora_dropout)
    device = SimulatedAccelerator() if case.accelerated else CpuDevice()
    with pytest.MonkeyPatch.context() as patch, streamed(tensors, alone, case.slots, device) as on:
        patch.setattr(head_loss, "_CHUNK_BYTES", case.chunk_tokens * 4 * CONFIG.vocab_size)
        expected = step(alone, batches, apart(n), [R] * 3, case.first_layer)
        found = step(on, batches, tuple(groups), case.levels, case.first_layer)
    assert not found.differs_from(expected)
