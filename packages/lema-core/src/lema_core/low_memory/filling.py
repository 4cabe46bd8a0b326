"""Gives parameters and buffers their values, each once, from a file or from tensors in memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from copy import deepcopy
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree

from lema_core.errors import CheckpointError
from lema_core.low_memory.files import CheckpointFile
from lema_core.low_memory.placing import Before, Target
from lema_core.low_memory.reading import SegmentReader
from lema_core.low_memory.tensors import alike, empty_like, is_extra_state, storage_id

#: whose dtypes the loaded module has
DTypePolicy: TypeAlias = Literal["module", "checkpoint"]


class Filler:
    """Fills targets from an opened checkpoint; a state dict in memory is one without segments."""

    def __init__(self, opened: CheckpointFile, reader: SegmentReader, dtype: DTypePolicy) -> None:
        self._opened = opened
        self._reader = reader
        self._dtype = dtype
        #: storages that several of the module's tensors share on the meta device -> what they will share
        self._shared: dict[int, torch.UntypedStorage | None] = {}
        #: storages of the state dict's that the module has taken over
        self._taken: set[int] = set()

    def entries_for_torch(self) -> OrderedDict[str, Any]:
        """A copy of the state dict that a load may change. Extra state, which modules look into, has its data."""

        def for_torch(name: str, value: Any) -> Any:
            if is_extra_state(name):
                return _pytree.tree_map_only(Tensor, self._read, value)
            return value.detach() if isinstance(value, Tensor) else value

        entries = OrderedDict((name, for_torch(name, value)) for name, value in self._opened.entries.items())
        if (metadata := getattr(self._opened.entries, "_metadata", None)) is not None:
            entries._metadata = deepcopy(metadata)  # type: ignore[attr-defined]
        return entries

    def check(self, targets: list[Target], strict: bool) -> None:
        """Raise CheckpointError for what PyTorch has no reason to refuse and no data can be had for."""
        on_meta = [(target, target.before) for target in targets if target.before is not None and target.before.is_meta]
        for target, _ in on_meta:
            if target.value is None and strict and not target.persistent:
                raise self._error(
                    target,
                    "a non-persistent buffer on the meta device, whose values no checkpoint has; build "
                    "the module with lema's empty_model(), or compute it before loading (strict=False leaves it there)",
                )
        for target in targets:
            if target.value is not None:
                self._check_value(target, target.value)
        loaded = [(target, before) for target, before in on_meta if target.value is not None]
        count = Counter(storage_id(before) for _, before in loaded)
        self._shared = {storage: None for storage, tensors in count.items() if tensors > 1}
        for target, before in loaded:
            if storage_id(before) in self._shared and self._dtype_of(target) != before.dtype:
                raise self._error(
                    target,
                    f"shares memory with another tensor as {before.dtype}, {self._dtype_of(target)} "
                    "found; use dtype='module'",
                )

    def _check_value(self, target: Target, value: Tensor) -> None:
        if value.is_meta and value.numel() and storage_id(value) not in self._opened.segments:
            raise self._error(
                target,
                "without data: the state dict holds it on the meta device, or a hook of the module "
                "computes it from the state dict's; give it data, or use the module's own load_state_dict",
            )
        dtype = self._dtype_of(target)
        trained = target.before is not None and target.before.requires_grad
        if trained and not (dtype.is_floating_point or dtype.is_complex):
            raise self._error(target, f"requires grad, {dtype} found; use dtype='module', or requires_grad_(False)")

    @torch.no_grad()
    def fill(self, targets: list[Target], before: Before) -> None:
        """Make what is on meta, then copy into the rest; what was made gets its places last, when all is well."""
        made: list[tuple[Target, Tensor]] = []
        kept: list[tuple[Target, Tensor]] = []
        for target in targets:
            if target.value is None:
                continue
            if target.before is None or target.before.is_meta:
                made.append((target, self._make(target, target.value)))
            else:
                kept.append((target, target.before))
        while kept:
            target, old = kept.pop(0)
            assert target.value is not None
            if self._dtype_of(target) == old.dtype:
                self._put(target.value, old.detach())
                if not old.is_inference():
                    torch.autograd.graph.increment_version(old)  # what autograd saved of it is out of date
            else:
                new = torch.empty_like(old, dtype=target.value.dtype)
                self._put(target.value, new)
                before.put(target, alike(old, new), forget=True)
        for target, tensor in made:
            before.put(target, tensor)

    def _make(self, target: Target, value: Tensor) -> Tensor:
        """The tensor that takes the place of one on meta, or of none."""
        old, dtype = target.before, self._dtype_of(target)
        if old is not None and storage_id(old) in self._shared:
            data = self._put(value, self._shared_memory(old))
        elif value.is_meta:
            like = value if old is None else old
            data = self._put(value, empty_like(like, dtype))
        elif value.dtype != dtype:
            data = value.to(dtype)
        elif value.layout != torch.strided:
            data = value
        elif value.is_contiguous() and storage_id(value) not in self._taken:
            self._taken.add(storage_id(value))
            data = value
        else:
            data = value.clone()  # two that are not tied in the module may be one in the state dict
        return data if old is None else alike(old, data)

    def _shared_memory(self, old: Tensor) -> Tensor:
        key = storage_id(old)
        storage = self._shared[key]
        if storage is None:
            storage = self._shared[key] = torch.UntypedStorage(old.untyped_storage().nbytes(), device="cpu")
        empty = torch.empty(0, dtype=old.dtype, device="cpu")
        return empty.set_(storage, old.storage_offset(), old.shape, old.stride())

    def _read(self, value: Tensor) -> Tensor:
        """``value`` with its data."""
        return self._put(value, empty_like(value, value.dtype)) if value.is_meta else value

    def _put(self, value: Tensor, target: Tensor) -> Tensor:
        if value.is_meta and value.numel():
            name, segment = self._opened.segments[storage_id(value)]
            self._reader.fill(target, name, segment, value)
        elif value.numel():
            target.copy_(value)
        return target

    def _error(self, target: Target, text: str) -> CheckpointError:
        path = self._opened.path
        return CheckpointError(f"{target.name}: {text}" if path is None else f"{path}: tensor {target.name!r}: {text}")

    def _dtype_of(self, target: Target) -> torch.dtype:
        assert target.value is not None
        if target.before is None or self._dtype == "checkpoint":
            return target.value.dtype
        return target.before.dtype
