"""Short words for long lists of tensors, for one-line errors."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")


def layer_number(name: str) -> int | None:
    """The block's number in a tensor name (``model.layers.3.mlp.up_proj.weight`` -> 3), None outside blocks."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def shorten(names: Iterable[str], most: int = 4) -> str:
    """``a, b, c, d and 17 more``."""
    listed = list(names)
    head = ", ".join(listed[:most])
    return head if len(listed) <= most else f"{head} and {len(listed) - most} more"


def describe_layers(layers: Iterable[int | None]) -> str:
    """``layers 0-3, 7`` for numbers, plus ``outside the layers`` for None; empty for nothing."""
    found = set(layers)
    outside = None in found
    numbers = sorted(number for number in found if number is not None)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    parts = [f"{'layer' if len(numbers) == 1 else 'layers'} {words}"] if numbers else []
    if outside:
        parts.append("outside the layers")
    return " and ".join(parts)
