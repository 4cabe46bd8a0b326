"""Rows to batches, in an order that depends on (seed, epoch) alone.

Nothing here draws from a global random state and nothing is remembered but a step number, so a run that stops anywhere
and goes on sees exactly the rows it would have seen. Rows of similar length share a batch (little padding is computed)
without sorting the epoch: the epoch is shuffled, cut into pools of ``pool_batches`` batches, each pool sorted by length
and cut into batches, and the batches of the epoch shuffled.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from lema_core.errors import ConfigError, DataError
from lema_train.data.mask import IGNORED
from lema_train.data.rows import Dataset, Sample


@dataclass(frozen=True)
class Batch:
    """Rows of one micro-batch, padded on the right to the longest.

    What is padding is told by ``attention_mask`` and never by value: a pad id may be the EOS id, and a row's own EOS is
    trained.

    Attributes:
        input_ids: [B, T] int64; padding holds the fill id.
        labels: [B, T] int64; -100 in padding and where a row is not trained.
        attention_mask: [B, T] bool; False in padding.
        sample_indices: the B rows' places in the dataset.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor
    sample_indices: list[int]

    @property
    def supervised_tokens(self) -> int:
        """Tokens that take part in the loss: labels are shifted, so those of position 0 do not."""
        return int((self.labels[:, 1:] != IGNORED).sum())


def make_batch(samples: Sequence[Sample], fill_id: int, sample_indices: Sequence[int] | None = None) -> Batch:
    """Pad samples into a batch.

    Args:
        samples: at least one.
        fill_id: id for padded places, ``tokenizer.fill_id``.
        sample_indices: the samples' places in their dataset, 0 .. B-1 by default.
    """
    shape = len(samples), max(len(sample.ids) for sample in samples)
    input_ids = torch.full(shape, fill_id, dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        length = len(sample.ids)
        input_ids[row, :length] = torch.tensor(sample.ids)
        labels[row, :length] = torch.tensor(sample.labels)
        attention_mask[row, :length] = True
    indices = range(len(samples)) if sample_indices is None else sample_indices
    return Batch(input_ids, labels, attention_mask, list(indices))


def total_supervised_tokens(micro_batches: Iterable[Batch]) -> int:
    """What a step's summed loss is divided by: the trained tokens of all its micro-batches."""
    return sum(batch.supervised_tokens for batch in micro_batches)


class BatchPlan:
    """Which rows make up which micro-batch of which step.

    A step takes ``gradient_accumulation_steps`` micro-batches of ``batch_size`` rows. No row is left out: the last
    micro-batch made from an epoch may have fewer rows, the last step of an epoch fewer micro-batches.

    Args:
        lengths: tokens of each row.
        batch_size: rows in a micro-batch.
        gradient_accumulation_steps: micro-batches in a step.
        seed: of the order.
        shuffle: False keeps the rows' own order, without grouping by length.
        pool_batches: how many batches' worth of rows are sorted by length together; 1 does not group.

    Raises:
        ConfigError: a number is below 1.
        DataError: there are no rows.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        gradient_accumulation_steps: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        pool_batches: int = 16,
    ) -> None:
        for name, value in (
            ("batch_size", batch_size),
            ("gradient_accumulation_steps", gradient_accumulation_steps),
            ("pool_batches", pool_batches),
        ):
            if value < 1:
                raise ConfigError(f"{name}={value}: must be 1 or more")
        if not lengths:
            raise DataError("there are no rows to make batches of")
        self._lengths = list(lengths)
        self._batch_size = batch_size
        self._accumulate = gradient_accumulation_steps
        self._seed = seed
        self._shuffle = shuffle
        self._pool_rows = pool_batches * batch_size
        self._epoch: tuple[int, list[list[int]]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that see every row once; at least 1."""
        batches = -(-len(self._lengths) // self._batch_size)
        return -(-batches // self._accumulate)

    def micro_batches(self, step: int) -> list[list[int]]:
        """Row indices of each micro-batch of a step, counted from 0 through all epochs."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._epoch_batches(epoch)
        first = step_in_epoch * self._accumulate
        return self._epoch[1][first : first + self._accumulate]

    def state(self, step: int) -> dict[str, int]:
        """Where the run is when ``step`` is the next to do, as JSON."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return {"epoch": epoch, "step_in_epoch": step_in_epoch}

    def step_of(self, state: dict[str, int]) -> int:
        """The next step to do by a :meth:`state`.

        Raises:
            DataError: the state is of another plan: it is past this one's epoch.
        """
        epoch, step_in_epoch = state["epoch"], state["step_in_epoch"]
        if not (epoch >= 0 and 0 <= step_in_epoch <= self.steps_per_epoch):
            raise DataError(
                f"the checkpoint stopped at step {step_in_epoch} of epoch {epoch}, but an epoch now has "
                f"{self.steps_per_epoch} steps; resume with the same rows, batch_size and gradient_accumulation_steps"
            )
        return epoch * self.steps_per_epoch + step_in_epoch

    def _epoch_batches(self, epoch: int) -> list[list[int]]:
        rows = list(range(len(self._lengths)))
        if not self._shuffle:
            return _cut(rows, self._batch_size)
        rng = random.Random(f"{self._seed}/{epoch}")
        rows = _shuffled(rows, rng)
        batches: list[list[int]] = []
        for pool in _cut(rows, self._pool_rows):
            if self._pool_rows > self._batch_size:
                pool.sort(key=self._lengths.__getitem__)
            batches += _cut(pool, self._batch_size)
        return _shuffled(batches, rng)


class BatchLoader:
    """A dataset's batches step by step, for ever; where it is can be saved and restored.

    >>> loader = BatchLoader(dataset, BatchPlan(dataset.lengths, batch_size=8), tokenizer.fill_id)
    >>> for micro_batches in loader: ...
    """

    def __init__(self, dataset: Dataset, plan: BatchPlan, fill_id: int) -> None:
        self.plan = plan
        self.step = 0
        self._dataset = dataset
        self._fill_id = fill_id

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> list[Batch]:
        """The next step's micro-batches."""
        batches = self.micro_batches(self.step)
        self.step += 1
        return batches

    def micro_batches(self, step: int) -> list[Batch]:
        """The micro-batches of any step, counted from 0 through all epochs."""
        return [
            make_batch([self._dataset[i] for i in indices], self._fill_id, indices)
            for indices in self.plan.micro_batches(step)
        ]

    def state_dict(self) -> dict[str, int]:
        """``{"epoch", "step_in_epoch"}`` of the next step."""
        return self.plan.state(self.step)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            DataError: see :meth:`BatchPlan.step_of`.
        """
        self.step = self.plan.step_of(state)


def typical_micro_batch(dataset: Dataset, plan: BatchPlan) -> tuple[int, int]:
    """Tokens of each row, padding included, and targets of a micro-batch: means over the first epoch, of targets over
    256 of its rows."""
    lengths = dataset.lengths
    batches = [rows for step in range(plan.steps_per_epoch) for rows in plan.micro_batches(step)]
    tokens = round(sum(max(lengths[i] for i in rows) for rows in batches) / len(batches))
    some = [dataset[i] for i in range(0, len(dataset), max(1, len(dataset) // 256))]
    targets = sum(label != IGNORED for sample in some for label in sample.labels[1:]) / len(some)
    rows_of_one = max(map(len, batches))
    return tokens, max(1, min(round(targets * rows_of_one), rows_of_one * (tokens - 1)))


def _cut(items: list[int], size: int) -> list[list[int]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _shuffled(items: list, rng: random.Random) -> list:  # type: ignore[type-arg]
    # Only random() is promised to give the same numbers in every Python version; shuffle() is not.
    keys = [rng.random() for _ in items]
    return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__)]
