"""A GGUF file's key-value part and tensor list, with errors that name file and key.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader

from lema_core.errors import CheckpointError


class GGUFMetadata:
    """Typed access to the keys of one file. ``reader`` maps the file; tensor data is paged in when it is touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = GGUFReader(path)
        # a damaged file ends in whatever numpy raises where a count or an offset points nowhere
        except (OSError, ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{path}: not a readable GGUF file ({error}); download it again") from error
        self.architecture: str = self.need("general.architecture", str)
        if self.architecture != "llama":
            raise CheckpointError(f"{path}: GGUF architecture {self.architecture!r} is not supported; expected 'llama'")
        if self.get("split.count", int, 1) > 1:
            raise CheckpointError(
                f"{path}: one of several split GGUF files; join them with llama.cpp's llama-gguf-split --merge"
            )

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of ``key``, ``default`` when absent. Raises CheckpointError when it is not a ``kind``."""
        field = self.reader.fields.get(key)
        if field is None:
            return default
        value = field.contents()
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.path}: {key} is {type(value).__name__}, expected {kind.__name__}")
        return value

    def need(self, key: str, kind: type) -> Any:
        """The value of ``key``. Raises CheckpointError when absent."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: no {key} in its metadata; the file is not a complete model")
        return value
