"""The flight check: measure this machine once, in about two seconds, and keep the figures; then once for each model how
its own steps fare by them.

Each figure is taken with what a run uses: the disk with the run's reads of the model's own file, products with its
kernel and the weight's storage format, the link with the device's own copies. It takes less than 40 MB of RAM and
leaves nothing in the page cache.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import ceil, isfinite, prod
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any, Literal

import torch
from torch import Tensor

from lema_core.checkpoint.reading import tensor_bytes
from lema_core.device import Device
from lema_core.memory import format_bytes, process_memory_limit
from lema_core.ops.gradient import backward_from
from lema_core.ops.linear import LinearKernel
from lema_core.planning.hardware import Hardware
from lema_core.planning.kept import measured_once
from lema_core.planning.predict import compute_s
from lema_core.quantization.block import QuantizedBlock, WeightBlock
from lema_core.quantization.formats import WireFormat
from lema_core.store.disk import DiskReader
from lema_core.store.granules import SECTOR_BYTES, whole_sectors
from lema_core.store.trace import Trace

TOKENS = (16, 64, 256, 1024)
_READ_BYTES = 16 << 20
_MOST_READ_BYTES = 384 << 20
_READ_S, _MEMORY_S, _LINK_S, _PRODUCT_S, _OVERHEAD_S = 0.3, 0.1, 0.2, 0.15, 0.1
_DRAG_S, _DRAG_TIMES, _DRAG_TOKENS, _DRAG_READ_BYTES = 0.1, 3, 128, 8 << 20
_LINKS, OPERATIONS_PER_LINK = 20, 7
_DISTANCES = (2, 64)


@dataclass(frozen=True)
class _Sizes:
    """``rows`` and ``inner`` of the weight that is multiplied; bytes of the device memory that all happens in."""

    rows: int
    inner: int
    arena_bytes: int


@dataclass(frozen=True)
class _Weights:
    """What weights are stored as: see :func:`flight_check`."""

    dtype: torch.dtype
    form: WireFormat | None

    @property
    def name(self) -> str:
        return str(self.dtype) if self.form is None else f"{self.form.name} of {self.dtype}"


#: the larger one needs no more RAM, and its copies do not fit into a GPU's cache
_IN_RAM, _ON_DEVICE = _Sizes(1024, 2048, 20 << 20), _Sizes(4096, 4096, 128 << 20)


@dataclass(frozen=True)
class Rates:
    """What is measured and kept. ``read_jitter_s``: how much longer than the median the slowest read took.
    ``read_drag_s_per_byte``: see Hardware."""

    disk_bytes_per_s: float
    link_bytes_per_s: float | None
    memory_bytes_per_s: float
    gemm: tuple[tuple[int, float], ...]
    op_overhead_s: float
    read_jitter_s: float
    read_drag_s_per_byte: float


@dataclass(frozen=True)
class FlightCheck:
    """``hardware``: this machine as it is now. ``measured``: when its rates were taken, ISO 8601. ``file``: where they
    are kept, None where they could not be."""

    hardware: Hardware
    read_jitter_s: float
    measured: str
    file: Path | None

    def describe(self) -> list[tuple[str, str]]:
        """(what, figure) in words, for reports."""
        h = self.hardware
        products = ", ".join(f"{rate / 1e9:.3g} at {tokens}" for tokens, rate in h.gemm)
        rows = [
            ("disk", f"{format_bytes(h.disk_bytes_per_s)}/s, slowest read {1000 * self.read_jitter_s:.1f} ms late"),
            ("memory", f"{format_bytes(h.memory_bytes_per_s)}/s read and written"),
            ("products", f"{products} tokens (GFLOP/s, {h.compute_dtype})"),
            ("products lose to reads", f"{1e9 * h.read_drag_s_per_byte:.3f} s per GB read beside them"),
            ("an operation's overhead", f"{1e6 * h.op_overhead_s:.1f} us"),
        ]
        if h.link_bytes_per_s is not None:
            rows.insert(1, ("link to the device", f"{format_bytes(h.link_bytes_per_s)}/s"))
        return [*rows, ("measured", f"{self.measured}, {self.file or 'not kept'}")]


@dataclass(frozen=True)
class Proposal:
    """What the rates suggest where the user said nothing. ``because``: a sentence for each."""

    strategy: Literal["streaming", "resident"]
    prefetch_distance: int
    because: tuple[str, str]


def flight_check(
    model_file: Path,
    device: Device,
    kernel: LinearKernel,
    weight_dtype: torch.dtype,
    kernel_name: str,
    reader: DiskReader | None = None,
    reader_name: str = "python",
    refresh: bool = False,
    say: Callable[[str], None] = lambda text: None,
    form: WireFormat | None = None,
) -> FlightCheck:
    """Rates of this machine, from the cache or measured now.

    ``weight_dtype``: what weights are stored as, or, where they are quantized in ``form``, what they were before.
    ``kernel_name`` and ``reader_name`` tell them apart, version included. ``device``: one that the caller closes after;
    page-locked memory is freed only then. ``refresh`` measures again. ``say`` hears why a cached file was not used, or
    could not be written. Raises CheckpointError where ``model_file`` cannot be read.
    """
    weights = _Weights(weight_dtype, form)
    rates, kept = measured_once(
        _key(model_file, device, weights, kernel_name, reader_name),
        _rates,
        lambda: _measure(model_file, device, kernel, weights, reader or DiskReader()),
        asdict,
        say,
        refresh,
    )
    free = device.free_bytes()
    hardware = Hardware(
        name="this machine",
        ram_bytes=process_memory_limit().bytes,
        device_bytes=free,
        disk_bytes_per_s=rates.disk_bytes_per_s,
        link_bytes_per_s=rates.link_bytes_per_s,
        memory_bytes_per_s=rates.memory_bytes_per_s,
        gemm=rates.gemm,
        compute_dtype=str(device.compute_dtype(weight_dtype)).removeprefix("torch."),
        op_overhead_s=rates.op_overhead_s,
        source=f"flight check of {kept.measured}",
        read_drag_s_per_byte=rates.read_drag_s_per_byte,
    )
    return FlightCheck(hardware, rates.read_jitter_s, kept.measured, kept.file)


def paced(
    flight: FlightCheck, steps: str, rehearse: Callable[[], float], say: Callable[[str], None] = lambda text: None
) -> FlightCheck:
    """The check with the pace of ``steps`` in its ``hardware``: kept, or what ``rehearse`` finds now.

    ``steps``: all that their pace depends on beside the machine.
    """
    key = {"flight check": f"{flight.measured} {flight.file}", "steps": steps}
    pace, _ = measured_once(key, _positive, rehearse, lambda pace: pace, say)
    return replace(flight, hardware=replace(flight.hardware, pace=pace))


def _positive(found: Any) -> float:
    if not _is_positive(float(found)):
        raise ValueError("a pace is not a number greater than 0")
    return float(found)


def _is_positive(number: float) -> bool:
    return isfinite(number) and number > 0


def propose(flight: FlightCheck, trace: Trace, slot_bytes: int, all_bytes: int, window_bytes: int) -> Proposal:
    """How a step like ``trace`` should be run. ``slot_bytes``: of a granule; ``all_bytes``: of the whole model's
    window, of which ``window_bytes`` can be had."""
    rates = flight.hardware
    transfer_s = slot_bytes / rates.disk_bytes_per_s
    if rates.link_bytes_per_s is not None:
        transfer_s += slot_bytes / rates.link_bytes_per_s
    each_s = max(rates.op_overhead_s, compute_s(trace, rates) / max(1, len(trace.accesses)))
    low, high = _DISTANCES
    distance = min(high, max(low, 1 + ceil((transfer_s + flight.read_jitter_s) / each_s)))
    fits = window_bytes >= all_bytes
    beside = f"{format_bytes(all_bytes)} of weights, {format_bytes(window_bytes)} for them"
    return Proposal(
        "resident" if fits else "streaming",
        distance,
        (
            f"strategy: {'all fits' if fits else 'not all fits'}: {beside}",
            f"prefetch_distance {distance}: a transfer takes {1000 * transfer_s:.1f} ms and at times "
            f"{1000 * flight.read_jitter_s:.1f} ms more, an access computes {1000 * each_s:.2f} ms",
        ),
    )


# -- measuring


def _measure(model_file: Path, device: Device, kernel: LinearKernel, weights: _Weights, reader: DiskReader) -> Rates:
    sizes = _IN_RAM if device.shares_ram else _ON_DEVICE
    arena = device.allocate(sizes.arena_bytes)
    ram = arena if device.shares_ram else device.allocate_ram(_READ_BYTES)
    read_s = _time_reads(reader, model_file, ram[:_READ_BYTES])
    each = _READ_BYTES if model_file.stat().st_size >= _READ_BYTES else model_file.stat().st_size
    return Rates(
        disk_bytes_per_s=each * len(read_s) / sum(read_s),
        link_bytes_per_s=None if device.shares_ram else _link_rate(device, ram, arena[:_READ_BYTES]),
        memory_bytes_per_s=_memory_rate(device, arena),
        gemm=tuple((n, _product_rate(device, kernel, arena, weights, sizes, n)) for n in TOKENS),
        op_overhead_s=_op_overhead(device, arena),
        read_jitter_s=max(read_s) - median(read_s),
        read_drag_s_per_byte=_read_drag(reader, model_file, device, kernel, arena, weights, sizes),
    )


def _time_reads(reader: DiskReader, path: Path, target: Tensor) -> list[float]:
    """Seconds of reads spread over the file."""
    stop = time.perf_counter() + _READ_S
    most = _MOST_READ_BYTES // len(target)
    taken: list[float] = []
    for seconds, _ in _read_all(reader, path, target, lambda: bool(taken) and time.perf_counter() > stop):
        taken.append(seconds)
        if len(taken) >= most:
            break
    return taken


def _read_all(
    reader: DiskReader, path: Path, target: Tensor, enough: Callable[[], bool]
) -> Iterator[tuple[float, int]]:
    """Read pieces of a file, spread over it, as a disk may hold its beginning in a cache of its own: seconds and bytes
    of each."""
    memory = tensor_bytes(target)
    size = path.stat().st_size
    places = max(1, size // len(memory))
    # Odd, and not a divisor of many numbers: all places are seen before one is seen again.
    stride = next(s for s in (37, 41, 1) if places % s or s == 1)
    try:
        # The first read opens the file.
        reader.read(path, 0, memory[:SECTOR_BYTES], min(size, SECTOR_BYTES), (path.name,))
        place = 0
        while not enough():
            offset = place * stride % places * len(memory)
            length = min(len(memory), whole_sectors(size - offset))
            before = time.perf_counter()
            reader.read(path, offset, memory[:length], min(length, size - offset), (path.name,))
            yield time.perf_counter() - before, length
            place += 1
    finally:
        reader.close()


def _repeat(
    device: Device,
    seconds: float,
    what: Callable[[], object],
    least: int = 2,
    of: Callable[[list[float]], float] = min,
) -> float:
    """Seconds of ``what``, the device's part included; by default the fewest, as others on the machine only ever
    add."""
    taken: list[float] = []
    while len(taken) < least or sum(taken) < seconds:
        before = time.perf_counter()
        what()
        device.host_wait(device.record())
        taken.append(time.perf_counter() - before)
    return of(taken)


def _memory_rate(device: Device, arena: Tensor) -> float:
    half = len(arena) // 2
    source, target = arena[:half], arena[half : 2 * half]
    source.zero_()
    target.copy_(source)
    return 2 * half / _repeat(device, _MEMORY_S, lambda: target.copy_(source), 3)


def _link_rate(device: Device, ram: Tensor, target: Tensor) -> float:
    def copies() -> None:
        for _ in range(4):
            done = device.copy(target, ram, None)
        device.host_wait(done)

    copies()
    return 4 * len(ram) / _repeat(device, _LINK_S, copies, 3)


def _product_rate(
    device: Device, kernel: LinearKernel, arena: Tensor, weights: _Weights, sizes: _Sizes, tokens: int
) -> float:
    """FLOP/s of a forward product and its input gradient together."""
    both = _products(device, kernel, arena, weights, sizes, tokens)
    both()
    return 4 * sizes.rows * sizes.inner * tokens / _repeat(device, _PRODUCT_S, both)


def _products(
    device: Device, kernel: LinearKernel, arena: Tensor, weights: _Weights, sizes: _Sizes, tokens: int
) -> Callable[[], None]:
    """A forward product and its input gradient, in ``arena``."""
    dtype, shape = device.compute_dtype(weights.dtype), (sizes.rows, sizes.inner)
    generator = torch.Generator(arena.device).manual_seed(0)
    offset = 0

    def place(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        nonlocal offset
        nbytes = prod(shape) * kind.itemsize
        tensor = arena[offset : offset + nbytes].view(kind).view(shape)
        offset += whole_sectors(nbytes)
        # Zeros would let a GPU clock higher than numbers do.
        if kind.is_floating_point and kind.itemsize > 1:
            return tensor.normal_(generator=generator)
        if kind.is_floating_point:  # torch draws none of eight bits
            return tensor.copy_(torch.empty(shape, device=arena.device).normal_(generator=generator))
        tensor.view(torch.uint8).random_(0, 256, generator=generator)
        return tensor

    weight_RK: WeightBlock
    if weights.form is None:
        weight_RK = place(shape, weights.dtype)
    else:
        parts = tuple(place(part.shape, part.dtype) for part in weights.form.parts(shape))
        for scale in parts[1:]:
            scale.abs_().mul_(1e-2)
        weight_RK = QuantizedBlock(weights.form, shape, parts)
    x_KN, y_RN = place((sizes.inner, tokens), dtype), place((sizes.rows, tokens), dtype)

    def both() -> None:
        kernel.forward(weight_RK, x_KN, y_RN)
        kernel.input_gradient(weight_RK, y_RN, x_KN, True)

    return both


def _read_drag(
    reader: DiskReader,
    path: Path,
    device: Device,
    kernel: LinearKernel,
    arena: Tensor,
    weights: _Weights,
    sizes: _Sizes,
) -> float:
    """Seconds that products lose per byte read beside them: to the threads that read, and to memory. None of a device
    that computes from its own."""
    if not device.shares_ram:
        return 0.0
    both = _products(device, kernel, arena, weights, sizes, _DRAG_TOKENS)
    target = device.allocate_ram(_DRAG_READ_BYTES)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(times):
            both()
        return time.perf_counter() - start

    times = 1
    times = max(2, ceil(_DRAG_S / seconds()))
    lost: list[float] = []
    for _ in range(_DRAG_TIMES):
        alone_s = seconds()
        with ThreadPoolExecutor(1) as beside:
            stop = Event()
            reading = beside.submit(_read_until, stop, reader, path, target)
            disturbed_s = seconds()
            stop.set()
        lost.append((disturbed_s - alone_s) / max(1, reading.result()))
    return max(0.0, median(lost))


def _read_until(stop: Event, reader: DiskReader, path: Path, target: Tensor) -> int:
    """Read ``path`` over and over; returns the bytes."""
    done = 0
    while not stop.is_set():
        done += sum(length for _, length in _read_all(reader, path, target, stop.is_set))
    return done


def _op_overhead(device: Device, arena: Tensor) -> float:
    """Seconds of an operation that has next to nothing to do, as a block's are: inside a function with a gradient of
    its own, and there again."""
    x = arena[:512].view(torch.float32).view(8, 16).zero_().requires_grad_()
    dy = torch.zeros_like(x)

    def chain() -> None:
        y = x
        for _ in range(_LINKS):
            y = _Link.apply(y, dy) + dy
        backward_from(y, dy)
        x.grad = None

    chain()
    return _repeat(device, _OVERHEAD_S, chain, 5, median) / (OPERATIONS_PER_LINK * _LINKS)


class _Link(torch.autograd.Function):
    """Three operations and as many in the gradient; one more joins links."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x.t().t() * w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (w,) = ctx.saved_tensors
        return dy.t().t() * w, None


# -- what is kept


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _key(model_file: Path, device: Device, weights: _Weights, kernel: str, reader: str) -> dict[str, str]:
    """All that figures may depend on."""
    where = device.torch_device
    return {
        "cpu": cpu_model(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else type(device).__name__,
        "kernel": kernel,
        "reader": reader,
        "weights": weights.name,
        "file system": str(model_file.stat().st_dev),
    }


def _rates(found: Mapping[str, Any]) -> Rates:
    """Raises KeyError, TypeError or ValueError for what is not rates."""
    values = {
        name: float(found[name]) for name in Rates.__dataclass_fields__ if name not in ("gemm", "link_bytes_per_s")
    }
    link = found["link_bytes_per_s"]
    gemm = tuple((int(tokens), float(rate)) for tokens, rate in found["gemm"])
    rates = Rates(gemm=gemm, link_bytes_per_s=None if link is None else float(link), **values)
    positive = [rates.disk_bytes_per_s, rates.memory_bytes_per_s, rates.op_overhead_s, *(rate for _, rate in gemm)]
    positive += [rates.link_bytes_per_s] if link is not None else []
    not_negative = rates.read_jitter_s, rates.read_drag_s_per_byte
    if not gemm or not all(map(_is_positive, positive)) or not all(0 <= value < 3600 for value in not_negative):
        raise ValueError("a rate is not a number greater than 0")
    return rates
