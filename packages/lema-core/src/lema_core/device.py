"""The one interface between the transfer engine and a device: allocate, copy asynchronously, event, wait.

A device with ``shares_ram`` computes from RAM: slots of the RAM tier are read where a file landed and nothing is
copied. Otherwise copies run on a queue of their own and events go both ways: compute waits for a copy, and a copy into
a slot waits for the compute that reads it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lema_core.copies import Copies, TorchCopies
from lema_core.errors import BudgetError, ConfigError

_HUGE_PAGE_BYTES = 2 << 20


class Event(Protocol):
    """A point in a device's queue; what it means is the device's own business."""


class Device(Protocol):
    """What the engine asks of a device. All methods may be called from any thread."""

    torch_device: torch.device
    shares_ram: bool

    def compute_dtype(self, storage: torch.dtype) -> torch.dtype:
        """The dtype that products of weights stored as ``storage`` are computed in."""

    def allocate(self, nbytes: int) -> Tensor:
        """Device memory, uint8 [nbytes], aligned to 4096 bytes. Raises BudgetError when there is not so much."""

    def allocate_ram(self, nbytes: int) -> Tensor:
        """RAM that copies to the device can start from, uint8 [nbytes], aligned to 4096 bytes."""

    def copy(self, target: Tensor, source: Tensor, after: Event | None) -> Event:
        """Queue a copy RAM -> device that starts once ``after`` (compute that still reads ``target``) is over."""

    def record(self) -> Event:
        """The point that compute queued so far will have passed."""

    def compute_wait(self, event: Event) -> None:
        """Compute queued from now on starts after ``event``."""

    def host_wait(self, event: Event) -> None:
        """Block the calling thread until ``event`` is over. Raises what a copy failed with, as compute_wait does where
        it can know."""

    def discard(self, slot: Tensor, after: Event) -> None:
        """The content of ``slot`` will not be used again once ``after`` is over."""

    def trim(self) -> None:
        """Let others have the memory that freed activations left behind. Called where a step goes over to something
        that needs memory of other sizes."""

    def free_bytes(self) -> int | None:
        """Bytes this process can still allocate on the device; None where the device shares RAM."""

    def close(self) -> None:
        """Stop what the device runs in the background and give memory back."""


def map_ram(nbytes: int) -> Tensor:
    """Private anonymous memory on huge pages where the kernel has them, uint8 [nbytes], zero until written.

    The alignment to a huge page also serves direct I/O. ``mmap(-1)`` without MAP_PRIVATE would be shared memory, which
    gets none. Raises BudgetError when the system refuses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=flags)
    except (OSError, OverflowError) as error:
        raise BudgetError(f"{nbytes:,} bytes of RAM are needed, the system refuses: {error}; give less") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + nbytes]


class CpuDevice:
    """Compute on the CPU, from RAM. The copying half of the interface has nothing to do."""

    shares_ram = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        _keep_freed_memory()

    def compute_dtype(self, storage: torch.dtype) -> torch.dtype:
        return torch.float32

    def allocate(self, nbytes: int) -> Tensor:
        return map_ram(nbytes)

    def allocate_ram(self, nbytes: int) -> Tensor:
        return map_ram(nbytes)

    def copy(self, target: Tensor, source: Tensor, after: Event | None) -> Event:
        target.copy_(source)
        return None

    def record(self) -> Event:
        return None

    def compute_wait(self, event: Event) -> None:
        return None

    def host_wait(self, event: Event) -> None:
        return None

    def discard(self, slot: Tensor, after: Event) -> None:
        return None

    def trim(self) -> None:
        _give_back_freed_memory()

    def free_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        return None


class CudaDevice:
    """Compute on a CUDA device; ``copies`` makes the kernel that copies from page-locked RAM."""

    shares_ram = False

    def __init__(self, name: str = "cuda", copies: Callable[[torch.device], Copies] = TorchCopies) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={name}: torch finds no CUDA device; use device=cpu or install a CUDA build of torch"
            )
        self.torch_device = torch.device(name if ":" in name else f"{name}:{torch.cuda.current_device()}")
        if self.torch_device.index >= torch.cuda.device_count():
            raise ConfigError(f"device={name}: there are {torch.cuda.device_count()} CUDA devices")
        self._copies = copies(self.torch_device)

    def compute_dtype(self, storage: torch.dtype) -> torch.dtype:
        if storage == torch.bfloat16 and not torch.cuda.is_bf16_supported():
            return torch.float32
        return storage

    def allocate(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{nbytes:,} bytes on {self.torch_device} are needed, {self.free_bytes():,} are free; "
                "lower weights_vram, or stop what else uses the device"
            ) from error

    def allocate_ram(self, nbytes: int) -> Tensor:
        slab = map_ram(nbytes)
        self._copies.register(slab)
        return slab

    def copy(self, target: Tensor, source: Tensor, after: Event | None) -> Event:
        return self._copies.copy(target, source, after)

    def record(self) -> Event:
        return self._copies.record()

    def compute_wait(self, event: Event) -> None:
        self._copies.compute_wait(event)

    def host_wait(self, event: Event) -> None:
        self._copies.host_wait(event)

    def discard(self, slot: Tensor, after: Event) -> None:
        return None

    def trim(self) -> None:
        return None

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def close(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        self._copies.close()


#: glibc takes no larger one on 64 bits
_LARGEST_MMAP_THRESHOLD = 32 << 20
_LARGEST_INT = (1 << 31) - 1


def _keep_freed_memory() -> None:
    """Let glibc reuse freed activations instead of returning each to the kernel: page faults cost more than the
    products' edges.

    Other C libraries have no mallopt and keep their own policy.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt(m_mmap_threshold, _LARGEST_MMAP_THRESHOLD)
    # What is not needed is given back where a step says so (trim), and not whenever much is free for a moment.
    mallopt(m_trim_threshold, _LARGEST_INT)


def _give_back_freed_memory() -> None:
    """Return all pages without anything in them to the kernel."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def open_device(name: str, copies: Callable[[torch.device], Copies] = TorchCopies) -> Device:
    """``auto`` (cuda, else cpu), ``cpu``, ``cuda`` or ``cuda:N``; ``copies`` is the ``copy`` kernel of a CUDA device.
    Raises ConfigError for what this machine does not have."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice()
    if name.partition(":")[0] == "cuda":
        return CudaDevice(name, copies)
    raise ConfigError(f"device={name}: this version computes on cpu and cuda; use device=auto")
