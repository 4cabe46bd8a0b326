"""Packing of weights by native code: the contract of kernels of the operation ``quantize``.

Their plain-torch twins are the first-party codecs, and the error meter of the report: a kernel writes the bytes that
the codec of the format writes, and both ask :func:`native_quantize` for one before they compute themselves.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lema_core.errors import PluginError
from lema_core.plugins import PluginManager, get_plugin_manager
from lema_core.records import load_object

OP = "quantize"


class Quantize(Protocol):
    """Kernels of the operation ``quantize``. ``formats``: names of the wire formats that it packs."""

    formats: frozenset[str]

    def __call__(self, format_name: str, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> bool:
        """Packs a block of rows, fp32, fp16 or bf16, contiguous and on the CPU, into these rows of the format's parts,
        contiguous too. Rows do not depend on each other. False where a number is infinite or NaN: then the parts hold
        anything. Computes in the calling thread, without the interpreter's lock."""

    def add_errors(
        self, format_name: str, weight_rK: Tensor, parts: tuple[Tensor, ...], squares_K: Tensor, errors_K: Tensor
    ) -> None:
        """Adds the sums of squares of each column, of the numbers and of what the parts are off by, to fp64 ones."""


def native_quantize(plugins: PluginManager | None = None) -> Quantize | None:
    """The kernel of highest priority that can serve; None where none is installed or each has a reason not to."""
    try:
        kernel, _ = (plugins or get_plugin_manager()).choose_kernel(OP, None, "cpu")
    except PluginError:
        return None
    return load_object(kernel.impl)()
