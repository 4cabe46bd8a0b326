"""Copies from page-locked RAM to a CUDA device, in liblema_cuda."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from lema_core.errors import BudgetError
from lema_cuda.library import cuda_text, open_cuda_library, raise_for_cuda

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_NOT_READY = 600  # LEMA_NOT_READY


class _Event:
    """A CUDA event on loan: its handle is used again when nobody holds this any more."""

    __slots__ = ("_free", "handle")

    def __init__(self, handle: int, free: list[int]) -> None:
        self.handle = handle
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.handle)


class NativeCopies:
    """As :class:`lema_core.copies.Copies`; raises RuntimeError with CUDA's text for what fails.

    ``compute_stream`` gives the handle of the ``cuda_stream`` that compute is queued on, default torch's current one.
    Events are reused, so a step allocates none, and a thread that waits for one sleeps.
    """

    def __init__(self, device: torch.device, compute_stream: Callable[[], int] | None = None) -> None:
        self._library = open_cuda_library()
        self._compute_stream = compute_stream or (lambda: torch.cuda.current_stream(device).cuda_stream)
        self._copier = ctypes.c_void_p()
        self._registered: list[Tensor] = []
        self._events: list[int] = []
        self._free: list[int] = []
        raise_for_cuda(self._library.lema_copier_open(device.index or 0, ctypes.byref(self._copier)), "opening CUDA")

    def register(self, slab: Tensor) -> None:
        nbytes = slab.numel() * slab.element_size()
        error = self._library.lema_copier_register(self._copier, slab.data_ptr(), nbytes)
        if error == _OUT_OF_MEMORY:
            raise BudgetError(f"{nbytes:,} bytes of RAM cannot be page-locked: {cuda_text(error)}; lower weights_ram")
        raise_for_cuda(error, f"page-locking {nbytes:,} bytes")
        self._registered.append(slab)

    def copy(self, target: Tensor, source: Tensor, after: _Event | None) -> _Event:
        nbytes = source.numel() * source.element_size()
        if nbytes != target.numel() * target.element_size() or not (source.is_contiguous() and target.is_contiguous()):
            raise RuntimeError(f"{nbytes} contiguous bytes are copied, the target is {list(target.shape)}")
        done, waited_for = self._event(), None if after is None else after.handle
        error = self._library.lema_copier_copy(
            self._copier, target.data_ptr(), source.data_ptr(), nbytes, waited_for, done.handle
        )
        raise_for_cuda(error, "queueing a copy")
        return done

    def record(self) -> _Event:
        event = self._event()
        error = self._library.lema_copier_record(self._copier, event.handle, self._compute_stream())
        raise_for_cuda(error, "recording an event")
        return event

    def compute_wait(self, event: _Event) -> None:
        error = self._library.lema_copier_stream_wait(self._copier, self._compute_stream(), event.handle)
        raise_for_cuda(error, "waiting for a copy")

    def host_wait(self, event: _Event) -> None:
        raise_for_cuda(self._library.lema_copier_wait(self._copier, event.handle), "a copy")

    def is_over(self, event: _Event) -> bool:
        """Whether what ``event`` stands for is over, without waiting."""
        error = self._library.lema_copier_query(self._copier, event.handle)
        if error != _NOT_READY:
            raise_for_cuda(error, "a copy")
        return error == 0

    def close(self) -> None:
        if not self._copier:
            return
        copier, self._copier = self._copier, ctypes.c_void_p()
        # Nothing is unlocked while a copy may still read it.
        errors = [self._library.lema_copier_drain(copier)]
        errors += [self._library.lema_copier_free_event(copier, event) for event in self._events]
        while self._registered:
            errors.append(self._library.lema_copier_unregister(copier, self._registered.pop().data_ptr()))
        errors.append(self._library.lema_copier_close(copier))
        raise_for_cuda(next(filter(None, errors), 0), "closing CUDA")

    def _event(self) -> _Event:
        with suppress(IndexError):  # another thread may take the last one
            return _Event(self._free.pop(), self._free)
        handle = ctypes.c_void_p()
        raise_for_cuda(self._library.lema_copier_new_event(self._copier, ctypes.byref(handle)), "making an event")
        self._events.append(handle.value)
        return _Event(handle.value, self._free)
