"""What lema_core itself brings, registered the way every plugin registers."""

from __future__ import annotations

from collections.abc import Iterable

from lema_core.folder_source import FOLDER_SOURCE
from lema_core.hookspecs import hookimpl
from lema_core.records import CheckpointSource, Kernel
from lema_core.store.budget import BudgetPlan, BudgetRequest, plan_budget

_REFERENCE = {
    "linear": "lema_core.ops.linear:LinearKernel",
    "elementwise": "lema_core.ops.elementwise:TorchElementwise",
    "attention": "lema_core.ops.attention:TorchAttention",
    "adamw": "lema_core.ops.adamw:TorchAdamW",
    "read": "lema_core.store.reads:PythonReads",
    "widen": "lema_core.ops.widen:TorchWiden",
}


@hookimpl
def lema_checkpoint_sources() -> Iterable[CheckpointSource]:
    """A local folder in Hugging Face layout."""
    yield FOLDER_SOURCE


@hookimpl
def lema_kernels() -> Iterable[Kernel]:
    """The plain-torch reference, which serves every device and is what other kernels are compared with."""
    for op, impl in _REFERENCE.items():
        yield Kernel("torch", op, "*", impl, priority=0, unsupported=lambda request: [])
    yield Kernel("torch", "copy", "cuda", "lema_core.copies:TorchCopies", priority=0, unsupported=lambda request: [])


@hookimpl(trylast=True)
def lema_plan_budget(request: BudgetRequest) -> BudgetPlan:
    """Give the weights all that is left beside a step."""
    return plan_budget(request)
