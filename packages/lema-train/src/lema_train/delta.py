"""``delta.safetensors``: what training added to a base model's weights.

Holds ``updated - original`` in fp32 for every tensor that trained, under its canonical name
(:meth:`lema_core.adapter.ModelAdapter.tensors`), as it lies in the base's files; tensors that are one (a tied head)
once, under the name of the one that others are tied to. Its ``__metadata__`` says what it may be added to:

====================== ==================================================================
``lema_delta_version`` 1
``lema_base``          JSON of :class:`lema_train.base_identity.BaseIdentity`
====================== ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from lema_core.adapter import ModelAdapter
from lema_core.checkpoint import Manifest, TensorInfo, TensorToWrite, read_elements, read_header, write_safetensors
from lema_core.checkpoint.describe import shorten
from lema_core.checkpoint.header import DTYPE_NAMES
from lema_core.errors import CheckpointError
from lema_core.suggest import did_you_mean
from lema_train.base_identity import BaseIdentity, difference
from lema_train.checkpoint import find_checkpoints
from lema_train.peft_format import CONFIG_FILE as LORA_FILE

DELTA_FILE = "delta.safetensors"
_VERSION = "1"
_VERSION_KEY, _BASE_KEY = "lema_delta_version", "lema_base"


@dataclass(frozen=True)
class Delta:
    """A delta's header: ``tensors`` by canonical name, none of them read."""

    path: Path
    identity: BaseIdentity
    tensors: Mapping[str, TensorInfo]

    def check_base(self, base: Manifest, say: Callable[[str], None] = lambda line: None) -> None:
        """Raises CheckpointError naming what differs unless ``base`` is what the delta was made from, bit for bit.

        A base is read whole for its hash once on a machine; ``say`` hears when that takes a while.
        """
        found = difference(self.identity, base, say)
        if found is not None:
            raise CheckpointError(
                f"{self.path}: made from {self.identity.name}, and {base.folder} is another base: {found}; give the "
                "base that it was made from, model_name_or_path"
            )

    def check_fits(self, adapter: ModelAdapter) -> None:
        """Raises CheckpointError naming tensors that the model does not have, or has in another shape."""
        specs = {spec.name: spec for spec in adapter.tensors()}
        unknown = [name for name in self.tensors if name not in specs]
        if unknown:
            raise CheckpointError(
                f"{self.path}: {len(unknown)} tensors that the base model does not have: {shorten(unknown)}"
                f"{did_you_mean(unknown[0], specs)}; give the base that it was made from: {self.identity.name}"
            )
        for name, info in self.tensors.items():
            expected = tuple(specs[name].shape)
            if info.shape != expected:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r}: shape {list(expected)} expected from the base model, "
                    f"{list(info.shape)} found; give the base that it was made from: {self.identity.name}"
                )

    def block(self, name: str, start: int, stop: int) -> Tensor | None:
        """Rows ``start:stop`` of what is added to ``name``, fp32 [stop - start, ...], counted along its first
        dimension (elements of a vector); None when nothing is.

        Raises CheckpointError when the file is cut, and naming the tensor when a number of it is not finite.
        """
        info = self.tensors.get(name)
        if info is None:
            return None
        row = prod(info.shape[1:])
        return self.elements(name, start * row, (stop - start) * row).view(stop - start, *info.shape[1:])

    def elements(self, name: str, start: int, count: int) -> Tensor:
        """``count`` numbers of what is added to ``name``, from ``start`` on, fp32 [count]. Raises as :meth:`block`."""
        values = read_elements(self.tensors[name], start, count)
        # in one pass: the least and the greatest of numbers with a NaN among them are NaN
        if count and not all(bool(each.isfinite()) for each in torch.aminmax(values)):
            raise CheckpointError(
                f"{self.path}: tensor {name!r} holds values that are infinite or NaN: the training that wrote it went "
                "wrong; go back to an earlier checkpoint"
            )
        return values

    def updated(self, name: str, original: TensorInfo, start: int, stop: int) -> Tensor:
        """Rows ``start:stop`` of ``original + delta``, summed in fp32; those of ``original`` when nothing is added.

        It is the trained weight again, bit for bit, but for numbers that moved by more than they now are, whose
        ``updated - original`` may have been rounded.
        """
        row = prod(original.shape[1:])
        stored = read_elements(original, start * row, (stop - start) * row).view(stop - start, *original.shape[1:])
        values = stored.to(torch.float32)
        added = self.block(name, start, stop)
        return values if added is None else values.add_(added)


def write_delta(path: Path, tensors: Iterable[TensorToWrite], base: BaseIdentity) -> None:
    """Write ``tensors``, fp32 by canonical name, to ``path``: one at a time, or blocks of one at a time.

    None at all is a delta too: nothing trained. Raises CheckpointError for another dtype, and when the disk refuses.
    """

    def checked() -> Iterator[TensorToWrite]:
        for name, dtype, shape, get in tensors:
            if dtype != torch.float32:
                raise CheckpointError(f"{path}: tensor {name!r}: F32 expected, {DTYPE_NAMES[dtype]} found")
            yield name, dtype, shape, get

    write_safetensors(path, checked(), {_VERSION_KEY: _VERSION, _BASE_KEY: base.to_json()})


def read_delta(path: Path) -> Delta:
    """The delta in file or folder ``path``; no tensor is read.

    Raises CheckpointError when there is none, naming what is there instead, or when it is damaged or of another format.
    """
    file = path / DELTA_FILE if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(_absent(path))
    header = read_header(file)
    version = header.metadata.get(_VERSION_KEY)
    if version is None:
        raise CheckpointError(
            f"{file}: not a delta of lema: its metadata has no {_VERSION_KEY}; give a checkpoint's {DELTA_FILE}"
        )
    if version != _VERSION:
        raise CheckpointError(
            f"{file}: {_VERSION_KEY} {_VERSION} expected, {version} found: use the version of lema that wrote it"
        )
    try:
        identity = BaseIdentity.from_json(header.metadata[_BASE_KEY])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: {_BASE_KEY} in its metadata does not describe a base model") from error
    for name, info in header.tensors.items():
        if info.dtype != torch.float32:
            raise CheckpointError(f"{file}: tensor {name!r}: F32 expected, {DTYPE_NAMES[info.dtype]} found")
    return Delta(file, identity, header.tensors)


def refuse_delta(folder: Path) -> None:
    """Raises CheckpointError where LoRA weights are expected and whole ones are there."""
    if (folder / DELTA_FILE).is_file() and not (folder / LORA_FILE).is_file():
        raise CheckpointError(f"{folder}: whole weights and no LoRA weights: give them as delta_path={folder}")


def _absent(path: Path) -> str:
    if not path.exists():
        return f"{path}: no such file or folder; give a checkpoint of a run, or its {DELTA_FILE}"
    if (path / LORA_FILE).is_file():
        return f"{path}: no {DELTA_FILE} here but LoRA weights; give them as lora_path={path}"
    checkpoints = [folder for _, folder in find_checkpoints(path) if (folder / DELTA_FILE).is_file()]
    if checkpoints:
        return f"{path}: no {DELTA_FILE} in this folder; give one of its checkpoints, such as {checkpoints[-1]}"
    return f"{path}: no {DELTA_FILE} in this folder; give a checkpoint of a run that trained whole weights"
