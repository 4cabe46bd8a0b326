"""The part of AdapterSuite in which a model's own weights train. Shapes: B rows, T tokens, V vocabulary."""

from __future__ import annotations

from lema_core.testing import adapter_oracle as theirs
from lema_core.testing.adapter_case import AdapterCase, Shape, batch_of, train
from lema_core.testing.comparing import assert_all_close

#: micro-batches of a step, step by step; of no lengths in common, one without a target
_STEPS: tuple[tuple[Shape, ...], ...] = (
    ((2, 9, "right"), (1, 5, ""), (3, 13, "left"), (1, 1, ""), (1, 37, "")),
    ((2, 7, "left"), (1, 17, "")),
)


class WeightSuite(AdapterCase):
    """Tests of the gradients of weights against transformers."""

    def test_gradients_of_every_weight(self, variant: str) -> None:
        """Of all tensors at once, as transformers gives them to what it trains; a tied one has the sum of both."""
        folder = self.folder(variant)
        adapter, _ = self.bound(folder)
        weights = self.all_gradients(adapter)
        runner, model = self.open(folder, gradients=weights), theirs.load_model(folder)
        for step, shapes in enumerate(_STEPS):
            batches = [batch_of(shape, adapter.vocab_size, seed) for seed, shape in enumerate(shapes)]
            found = train(runner, {}, batches, step, weights=weights)
            model.zero_grad()
            logits_BTV = [self.oracle_logits(model, batch) for batch in batches]
            self.oracle_loss(model, batches, logits_BTV).backward()
            totals = {name: found[name] for name in weights.totals}
            assert_all_close(f"step {step}", totals, self.weight_gradients(adapter, model))
            assert weights.completed == [*reversed(range(adapter.n_layers)), None]
