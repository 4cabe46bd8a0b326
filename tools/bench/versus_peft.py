"""lema inside capped groups against transformers + PEFT: the tables that bench_lora and bench_smollm2 share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from contest import Entrant, Result, announce, compare, contest
from smallest import smallest
from workers import ChildFailed, worker

RESIDENT_AT_MOST = 1.05
PEFT_KEEPS_SPEED = 1.1


@dataclass(frozen=True)
class Aim:
    """A cap for lema, and the most that its step may take against PEFT's."""

    cap_bytes: int
    at_most: float

    @property
    def name(self) -> str:
        return f"lema in {self.cap_bytes / 1e6:g} MB"


def against_peft(
    lema_options: dict[str, Any], peft_options: dict[str, Any], aims: Sequence[Aim], pairs: int, resident: bool
) -> Result | None:
    """Every cap against one PEFT, uncapped, in turn; with ``resident``, against lema with everything in RAM as well.
    Returns PEFT's result."""
    how = "with" if peft_options.get("checkpointing") else "without"
    peft = Entrant(f"PEFT {how} checkpointing, uncapped", "peft", peft_options)
    oracle_config = {**lema_options.get("config", {}), "strategy": "resident"}
    oracle = Entrant("lema resident, uncapped", "lema", {**lema_options, "config": oracle_config})
    capped = [Entrant(aim.name, "lema", lema_options, aim.cap_bytes) for aim in aims]
    print(f"== {peft.name}, against {', '.join(entrant.name for entrant in capped)}", flush=True)
    results = contest([capped[0], peft, *capped[1:], *([oracle] if resident else [])], pairs)
    for aim in aims:
        ours = results.get(aim.name)
        if ours is not None and peft.name in results:
            compare(ours, results[peft.name], aim.at_most)
        if ours is not None and oracle.name in results:
            compare(ours, results[oracle.name], RESIDENT_AT_MOST)
    return results.get(peft.name)


def peft_smallest_group(peft_options: dict[str, Any], uncapped: Result, resolution_bytes: int) -> int:
    """Bytes of the smallest group, swap off, in which PEFT's step takes at most 1.1 times what it takes uncapped."""
    uncapped_s = uncapped.step_s
    peak = max(row["rss_peak_bytes"] for row in uncapped.rows)

    def keeps_speed(cap_bytes: int) -> bool:
        try:
            with worker("peft", peft_options, cap_bytes, timeout_s=600 + 10 * uncapped_s) as child:
                child.step()
                seconds = median(child.step()["outside_s"] for _ in range(2))
        except ChildFailed as error:
            print(f"  {cap_bytes / 1e6:6.0f} MB: {error}", flush=True)
            return False
        print(f"  {cap_bytes / 1e6:6.0f} MB: {seconds:.2f} s, {seconds / uncapped_s:.2f} x", flush=True)
        return seconds <= PEFT_KEEPS_SPEED * uncapped_s

    low, high = peak // 2, peak + 2 * resolution_bytes
    probes = max(1, ((high - low) // resolution_bytes).bit_length())
    announce(f"the smallest group in which PEFT keeps its speed, {probes} tries", probes * (30 + 3.5 * uncapped_s))
    found = smallest(keeps_speed, low, high, resolution_bytes)
    print(
        f"smallest group in which {uncapped.entrant.name.removesuffix(', uncapped')} keeps its speed "
        f"({uncapped_s:.2f} s uncapped): {found / 1e6:.0f} MB, to {resolution_bytes / 1e6:.0f} MB\n",
        flush=True,
    )
    return found
