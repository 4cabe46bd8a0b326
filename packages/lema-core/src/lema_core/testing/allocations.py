"""What torch's allocator is asked for."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


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
