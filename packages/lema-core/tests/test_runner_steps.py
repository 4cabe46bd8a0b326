"""Whole steps of the toy model: against plain torch, and against each other where they must agree bit for bit."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lema_core.checkpoint import TensorInfo, read_tensor
from lema_core.device import CpuDevice
from lema_core.errors import BudgetError, DataError
from lema_core.kv import KVCache
from lema_core.ops.low_rank import LowRankUpdate
from lema_core.runtime import head_loss
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.generation import generate_greedy
from lema_core.runtime.runner import ModelRunner, TrainPass
from lema_core.runtime.schedule import Scheduler
from lema_core.store.store import TensorStore
from lema_core.store.trace import Trace
from lema_core.testing.checking import CheckingStore
from lema_core.testing.simulated import SimulatedAccelerator
from lema_core.testing.toy import PlainToy, ToyConfig, granules_of, linear_names, open_toy, toy_updates, write_toy

CONFIG = ToyConfig(n_layers=3)
TIED = ToyConfig(n_layers=2, tied=True, biased=False)
GRANULE_BYTES = 1500


@pytest.fixture(scope="module", params=[CONFIG, TIED], ids=["untied", "tied"])
def toy(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[ToyConfig, dict[str, TensorInfo]]:
    config = request.param
    return config, write_toy(tmp_path_factory.mktemp("toy"), config, 3, (torch.bfloat16, torch.float32), 2, 5)


def opened(toy, updates=None, device=None, budget_slots: int | None = None, **more) -> ModelRunner:
    config, tensors = toy
    cut = granules_of(config, tensors, GRANULE_BYTES)
    on_device = None if budget_slots is None else budget_slots * cut.layout.slot_bytes
    in_ram = None if budget_slots is None else cut.smallest_bytes - cut.layout.slot_bytes + on_device
    return open_toy(config, tensors, device or CpuDevice(), updates, in_ram, on_device, GRANULE_BYTES, **more)


def plain(toy, updates=None) -> PlainToy:
    config, tensors = toy
    return PlainToy(config, {name: read_tensor(info) for name, info in tensors.items()}, updates)


def batch(seed: int = 0, rows: int = 2, tokens: int = 7, pad: bool = True) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 37, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if pad:
        mask[-1, -2:] = False
    labels = ids.clone()
    labels[0, 1:3] = -100
    return TokenBatch.of(ids, mask, labels)


def grads(updates: dict[str, LowRankUpdate]) -> dict[str, Tensor]:
    return {f"{n}.{k}": getattr(u, k).grad for n, u in updates.items() for k in ("lora_A", "lora_B")}


def train(runner: ModelRunner, updates, batches, first_layer=0, recompute=True, step=0):
    for update in updates.values():
        update.lora_A.grad = update.lora_B.grad = None
    runner.scheduler = Scheduler(runner.scheduler.costs, recompute=recompute)
    loss = runner.train_step(batches, TrainPass(first_layer, 7), step)
    return loss, {name: None if g is None else g.clone() for name, g in grads(updates).items()}


@pytest.mark.parametrize("pad", [False, True])
def test_logits_and_losses_are_plain_torchs(toy, pad: bool) -> None:
    given = batch(pad=pad)
    runner = opened(toy, budget_slots=2)
    with runner.store:
        logits = runner.logits(given)
        want = plain(toy).logits(given.input_ids, given.attention_mask)
        real = given.attention_mask
        torch.testing.assert_close(logits[real], want[real], rtol=1e-5, atol=1e-5)
        loss, n = runner.loss(given)
    assert n == int(((given.labels[:, 1:] != -100) & given.attention_mask[:, 1:]).sum())
    want_sum = plain(toy).loss_sum(given.input_ids, given.labels, given.attention_mask)
    assert loss == pytest.approx(want_sum.item(), rel=1e-5)


def test_gradients_of_every_update_are_autograds(toy) -> None:
    """B02: no layer is left out, recompute or not."""
    config, _ = toy
    batches = [batch(1), batch(2, 1, 5, False)]
    oracle_updates = toy_updates(config, linear_names(config))
    oracle = plain(toy, oracle_updates)
    total = sum(oracle.loss_sum(b.input_ids, b.labels, b.attention_mask) for b in batches)
    n = sum(b.n_targets for b in batches)
    (total / n).backward()
    want = grads(oracle_updates)
    updates = toy_updates(config, linear_names(config))
    runner = opened(toy, updates, budget_slots=3)
    with runner.store:
        for recompute in (True, False):
            loss, found = train(runner, updates, batches, recompute=recompute)
            assert loss == pytest.approx(total.item() / n, rel=1e-5)
            for name, grad in found.items():
                assert grad.norm() > 0, name
                difference = (grad - want[name]).norm() / want[name].norm()
                assert difference < 1e-5, f"{name}: {difference}"


@pytest.mark.parametrize("first_layer", [0, 1, 2, 3])
def test_recompute_changes_no_bit(tmp_path: Path, first_layer: int) -> None:
    """B42: dropout masks are redrawn as they were, in every block and in every LoRA branch."""
    config = ToyConfig(n_layers=3, dropout=0.5)
    toy = config, write_toy(tmp_path, config)
    names = [n for n in linear_names(config) if "layers" not in n or int(n.split(".")[2]) >= first_layer]
    found = []
    for recompute in (True, False):
        updates = toy_updates(config, names, dropout=0.5)
        runner = opened(toy, updates, budget_slots=2)
        with runner.store:
            found.append(
                [train(runner, updates, [batch(1), batch(2)], first_layer, recompute, step) for step in (0, 0, 1)]
            )
    first, again, other = found[0]
    assert first[0] == again[0] and first[0] != other[0], "equal keys give equal masks, other steps other ones"
    for (loss_a, grads_a), (loss_b, grads_b) in zip(*found, strict=True):
        assert loss_a == loss_b
        assert all(torch.equal(grads_a[name], grads_b[name]) for name in grads_a)


def test_nothing_below_the_lowest_trained_layer_is_run_backward_or_again(toy) -> None:
    config, tensors = toy
    top = config.n_layers - 1
    for recompute in (True, False):
        updates = toy_updates(config, [f"model.layers.{top}.v", "head"])
        runner = opened(toy, updates, budget_slots=2, make_store=partial(CheckingStore, tensors))
        with runner.store as store:
            train(runner, updates, [batch()], top, recompute)
            visits = [part.tensor for part in store.visits]
        for layer in range(top):
            for module in ("q", "k", "v", "o", "up", "down"):
                name = f"model.layers.{layer}.{module}.weight"
                assert visits.count(name) == len(store.parts(name)), f"{name}: forward once, and nothing else"
        # In the lowest layer the gradient goes back to what is trained, not through it.
        for module, times in (("up", 2), ("down", 2), ("o", 2), ("q", 1), ("k", 1), ("v", 1)):
            name = f"model.layers.{top}.{module}.weight"
            assert visits.count(name) == times * len(store.parts(name)), name


def test_with_only_the_head_trained_no_block_is_run_backward(toy) -> None:
    config, tensors = toy
    updates = toy_updates(config, ["head"])
    runner = opened(toy, updates, make_store=partial(CheckingStore, tensors))
    with runner.store as store:
        _, found = train(runner, updates, [batch()], config.n_layers)
        visits = [part.tensor for part in store.visits if "layers" in part.tensor and part.shape != ()]
        assert len(visits) == sum(len(parts) for name, parts in store.model.layout.parts.items() if "layers" in name)
        head = [part for part in store.visits if part.tensor == "head.weight"]
        assert len(head) == len(store.parts("head.weight")), "nor is the head run backward for nobody"
    oracle_updates = toy_updates(config, ["head"])
    given = batch()
    total = plain(toy, oracle_updates).loss_sum(given.input_ids, given.labels, given.attention_mask)
    (total / given.n_targets).backward()
    for name, grad in grads(oracle_updates).items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)


def test_micro_batches_are_weighed_by_their_tokens_and_empty_ones_are_left_out(toy) -> None:
    """B23, B24."""
    config, _ = toy
    long, short = batch(1, 1, 8, False), batch(2, 1, 3, False)
    empty = TokenBatch.of(long.input_ids, None, torch.full_like(long.input_ids, -100))
    updates = toy_updates(config, linear_names(config))
    runner = opened(toy, updates, budget_slots=2)
    with runner.store:
        loss, with_empty = train(runner, updates, [long, empty, short])
        again, without = train(runner, updates, [long, short])
        sums = [runner.loss(b) for b in (long, short)]
        assert runner.loss(empty) == (0.0, 0)
        plain_updates = toy_updates(config, linear_names(config))
        oracle = plain(toy, plain_updates)
        want = sum(oracle.loss_sum(b.input_ids, b.labels) for b in (long, short)) / (long.n_targets + short.n_targets)
        assert loss == pytest.approx(want.item(), rel=1e-5)
        assert loss == pytest.approx(sum(s for s, _ in sums) / sum(n for _, n in sums), rel=1e-6)
        assert again == loss and all(torch.equal(with_empty[name], without[name]) for name in without)
        before = {name: grad.clone() for name, grad in grads(updates).items()}
        with pytest.raises(DataError, match="every label of this step is masked"):
            runner.train_step([empty], TrainPass(0, 0), 0)
        assert all(torch.equal(before[name], grad) for name, grad in grads(updates).items())


def test_gradients_add_up_over_steps_that_nobody_cleared(toy) -> None:
    config, _ = toy
    updates = toy_updates(config, linear_names(config))
    runner = opened(toy, updates, budget_slots=4)
    with runner.store:
        _, once = train(runner, updates, [batch()])
        runner.train_step([batch()], TrainPass(0, 7), 0)
        assert all(torch.equal(once[name] * 2, grad) for name, grad in grads(updates).items())


def test_gradients_come_to_lie_where_they_lay_in_the_step_before(toy) -> None:
    updates = toy_updates(toy[0], linear_names(toy[0]))
    runner = opened(toy, updates)

    def step() -> tuple[dict[str, Tensor], dict[str, int]]:
        _, found = train(runner, updates, [batch()])
        return found, {name: grad.data_ptr() for name, grad in grads(updates).items()}

    with runner.store:
        first, places = step()
        again, same_places = step()
    assert places == same_places
    assert all(torch.equal(again[name], first[name]) for name in first), "zeros again before the second"


@pytest.mark.parametrize(("most_bytes", "times"), [(None, 3), (1 << 60, 0), (1, 3)])
def test_gaps_are_given_back_where_a_step_would_hold_more_than_is_planned(
    tmp_path: Path, most_bytes: int | None, times: int
) -> None:
    """Twice inside a step, and after it."""
    device, trimmed = CpuDevice(), []
    device.trim = lambda: trimmed.append(1)
    updates = toy_updates(CONFIG, linear_names(CONFIG))
    runner = open_toy(CONFIG, write_toy(tmp_path, CONFIG), device, updates)
    runner._most_bytes = most_bytes
    with runner.store:
        train(runner, updates, [batch()])
    assert len(trimmed) == times


def test_head_chunks_change_no_gradient_beyond_rounding(toy, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = toy
    found = []
    for size in (64_000_000, 16 * 4 * 37):
        monkeypatch.setattr(head_loss, "_CHUNK_BYTES", size)
        updates = toy_updates(config, linear_names(config))
        runner = opened(toy, updates, budget_slots=2)
        with runner.store:
            given = batch(5, 4, 9, False)
            found.append((train(runner, updates, [given]), runner.logits(given), runner.loss(given)))
    assert len(head_loss.cut_tokens(batch(5, 4, 9, False).n_targets, 37)) == 2
    ((loss_a, grads_a), logits_a, sum_a), ((loss_b, grads_b), logits_b, sum_b) = found
    assert loss_a == pytest.approx(loss_b, rel=1e-6) and sum_a == pytest.approx(sum_b, rel=1e-6)
    torch.testing.assert_close(logits_a, logits_b, rtol=1e-6, atol=1e-6)
    for name in grads_a:
        torch.testing.assert_close(grads_a[name], grads_b[name], rtol=1e-5, atol=1e-6)


# -- what compute is handed


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_layer_is_handed_its_own_bytes_on_every_visit(tmp_path: Path, device: str, tied: bool) -> None:
    """B03: a slot for one granule, layers of different constants, twice forward and once in reverse."""
    config = ToyConfig(n_layers=4, tied=tied)
    fill = {f"model.layers.{i}.{m}.weight": i + 1 + j / 8 for i in range(4) for j, m in enumerate(("q", "o", "up"))}
    tensors = write_toy(tmp_path, config, fill=fill)
    made = CpuDevice() if device == "cpu" else SimulatedAccelerator(compute_lag_s=1e-4)
    runner = opened((config, tensors), None, made, 1)
    digests: dict[str, set[str]] = {}
    with runner.store as store:
        names = list(store.model.layout.parts)
        for order in (names, names, names[::-1]):
            visit(store, order, digests)
        assert store.slots_filled()[0] == 1
        forward = runner.logits(batch(pad=False))
    for name in names:
        whole = read_tensor(tensors[name]).contiguous().view(torch.uint8).numpy().tobytes()
        assert digests[name] == {hashlib.sha256(whole).hexdigest()}, name
    want = plain((config, tensors)).logits(batch(pad=False).input_ids)
    torch.testing.assert_close(forward, want, rtol=1e-5, atol=1e-5)


def visit(store: TensorStore, names: list[str], digests: dict[str, set[str]]) -> None:
    parts = [part for name in names for part in store.parts(name)]
    store.begin_step(Trace(tuple(names), tuple(part.granule for part in parts)))
    for name in names:
        found = hashlib.sha256()
        for part in store.parts(name):
            with store.borrow(part) as held:
                found.update(held.contiguous().view(torch.uint8).numpy().tobytes())
        digests.setdefault(name, set()).add(found.hexdigest())
    store.end_step()


# -- generation


@pytest.mark.parametrize("slots", [1, 3, None])
def test_cached_generation_is_the_forward_pass(toy, slots: int | None) -> None:
    runner = opened(toy, None, SimulatedAccelerator(), slots)
    prompts = [[5, 4, 3], [1, 2, 3, 4, 5, 6, 7], [9]]
    with runner.store:
        together = generate_greedy(runner, prompts, 8, chunk_size=3)
        oracle = plain(toy)
        for prompt, new in zip(prompts, together, strict=True):
            assert generate_greedy(runner, [prompt], 8, chunk_size=100) == [new]
            ids = list(prompt)
            for token in new:
                assert token == int(oracle.logits(torch.tensor([ids]))[0, -1].argmax())
                ids.append(token)
        assert generate_greedy(runner, prompts, 0) == [[], [], []]
        stopped = generate_greedy(runner, prompts[:1], 8, stop_ids={together[0][1]})
        assert stopped[0] == together[0][: together[0].index(together[0][1]) + 1]
        with pytest.raises(DataError, match="no tokens"):
            generate_greedy(runner, [[1], []], 3)
        with pytest.raises(BudgetError, match="100 are given; raise kv_vram"):
            generate_greedy(runner, prompts, 8, budget_bytes=100)


def test_new_tokens_on_a_warm_cache_see_all_that_came_before(toy) -> None:
    """B19: queries that do not start at 0."""
    runner = opened(toy, None, None, 2)
    ids = torch.randint(0, 37, (2, 20), generator=torch.Generator().manual_seed(4))
    heads, size = runner.adapter.cache_shape()
    with runner.store:
        want = plain(toy).logits(ids)
        for cuts in ([20], [15, 5], [1, 1, 18], [16, 1, 1, 2]):
            cache = KVCache(runner.adapter.n_layers, (2, heads, size), 20, 4)
            done = 0
            for n in cuts:
                new = TokenBatch(ids[:, done : done + n], torch.ones(2, done + n, dtype=torch.bool))
                done += n
                logits = runner.next_logits(new, cache)
                torch.testing.assert_close(logits, want[:, done - 1], rtol=1e-4, atol=1e-5)
            assert cache.length == 20


def test_more_tokens_than_positions_are_refused_before_anything_is_computed(toy) -> None:
    """Learned positions end somewhere; the last token that is generated needs none."""
    runner = opened(toy)
    limit = runner.adapter.max_positions
    for tokens in (limit, limit + 1):
        batch = TokenBatch.of(torch.ones(1, tokens, dtype=torch.int64), labels=torch.ones(1, tokens, dtype=torch.int64))
        for compute in (runner.logits, runner.loss):
            if tokens == limit:
                compute(batch)
            else:
                with pytest.raises(DataError, match=f"{tokens} tokens is wanted, the model has {limit} positions"):
                    compute(batch)
    assert len(generate_greedy(runner, [[1] * (limit - 2)], 3)[0]) == 3
    with pytest.raises(DataError, match="lower max_new_tokens"):
        generate_greedy(runner, [[1] * (limit - 2)], 4)
    runner.close()
