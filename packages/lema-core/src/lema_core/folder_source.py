"""The checkpoint source of local folders. What looks like a path is a path: no network name is tried for it."""

from __future__ import annotations

import os
from pathlib import Path

from lema_core.records import CheckpointSource


def looks_like_path(ref: str) -> bool:
    """True for what exists here and for what can only be a path: ``./x ../x ~/x /x a/b/c x.safetensors x.gguf``.

    What follows an ``@`` is a revision of a name, which may have slashes: ``org/name@refs/pr/1``.
    """
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    return (
        ref.startswith((".", "~", *separators))
        or sum(ref.partition("@")[0].count(separator) for separator in separators) >= 2
        or ref.endswith((".safetensors", ".gguf"))
        or (bool(ref) and Path(ref).exists())
    )


def _refuses(ref: str) -> str | None:
    if ref.endswith(".gguf"):
        return "a GGUF file, not a folder of safetensors"
    if looks_like_path(ref):
        return None
    return "no such local folder"


def _locate(ref: str) -> Path:
    """The folder ``ref``, when it holds a config and weights. Raises CheckpointError naming what is missing."""
    # Imported here: reading checkpoints needs torch, which --help and a mistyped option do not wait for.
    from lema_core.checkpoint.manifest import check_folder, read_hf_config, weight_files

    folder = Path(ref).expanduser()
    check_folder(folder)
    read_hf_config(folder)
    weight_files(folder)
    return folder


FOLDER_SOURCE = CheckpointSource(name="folder", refuses=_refuses, locate=_locate, priority=100)
