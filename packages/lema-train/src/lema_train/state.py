"""Where a training run stands, as one JSON object: everything a resume needs beside weights and optimizer states."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, get_type_hints

from lema_core.errors import CheckpointError

#: raised whenever a reader of the previous format would misread the new one
FORMAT_VERSION = 1


@dataclass
class TrainerState:
    """The state of a run after ``step`` optimizer steps.

    ``step`` counts steps attempted; ``skipped_steps`` of them were left out because a loss or gradient was not
    finite, the last ``non_finite_in_a_row`` in a row. ``epoch`` counts epochs begun before this one,
    ``step_in_epoch`` the optimizer steps of this epoch already done. ``base_learning_rate``, ``lr_schedule``,
    ``warmup_steps`` and ``total_steps`` record the schedule that was running, ``optimizer`` the class name of the
    optimizer. ``loss_scale`` is the next step's, which ``steps_at_scale`` finite steps in a row had. ``rng`` holds
    generator states where a run has any; ``config`` the options of the run. Both are plain JSON values.
    """

    step: int
    total_steps: int
    epoch: int
    step_in_epoch: int
    seed: int
    base_learning_rate: float
    lr_schedule: str
    warmup_steps: int
    optimizer: str
    tokens: int = 0
    skipped_steps: int = 0
    non_finite_in_a_row: int = 0
    loss_scale: float = 1.0
    steps_at_scale: int = 0
    rng: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values. Raises CheckpointError naming a field whose value JSON does not have (NaN, a tensor)."""
        values = asdict(self)
        for name, value in values.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"trainer state: {name} is not plain JSON: {error}") from error
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainerState:
        """The inverse of :meth:`to_json`. Raises CheckpointError for a field unknown, of another type, or missing that
        checkpoints always had."""
        types = get_type_hints(cls)
        required = [each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING]
        missing = [name for name in required if name not in values]
        unknown = [name for name in values if name not in types]
        if missing or unknown:
            raise CheckpointError(
                f"trainer state: missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
            )
        for name, value in values.items():
            if not _is_a(value, types[name]):
                raise CheckpointError(f"trainer state: {name}: {_type_name(types[name])} expected, {value!r} found")
        return cls(**values)


def _type_name(hint: Any) -> str:
    return getattr(hint, "__origin__", hint).__name__


def _is_a(value: object, hint: Any) -> bool:
    kind = getattr(hint, "__origin__", hint)
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)
