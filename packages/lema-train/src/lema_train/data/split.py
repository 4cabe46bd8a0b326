"""Holding rows out of a dataset for evaluation."""

from __future__ import annotations

import random

from lema_core.errors import ConfigError, DataError
from lema_train.data.rows import Dataset


def split_dataset(dataset: Dataset, eval_fraction: float, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Split into rows to train on and rows to evaluate on, which share none; both keep the file's order.

    Args:
        eval_fraction: share of the rows to hold out, 0 < fraction < 1; at least one row goes to either side.
        seed: which rows; the same seed always picks the same.

    Raises:
        ConfigError: the fraction is not between 0 and 1.
        DataError: fewer than two rows.
    """
    if not 0 < eval_fraction < 1:
        raise ConfigError(f"eval fraction {eval_fraction}: must be between 0 and 1, both excluded")
    rows = len(dataset)
    if rows < 2:
        raise DataError(f"{dataset.report.path}: {rows} usable rows cannot be split into training and evaluation rows")
    held_out = min(max(1, round(rows * eval_fraction)), rows - 1)
    rng = random.Random(f"split/{seed}")
    keys = [rng.random() for _ in range(rows)]
    chosen = set(sorted(range(rows), key=keys.__getitem__)[:held_out])
    train = dataset.subset(i for i in range(rows) if i not in chosen)
    return train, dataset.subset(sorted(chosen))
