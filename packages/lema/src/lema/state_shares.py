"""How much RAM moments and gradients of weights that train are given."""

from __future__ import annotations

from lema.config import LemaConfig
from lema_core.budgets import parse_amount
from lema_core.store.model import StreamedModel
from lema_core.store.state_plan import StateCodecs, Turns, grads_sizes, optim_sizes, passing_bytes


class StateShares:
    """``grads`` and ``optim``: bytes of records that never leave RAM. What options fix is given first; what they leave
    open gets what weights and activations leave: a byte kept is one read and one written less in each step, of moments
    and of gradients alike. The others pass through a few slots (``passing_bytes``)."""

    def __init__(
        self, config: LemaConfig, ram_limit: int, model: StreamedModel, codecs: StateCodecs, turns: Turns
    ) -> None:
        self._totals = {
            "grads": sum(grads_sizes(model, codecs, turns)),
            "optim": sum(optim_sizes(model, codecs, turns)),
        }
        self._passing_bytes = passing_bytes(model, codecs)
        asked = {
            "grads": parse_amount(config.grad_acc_ram, ram_limit, "grad_acc_ram"),
            "optim": parse_amount(config.opt_state_ram, ram_limit, "opt_state_ram"),
        }
        if config.grad_accum_backend != "auto":
            asked["grads"] = self._totals["grads"] if config.grad_accum_backend == "ram" else 0
        self._open = [kind for kind, nbytes in asked.items() if nbytes is None]
        self._given = {kind: min(self._totals[kind], nbytes or 0) for kind, nbytes in asked.items()}

    def take(self, spare: int) -> int:
        """Give what is open of ``spare`` bytes; returns how many are taken."""
        before = spare
        for kind in self._open:
            self._given[kind] = min(self._totals[kind], spare)
            spare -= self._given[kind]
        return before - spare

    @property
    def grads(self) -> int:
        return self._given["grads"]

    @property
    def optim(self) -> int:
        return self._given["optim"]

    @property
    def nbytes(self) -> int:
        """Of all that is in RAM."""
        return self._passing_bytes + self.grads + self.optim
