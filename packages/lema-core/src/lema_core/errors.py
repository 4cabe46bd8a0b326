"""Errors a user can act on. Each message is one line that names the file, tensor or option, and the way out."""

from __future__ import annotations


def in_one_line(error: BaseException) -> str:
    """What kind of error, and what it says: for those that libraries and plugins raise."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


class LemaError(Exception):
    """Base of every error lema raises on purpose. ``exit_code`` is what the command line returns."""

    exit_code = 1


class ConfigError(LemaError):
    """An option, or a field of the model's config, is unknown, out of range or contradicts another."""

    exit_code = 2


class CheckpointError(LemaError):
    """A checkpoint's files are missing, cut, contradictory or do not fit the model."""


class BudgetError(LemaError):
    """What was asked cannot fit into the memory given; says the bytes needed and given."""


class TransferError(LemaError):
    """The device or the system failed to move a tensor; names tensor and file."""


class DataError(LemaError):
    """A training or evaluation row cannot be used; names file and line."""


class NonFiniteError(LemaError):
    """Losses or gradients stayed infinite or NaN for too many steps, or a weight to be quantized has such numbers."""


class PluginError(LemaError):
    """A plugin was asked for by name and cannot serve."""


class PlanError(LemaError):
    """The step touched tensors in another order than its trace; a defect of an adapter or of lema."""
