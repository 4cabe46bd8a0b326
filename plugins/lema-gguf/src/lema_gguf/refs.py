"""The names of a GGUF file: ``path/to/model.gguf``, ``package:NAME``, ``package:NAME/FILE.gguf``.

A package is found, never imported: what a package with a GGUF file imports can be heavy, absent or broken.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from lema_core.errors import CheckpointError

PACKAGE_PREFIX = "package:"


def refuses(ref: str) -> str | None:
    """Why ``ref`` is none of the above, None when it is. Whether the file exists is :func:`find_gguf`'s to say."""
    if ref.startswith(PACKAGE_PREFIX) or ref.endswith(".gguf"):
        return None
    return "neither a .gguf file nor package:NAME"


def find_gguf(ref: str) -> Path:
    """The file that ``ref`` names. Raises CheckpointError saying what is missing, or what there is to choose from."""
    if ref.startswith(PACKAGE_PREFIX):
        return _find_in_package(ref)
    path = Path(ref).expanduser()
    if not path.is_file():
        raise CheckpointError(f"{path}: {'not a file' if path.exists() else 'no such file'}; a GGUF file expected")
    return path


def _find_in_package(ref: str) -> Path:
    package, _, file = ref[len(PACKAGE_PREFIX) :].partition("/")
    if not package.isidentifier():  # also keeps find_spec from importing the parent of a dotted name
        raise CheckpointError(
            f"{ref}: {package!r} is not a package name; expected package:NAME or package:NAME/FILE.gguf"
        )
    spec = find_spec(package)
    if spec is None:
        raise CheckpointError(
            f"{ref}: no package {package!r} is installed here; install it (with --no-deps: only its file is needed)"
        )
    files = sorted(path for folder in spec.submodule_search_locations or () for path in Path(folder).rglob("*.gguf"))
    names = ", ".join(path.name for path in files)
    if file:
        chosen = [path for path in files if path.name == file]
        if len(chosen) != 1:
            raise CheckpointError(f"{ref}: package {package!r} has no {file!r}; it has {names or 'no .gguf file'}")
        return chosen[0]
    if len(files) != 1:
        raise CheckpointError(
            f"{ref}: one .gguf file expected in package {package!r}, found {names or 'none'}"
            + (f"; name one as {PACKAGE_PREFIX}{package}/{files[0].name}" if files else "")
        )
    return files[0]
