"""What is drawn of a predicted step adds up to what was planned."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from lema_core.planning.curves import picture
from lema_core.planning.hardware import Hardware
from lema_core.planning.predict import predict_step, steady_step
from lema_core.store.granules import Granule, Read
from lema_core.store.trace import Trace, Work

N, EACH = 12, 100
GRANULES = [Granule(i, EACH, None, (f"t{i}",), (Read(Path("f"), 0, EACH, EACH, 0),)) for i in range(N)]
ACCESSES = (*range(N), *reversed(range(N)))
STEP = Trace("palindrome", ACCESSES, tuple(Work(500.0, 1, 0.0) for _ in ACCESSES))


@pytest.mark.parametrize("far_slots", [None, 8])
def test_a_tier_never_holds_more_than_its_window_and_ends_as_it_began(far_slots: int | None) -> None:
    link = 200.0 if far_slots else None
    rates = Hardware("m", 1, 1 if link else None, 400.0, link, 1e9, ((1, 1e3),), "float32", 0.0, "")
    steady = steady_step(STEP, 4, far_slots, 1)
    found = predict_step(STEP, steady.plan, GRANULES, rates)
    drawn = picture(found, steady, GRANULES, EACH, 4, far_slots)
    assert set(drawn.tiers) == ({"device", "RAM"} if far_slots else {"RAM"})
    for name, curve in drawn.tiers.items():
        assert curve.capacity_bytes == EACH * (8 if far_slots and name == "RAM" else 4)
        assert len(curve.times_s) == len(curve.nbytes) and list(curve.times_s) == sorted(curve.times_s)
        assert min(curve.nbytes) >= 0 and max(curve.nbytes) == curve.capacity_bytes
        assert curve.nbytes[-1] == curve.nbytes[0], "a steady step leaves what it found"
        assert curve.times_s[-1] >= drawn.step_s
    for lane, busy_s in (("disk", found.disk_s), ("link", found.link_s), ("compute", found.compute_s)):
        bars = drawn.lanes.get(lane, ())
        assert sum(duration for _, duration in bars) == pytest.approx(busy_s)
        assert all(a + d <= b + 1e-9 for (a, d), (b, _) in pairwise(bars)), "one thing at a time"
    assert ("link" in drawn.lanes) == (far_slots is not None)
