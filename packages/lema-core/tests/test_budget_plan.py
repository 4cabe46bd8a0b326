"""Windows from budgets: what is given, and what is refused with both numbers before anything is read."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lema_core.device import CpuDevice
from lema_core.errors import BudgetError
from lema_core.runtime.batch import TokenBatch
from lema_core.store.budget import BudgetRequest, StepChoice, plan_budget
from lema_core.testing.checking import CheckingStore
from lema_core.testing.simulated import SimulatedAccelerator
from lema_core.testing.toy import ToyConfig, granules_of, open_toy, write_toy

GB = 10**9
MARGIN = 64_000_000
CPU = BudgetRequest(
    total=2 * GB, smallest=40_000_000, ram_limit=8 * GB, ram_source="the cgroup's limit", ram_held=GB // 2, ram_step=GB
)
GPU = replace(CPU, ram_step=0, device_free=4 * GB, device_step=GB)


# -- plan_budget


def test_auto_gives_all_where_it_fits() -> None:
    plan = plan_budget(CPU)
    assert plan.ram == CPU.total and plan.device is None
    (why,) = plan.because
    assert "weights_ram: 2.00 GB (all of the weights)" in why or "all of the weights" in why
    assert "the cgroup's limit" in why


def test_auto_gives_what_is_left_beside_the_step_and_a_margin() -> None:
    tight = replace(CPU, ram_limit=int(2.5 * GB))
    left = tight.ram_limit - tight.ram_limit // 20 - tight.ram_held - tight.ram_step
    assert plan_budget(tight).ram == left < tight.total


def test_the_smallest_run_is_planned_and_one_byte_less_is_refused() -> None:
    exact = replace(CPU, ram_limit=CPU.smallest + MARGIN + 5_000_001, ram_held=5_000_000, ram_step=1)
    assert plan_budget(exact).ram == exact.smallest
    with pytest.raises(BudgetError) as refused:
        plan_budget(replace(exact, ram_limit=exact.ram_limit - 1))
    message = str(refused.value)
    assert "40,000,000 bytes of weights are needed beside 1 for the step" in message
    assert "39,999,999 are left of the cgroup's limit" in message and "max_seq_length" in message


def test_a_fixed_amount_is_given_as_it_is_and_never_more_than_all() -> None:
    assert plan_budget(replace(CPU, weights_ram=300_000_000)).ram == 300_000_000
    assert plan_budget(replace(CPU, weights_ram=CPU.smallest)).ram == CPU.smallest
    assert plan_budget(replace(CPU, weights_ram=50 * GB)).ram == CPU.total
    with pytest.raises(BudgetError, match=r"weights_ram gives 39,999,999 bytes, the smallest window needs 40,000,000"):
        plan_budget(replace(CPU, weights_ram=CPU.smallest - 1))
    with pytest.raises(BudgetError, match=r"weights_ram: 2,000,000,000 bytes .* are left of .*; lower weights_ram"):
        plan_budget(replace(CPU, ram_limit=3 * GB, weights_ram=2 * GB))


def test_where_the_device_shares_ram_both_names_mean_one_window() -> None:
    assert plan_budget(replace(CPU, weights_vram=100_000_000)).ram == 100_000_000
    assert plan_budget(replace(CPU, weights_vram=100_000_000, weights_ram=GB)).ram == 100_000_000
    assert plan_budget(replace(CPU, weights_vram=GB, weights_ram=100_000_000)).ram == 100_000_000
    with pytest.raises(BudgetError, match=r"^weights_vram gives 1 bytes"):
        plan_budget(replace(CPU, weights_vram=1, weights_ram=GB))
    with pytest.raises(BudgetError, match=r"^weights_ram gives 1 bytes"):
        plan_budget(replace(CPU, weights_vram=GB, weights_ram=1))


def test_resident_takes_all_or_says_what_it_needs() -> None:
    assert plan_budget(replace(CPU, resident=True, weights_ram=50_000_000)).ram == CPU.total
    with pytest.raises(BudgetError, match=r"2,000,000,000 bytes .* use strategy=streaming"):
        plan_budget(replace(CPU, resident=True, ram_limit=3 * GB))


def test_an_accelerator_has_a_window_of_its_own() -> None:
    plan = plan_budget(replace(GPU, total=10 * GB, weights_vram=GB, weights_ram=3 * GB))
    assert (plan.device, plan.ram) == (GB, 3 * GB) and len(plan.because) == 2
    plan = plan_budget(replace(GPU, total=10 * GB))
    assert plan.device == 4 * GB - 4 * GB // 20 - GB
    assert plan.ram == 8 * GB - 8 * GB // 20 - GPU.ram_held
    with pytest.raises(BudgetError, match=r"weights_vram: 40,000,000 bytes .* beside 4,000,000,000 .* device memory"):
        plan_budget(replace(GPU, device_step=4 * GB))
    with pytest.raises(BudgetError, match=r"weights_ram: .* beside 0 for the step, 0 are left"):
        plan_budget(replace(GPU, ram_held=8 * GB))


@pytest.mark.parametrize("resident", [False, True])
def test_ram_only_passes_weights_on_to_a_device_that_holds_all(resident: bool) -> None:
    plan = plan_budget(replace(GPU, resident=resident))
    assert plan.device == GPU.total and plan.ram == GPU.total // 4
    small = plan_budget(replace(GPU, resident=resident, ram_limit=GPU.ram_held + MARGIN + 50_000_000))
    assert small.ram == 50_000_000
    assert plan_budget(replace(GPU, resident=resident, weights_ram=GB)).ram == GB
    with pytest.raises(BudgetError, match=r"weights_vram.*use strategy=streaming"):
        plan_budget(replace(GPU, resident=True, device_free=2 * GB))


def test_behind_a_device_that_holds_all_ram_holds_what_changes() -> None:
    plan = plan_budget(replace(GPU, returning=GB))
    assert plan.device == GPU.total and plan.ram == GB + GPU.smallest
    assert plan.ram_left == 8 * GB - 8 * GB // 20 - GPU.ram_held - plan.ram
    assert plan_budget(replace(GPU, returning=2 * GB)).ram == GPU.total


def test_rows_take_nothing_of_a_device() -> None:
    there = replace(GPU, device_total=GB, device_smallest=30_000_000)
    assert plan_budget(there).device == GB
    assert plan_budget(replace(there, weights_vram=30_000_000)).device == 30_000_000
    with pytest.raises(BudgetError, match="weights_vram gives 29,999,999 bytes, the smallest window needs 30,000,000"):
        plan_budget(replace(there, weights_vram=29_999_999))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 20 * GB),
    st.integers(0, 20 * GB),
    st.integers(0, 5 * GB),
    st.one_of(st.none(), st.integers(0, 20 * GB)),
    st.one_of(st.none(), st.integers(1, 20 * GB)),
    st.booleans(),
)
def test_no_plan_promises_more_than_there_is(
    total: int, ram_limit: int, held: int, fixed: int | None, device_free: int | None, resident: bool
) -> None:
    smallest = min(total, 30_000_000)
    request = BudgetRequest(total, smallest, ram_limit, "x", held, 10**8, device_free, 10**8, fixed, None, resident)
    try:
        plan = plan_budget(request)
    except BudgetError as error:
        assert "\n" not in str(error)
        return
    assert request.smallest <= plan.ram <= total
    assert plan.ram + held + request.ram_step + MARGIN <= ram_limit
    if device_free is not None:
        assert request.smallest <= plan.device <= total and plan.device + request.device_step + MARGIN <= device_free
    if resident:
        assert (plan.ram if device_free is None else plan.device) == total


# -- between weights and activations

#: recomputing everything, keeping products, keeping graphs
WAYS = tuple(StepChoice(n, n, s) for n, s in ((GB // 10, 10.0), (GB // 2, 8.0), (2 * GB, 7.0)))
SHARED = replace(CPU, total=4 * GB, ram_limit=5 * GB, ram_held=0, choices=WAYS)
LEFT = 5 * GB - 5 * GB // 20 - GB


def step_s(request: BudgetRequest, choice: StepChoice, window: int) -> float:
    """Reading and computing at once, or in turns where the window is too small to read ahead."""
    reading_s = request.passes * (request.total - window) / request.read_bytes_per_s
    ahead = window >= min(request.comfortable, request.total)
    return max(choice.compute_s, reading_s) if ahead else choice.compute_s + reading_s


def test_where_computing_takes_longest_products_are_kept_before_the_window_grows() -> None:
    plan = plan_budget(replace(SHARED, read_bytes_per_s=10 * GB))
    assert plan.ram == LEFT - 2 * GB and plan.activations == 2 * GB
    less = plan_budget(replace(SHARED, read_bytes_per_s=10 * GB, ram_limit=2 * GB))
    assert less.activations == GB // 2 and less.ram == 2 * GB - 2 * GB // 20 - GB - GB // 2


def test_where_reading_takes_longest_the_window_comes_first() -> None:
    plan = plan_budget(replace(SHARED, read_bytes_per_s=GB // 20))
    assert plan.activations == GB // 10 and plan.ram == LEFT - GB // 10


def test_in_between_the_step_is_as_short_as_can_be() -> None:
    """Reading 2 * 0.75 GB takes 8.3 s when products are kept, 2 * 2.25 GB 25 s when graphs are."""
    request = replace(SHARED, read_bytes_per_s=0.18 * GB)
    assert plan_budget(request).activations == GB // 2
    # Without room to read ahead, each takes its turn.
    turns = replace(request, comfortable=request.total, read_bytes_per_s=GB)
    assert plan_budget(turns).activations == GB // 2
    assert plan_budget(replace(turns, read_bytes_per_s=100 * GB)).activations == 2 * GB


def test_where_reads_slow_the_compute_a_larger_window_is_worth_some_of_it() -> None:
    """Graphs save 1 s against products, and 2 * 1.5 GB of reads more cost 1.2 s at 0.4 s per GB."""
    request = replace(SHARED, read_bytes_per_s=10 * GB)
    assert plan_budget(request).activations == 2 * GB
    assert plan_budget(replace(request, read_drag_s_per_byte=0.4 / GB)).activations == GB // 2
    assert plan_budget(replace(request, read_drag_s_per_byte=0.3 / GB)).activations == 2 * GB


def test_what_the_weights_do_not_need_goes_to_activations() -> None:
    plan = plan_budget(replace(SHARED, ram_limit=40 * GB))
    assert plan.ram == SHARED.total and plan.activations == 40 * GB - 2 * GB - GB - SHARED.total
    fixed = plan_budget(replace(SHARED, weights_ram=GB))
    assert fixed.ram == GB and fixed.activations == LEFT - GB
    one_way = replace(SHARED, weights_ram=GB, choices=WAYS[:1])
    assert plan_budget(one_way).activations == LEFT - GB


def test_a_cap_on_activations_is_kept() -> None:
    request = replace(SHARED, read_bytes_per_s=10 * GB)
    plan = plan_budget(replace(request, activations=GB))
    assert plan.activations == GB // 2 and plan.ram == LEFT - GB // 2, "products, for graphs take more"
    assert plan_budget(replace(request, activations=GB, ram_limit=40 * GB)).activations == GB
    with pytest.raises(BudgetError) as refused:
        plan_budget(replace(request, activations=GB // 10 - 1))
    message = str(refused.value)
    assert message.startswith("activations: 99,999,999 bytes are given, 100,000,000 are needed")
    assert "raise activations_ram or activations_vram" in message and "\n" not in message


def test_what_is_set_aside_for_gaps_and_scratch_memory_is_not_given_to_activations() -> None:
    """Else a schedule might be chosen that holds as much, and its own gaps would be beyond the limit."""
    ways = tuple(replace(way, activations=way.nbytes - GB // 20) for way in WAYS)
    plan = plan_budget(replace(SHARED, read_bytes_per_s=GB // 20, choices=ways))
    assert plan.activations == GB // 10 - GB // 20 and plan.ram == LEFT - GB // 10
    plan = plan_budget(replace(SHARED, ram_limit=40 * GB, choices=ways))
    assert plan.ram + plan.activations == 40 * GB - 2 * GB - GB - GB // 20
    capped = plan_budget(replace(SHARED, choices=ways, activations=GB // 20))
    assert capped.activations == GB // 20, "a cap is on activations alone"


def test_activations_of_a_device_are_its_own() -> None:
    request = replace(SHARED, ram_step=0, device_free=4 * GB, device_step=GB, read_bytes_per_s=10 * GB)
    plan = plan_budget(request)
    assert plan.activations == 2 * GB and plan.device == 4 * GB - 4 * GB // 20 - GB - 2 * GB
    assert plan.ram == min(request.total, 5 * GB - 5 * GB // 20), "RAM has none"
    with pytest.raises(BudgetError, match=r"weights_vram: 40,000,000 bytes .* beside 4,100,000,000 for the step"):
        plan_budget(replace(request, device_step=4 * GB))


def test_where_only_one_way_is_allowed_and_does_not_fit_the_message_says_whose_doing_it_is() -> None:
    request = replace(SHARED, ram_limit=3 * GB, choices=WAYS[2:])
    with pytest.raises(BudgetError, match="leave gradient_checkpointing to lema"):
        plan_budget(request)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6 * GB), st.floats(0.1, 100)), min_size=1, max_size=5),
    st.integers(1, 10 * GB),
    st.integers(GB // 5, 12 * GB),
    st.floats(1e7, 1e11),
    st.one_of(st.none(), st.integers(0, 8 * GB)),
    st.one_of(st.none(), st.integers(1, 8 * GB)),
    st.one_of(st.none(), st.integers(GB // 5, 12 * GB)),
    st.integers(0, 3 * GB),
    st.booleans(),
)
def test_the_best_way_that_fits_is_taken_and_never_more_than_there_is(
    ways: list[tuple[int, float]],
    total: int,
    memory: int,
    read_bytes_per_s: float,
    cap: int | None,
    fixed: int | None,
    device_free: int | None,
    comfortable: int,
    resident: bool,
) -> None:
    smallest = min(total, 30_000_000)
    request = BudgetRequest(
        total=total,
        smallest=smallest,
        ram_limit=memory,
        ram_source="x",
        ram_held=GB // 10,
        ram_step=0,
        device_free=device_free,
        weights_ram=fixed if device_free is None else None,
        weights_vram=None if device_free is None else fixed,
        resident=resident,
        choices=tuple(StepChoice(n, n, seconds) for n, seconds in sorted(ways)),
        activations=cap,
        comfortable=comfortable,
        read_bytes_per_s=read_bytes_per_s,
    )
    here = (memory - GB // 10) if device_free is None else device_free
    limit = memory if device_free is None else device_free
    left = here - max(MARGIN, limit // 20)
    wanted = total if resident or fixed is None else min(fixed, total)
    must_have = wanted if resident or fixed is not None else smallest
    allowed = [c for c in request.choices if must_have + c.nbytes <= left and (cap is None or c.nbytes <= cap)]
    try:
        plan = plan_budget(request)
    except BudgetError as error:
        assert "\n" not in str(error)
        assert not allowed or device_free is not None or (fixed is not None and fixed < smallest)
        return
    window = plan.ram if device_free is None else plan.device
    assert window + plan.activations <= left and plan.activations >= request.choices[0].nbytes
    assert cap is None or plan.activations <= cap
    assert must_have <= window <= total
    taken = [choice for choice in allowed if choice.nbytes <= plan.activations]
    best = min(step_s(request, choice, min(wanted, left - choice.nbytes)) for choice in allowed)
    assert min(step_s(request, choice, window) for choice in taken) == pytest.approx(best)


# -- StreamedModel.sizes and the store

CONFIG = ToyConfig(n_layers=3, vocab_size=300)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory):
    return write_toy(tmp_path_factory.mktemp("toy"), CONFIG)


@pytest.mark.parametrize("granule_bytes", [1000, 4000, 1 << 25])
def test_windows_fit_their_budgets_to_the_byte(tensors, granule_bytes: int) -> None:
    cut = granules_of(CONFIG, tensors, granule_bytes)
    n, slot = len(cut.layout.granules), cut.layout.slot_bytes
    for ram in (*range(cut.smallest_bytes, cut.total_bytes, max(1, slot // 3)), cut.total_bytes, 10 * cut.total_bytes):
        sizes = cut.sizes(ram, None, True)
        taken = sizes.ram_slots * slot + sizes.n_rows * cut.row_bytes + cut.bounce_bytes
        assert taken <= ram and 1 <= sizes.ram_slots <= n and 16 <= sizes.n_rows <= CONFIG.vocab_size
        if sizes.ram_slots < n:
            assert sizes.n_rows * cut.row_bytes <= max(ram // 8, 16 * cut.row_bytes), "rows leave the slots the most"
            assert ram - taken < slot + cut.row_bytes
    assert cut.sizes(cut.total_bytes, None, True) == cut.sizes(None, None, True)
    assert cut.sizes(None, None, True).ram_slots == n
    assert cut.sizes(None, 3 * slot - 1, False).device_slots == min(n, 2)


def test_one_byte_less_than_the_smallest_is_refused_with_both_numbers_and_nothing_read(tensors) -> None:
    cut = granules_of(CONFIG, tensors, 1000)
    smallest, slot = cut.smallest_bytes, cut.layout.slot_bytes
    with pytest.raises(BudgetError) as refused:
        open_toy(CONFIG, tensors, CpuDevice(), None, smallest - 1, None, 1000)
    assert f"{smallest - 1:,}" in str(refused.value) and f"{smallest:,}" in str(refused.value)
    device = SimulatedAccelerator()
    with pytest.raises(BudgetError, match=rf"weights_vram gives {slot - 1:,} bytes.* needs {slot:,}"):
        open_toy(CONFIG, tensors, device, None, smallest, slot - 1, 1000)
    device.close()


@pytest.mark.parametrize("accelerated", [False, True])
def test_the_smallest_budget_works_and_is_kept(tensors, accelerated: bool) -> None:
    cut = granules_of(CONFIG, tensors, 1000)
    device = SimulatedAccelerator() if accelerated else CpuDevice()
    make = partial(CheckingStore, tensors)
    runner = open_toy(CONFIG, tensors, device, None, cut.smallest_bytes, cut.layout.slot_bytes, 1000, make_store=make)
    ids = torch.arange(32).view(1, 32) * 9
    with runner.store as store:
        logits = runner.logits(TokenBatch.of(ids))
        stats = store.stats()["weights"]
        assert stats.ram_peak_bytes <= stats.ram_window_bytes <= cut.smallest_bytes
        assert stats.device_peak_bytes == (cut.layout.slot_bytes if accelerated else 0)
    resident = open_toy(CONFIG, tensors, CpuDevice(), max_granule_bytes=1000)
    with resident.store:
        assert torch.equal(resident.logits(TokenBatch.of(ids)), logits)


def test_a_device_without_room_for_its_window_leaves_no_thread(tensors) -> None:
    device = SimulatedAccelerator(capacity_bytes=10_000)
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(BudgetError, match="10,000 bytes left"):
        open_toy(CONFIG, tensors, device, max_granule_bytes=1000)
    assert {thread.name for thread in threading.enumerate()} == before
    device.close()
