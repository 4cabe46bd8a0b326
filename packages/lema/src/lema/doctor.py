"""``task=doctor``: what this machine and this installation can do, and for everything that cannot serve, why not."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lema.compose import compose, group_choices
from lema.report import Row, print_sections
from lema_core import memory
from lema_core.errors import LemaError, in_one_line
from lema_core.memory import format_bytes
from lema_core.plugins import get_plugin_manager
from lema_core.quantization.choice import why_unavailable
from lema_core.records import load_object

if TYPE_CHECKING:
    from lema.config import LemaConfig

#: instruction sets that decide how fast a CPU computes here, as /proc/cpuinfo spells them
_CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def examine(config: LemaConfig | None = None) -> dict[str, list[Row]]:
    """All findings by section. Raises nothing for what is broken: that is a finding.

    Where ``config`` names a model, how fast this machine is with it is measured anew; it takes about two seconds.
    """
    return {
        "Versions": list(_versions()),
        "Machine": list(_machine()),
        "Memory and disk": list(_memory()),
        "Devices": list(_devices()),
        "Flight check": list(_flight_check(config)),
        "Models by name (+model=NAME)": list(_models()),
        "Architectures": [_loadable(each.name, each.adapter) for each in get_plugin_manager().architectures().values()],
        "Training methods": [
            _loadable(each.name, each.method) for each in get_plugin_manager().training_methods().values()
        ],
        "Checkpoint sources, in the order they are asked": [
            Row(each.name, f"priority {each.priority}", True) for each in get_plugin_manager().checkpoint_sources()
        ],
        "Kernels": list(_kernels()),
        "What quantizes weights (quant_backend=NAME), in the order of auto": list(_quant_backends()),
        "Plugins": list(_plugins()),
        "Hooks and who implements them": list(_hooks()),
    }


def print_report(out: TextIO, config: LemaConfig | None = None) -> None:
    """Write all findings; ``config``: see :func:`examine`."""
    print_sections(examine(config), out)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> Iterable[Row]:
    yield Row("python", f"{platform.python_version()} on {platform.platform()}")
    plugins = [package for package in get_plugin_manager().packages if package not in ("lema-core", "lema")]
    for package in ("torch", "lema", "lema-core", *plugins, "tokenizers", "safetensors", "hydra-core"):
        yield Row(package, _version(package))


def _machine() -> Iterable[Row]:
    import torch

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", info, re.MULTILINE)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Row("CPU", model[1] if model else platform.processor() or platform.machine())
    yield Row(
        "CPU features", " ".join(each for each in _CPU_FEATURES if flags and each in flags[1].split()) or "unknown"
    )
    yield Row("torch uses", f"{torch.backends.cpu.get_cpu_capability()} instructions")
    yield Row("threads", f"{torch.get_num_threads()} of {usable} CPUs this process may run on")
    yield Row("idle threads", f"OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY', 'not set: they spin for a while')}")


def _memory() -> Iterable[Row]:
    limit, group = memory.process_memory_limit(), memory.cgroup_limit()
    available = memory.available_bytes()
    yield Row("this process may use", f"{format_bytes(limit.bytes)}, from {limit.source}")
    yield Row("this process uses", format_bytes(memory.rss_bytes()))
    yield Row("physical memory", format_bytes(memory.physical_bytes()))
    yield Row("free memory", "unknown" if available is None else format_bytes(available))
    yield Row(
        "cgroup limit",
        f"{format_bytes(group.limit_bytes)}, {format_bytes(group.usage_bytes)} in use ({group.file})"
        if group
        else "none",
    )
    yield Row("disk free here", f"{format_bytes(shutil.disk_usage(Path.cwd()).free)} in {Path.cwd()}")


def _devices() -> Iterable[Row]:
    import torch

    yield Row("cpu", "computes in fp32", True)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            yield Row(f"cuda:{index}", f"{name}, {format_bytes(free)} free of {format_bytes(total)}", True)
    elif torch.version.cuda is None:
        yield Row("cuda", f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch", False)
    else:
        yield Row("cuda", f"torch is built for CUDA {torch.version.cuda}, but finds no device or no driver", False)
    for name, present in (("mps", torch.backends.mps.is_available()), ("xpu", torch.xpu.is_available())):
        there = "there is one, but" if present else "there is none, and"
        yield Row(name, f"{there} this version computes on cpu and cuda", False)


def _flight_check(config: LemaConfig | None) -> Iterable[Row]:
    if config is None or config.model_name_or_path is None:
        yield Row("not measured", "its figures are those of a model's file: task=doctor +model=NAME measures them")
        return
    from lema.model import LemaModel

    try:
        with LemaModel(config) as model:
            heard: list[str] = []
            flight = model.flight_check(refresh=True, say=heard.append)
            yield Row("model", str(model.folder))
            for what, figure in flight.describe():
                yield Row(what, figure)
            for line in heard:
                yield Row("said", line)
    except LemaError as error:
        yield Row("cannot be measured", str(error), False)


def _models() -> Iterable[Row]:
    """Whether each model that has a name could be opened: asks the sources, opens nothing."""
    sources = get_plugin_manager().checkpoint_sources()
    for name in group_choices().get("model", {}):
        ref = compose([f"+model={name}"]).model_name_or_path or ""
        refusals = {source.name: source.refuses(ref) for source in sources}
        serving = next((source for source, reason in refusals.items() if reason is None), None)
        reasons = "; ".join(f"{source}: {reason}" for source, reason in refusals.items())
        yield Row(name, f"{ref}, by source {serving}" if serving else f"{ref}: {reasons}", serving is not None)


def _loadable(name: str, path: str) -> Row:
    reason = _why_not(partial(load_object, path))
    return Row(name, reason or path, reason is None)


def _why_not(attempt: Callable[[], Any]) -> str | None:
    try:
        attempt()
    except Exception as error:  # whatever a plugin's module raises is the answer to the question
        return in_one_line(error)
    return None


def _kernels() -> Iterable[Row]:
    import torch

    here = {"cpu", "*"} | ({"cuda"} if torch.cuda.is_available() else set())
    for kernel in get_plugin_manager().kernels():
        broken = _why_not(partial(load_object, kernel.impl))
        reasons = [broken] if broken else []
        if not broken and kernel.device_type not in here:
            reasons.append(f"for {kernel.device_type}, which is not here")
        if not broken:
            reasons += kernel.unsupported(None)
        device = "any device" if kernel.device_type == "*" else kernel.device_type
        detail = ", ".join(reasons) or f"on {device}, priority {kernel.priority}"
        if kernel.variant and not reasons:
            detail += f", {kernel.variant()}"
        yield Row(f"{kernel.op}: {kernel.name}", detail, not reasons)


def _quant_backends() -> Iterable[Row]:
    for backend in get_plugin_manager().quant_backends():
        reason = why_unavailable(backend, "cpu") or _why_not(partial(load_object, backend.codec))
        about = f"weights_bits={backend.bits}, priority {backend.priority}"
        yield Row(f"{backend.name}: {backend.format}", reason or about, reason is None)


def _plugins() -> Iterable[Row]:
    manager = get_plugin_manager()
    for package in manager.packages:
        yield Row(package, _version(package), True)
    for problem in manager.problems:
        yield Row(problem.package, f"{problem.plugin}: {problem.error}", False)


def _hooks() -> Iterable[Row]:
    for name, caller in sorted(vars(get_plugin_manager().hook).items()):
        if name.startswith("lema_"):
            yield Row(name, ", ".join(impl.plugin_name for impl in caller.get_hookimpls()) or "nobody")
