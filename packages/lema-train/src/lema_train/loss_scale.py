"""The factor on the loss that keeps gradients inside fp16's range (Micikevicius et al. 2018, "Mixed Precision
Training", arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

_FIRST, _MOST, _LEAST = 2.0**16, 2.0**24, 1.0
#: finite steps in a row after which it grows
_GROWS_AFTER = 2000


class LossScale:
    """``fixed``, or as large as gradients stay finite: halved by every step that is not, doubled after 2000 that are.
    ``needed``: computing is in fp16; otherwise it is 1."""

    def __init__(self, fixed: float | None, needed: bool) -> None:
        self.value = fixed if fixed is not None else _FIRST if needed else 1.0
        self.steps = 0
        self._moves = fixed is None and needed

    @property
    def may_shrink(self) -> bool:
        return self._moves and self.value > _LEAST

    def go_on(self, value: float, steps: int) -> None:
        """From where a checkpoint left it."""
        if self._moves:
            self.value, self.steps = value, steps

    def after(self, finite: bool) -> None:
        """A step is over whose gradients were ``finite``."""
        if not self._moves:
            return
        self.steps = self.steps + 1 if finite else 0
        if not finite:
            self.value = max(_LEAST, self.value / 2)
        elif self.steps == _GROWS_AFTER:
            self.value, self.steps = min(_MOST, self.value * 2), 0
