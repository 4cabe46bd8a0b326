"""Copies from page-locked RAM to a CUDA device: the contract of a ``copy`` kernel, and torch's."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Copies(Protocol):
    """Kernels of the operation ``copy``, made with the torch.device; all methods may be called from any thread.

    Copies run on a ``cuda_stream`` of their own, in the order they were queued. Events mean something to the object
    that made them only.
    """

    def register(self, slab: Tensor) -> None:
        """Page-lock exactly these bytes of RAM, until close(). Raises BudgetError or RuntimeError when refused."""

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Queue a copy of contiguous bytes that starts once the event ``after`` (or None) is over; the event of its
        end."""

    def record(self) -> Any:
        """The event that compute queued so far will have passed."""

    def compute_wait(self, event: Any) -> None:
        """Compute queued from now on starts after ``event``."""

    def host_wait(self, event: Any) -> None:
        """Block the calling thread until ``event`` is over. Raises what a copy failed with."""

    def close(self) -> None:
        """Wait for what is queued and unlock the registered RAM; safe to call twice."""


class TorchCopies:
    """By torch's own CUDA streams and events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy_stream = torch.cuda.Stream(device)
        self._registered: list[Tensor] = []

    def register(self, slab: Tensor) -> None:
        # Registering our own mapping locks exactly its bytes; torch's pinned allocator rounds up to a power of two.
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0))
        self._registered.append(slab)

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        with torch.cuda.stream(self._copy_stream):
            if after is not None:
                self._copy_stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._copy_stream)
        return done

    def record(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def compute_wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def host_wait(self, event: Any) -> None:
        event.synchronize()

    def close(self) -> None:
        self._copy_stream.synchronize()
        while self._registered:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._registered.pop().data_ptr()))
