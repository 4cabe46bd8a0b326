"""Which base model something was made from: its weight files by name, size and sha256.

Reading 13 GB for their hash at every save is out of the question, so a file's hash is kept in the cache, by absolute
path, size and times of change; a file that changes in any way has other times, and is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lema_core.cache import cache_folder
from lema_core.checkpoint import Manifest, read_hf_config
from lema_core.errors import CheckpointError
from lema_core.files import replacing, sha256_of_file

#: fields of config.json that decide which tensor of the files is which weight
_FIELDS = ("model_type", "tie_word_embeddings")
#: reading more than this is worth a word
_LARGE_BYTES = 1_000_000_000


@dataclass(frozen=True)
class FileIdentity:
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class BaseIdentity:
    """``name``: the base as its user named it. ``files``: its weight files by name. ``config``: those fields of its
    config.json that say which weight a tensor is, None where it has none."""

    name: str
    files: Mapping[str, FileIdentity]
    config: Mapping[str, Any]

    def to_json(self) -> str:
        files = {name: {"bytes": each.nbytes, "sha256": each.sha256} for name, each in self.files.items()}
        return json.dumps({"name": self.name, "files": files, "config": dict(self.config)})

    @classmethod
    def from_json(cls, text: str) -> BaseIdentity:
        """The inverse of :meth:`to_json`. Raises ValueError, KeyError, TypeError or AttributeError for anything
        else."""
        found = json.loads(text)
        files = {name: FileIdentity(int(each["bytes"]), str(each["sha256"])) for name, each in found["files"].items()}
        return cls(str(found["name"]), files, {field: found["config"][field] for field in _FIELDS})


def identify_base(base: Manifest, name: str, say: Callable[[str], None] = lambda line: None) -> BaseIdentity:
    """The base in ``base``'s folder, which its user called ``name``.

    Its files are read whole once on a machine, which ``say`` hears when it takes a while. Raises CheckpointError naming
    a file that cannot be read.
    """
    sizes = {path: _status(path).st_size for path in base.paths}
    files = {path.name: FileIdentity(nbytes, sha256_of(path, say)) for path, nbytes in sizes.items()}
    return BaseIdentity(name, files, _config_fields(base.folder))


def difference(expected: BaseIdentity, base: Manifest, say: Callable[[str], None] = lambda line: None) -> str | None:
    """What sets ``base`` apart from the base that is ``expected``, in a few words; None when it is the same.

    What costs nothing to compare is compared first. A single file may have another name. Raises CheckpointError naming
    a file that cannot be read.
    """
    paths = {path.name: path for path in base.paths}
    if len(paths) == len(expected.files) == 1:
        paths = dict(zip(expected.files, paths.values(), strict=True))
    if absent := sorted(expected.files.keys() - paths.keys()):
        return f"its weights are in {', '.join(sorted(paths)[:3])}, and not in {absent[0]}"
    if extra := sorted(paths.keys() - expected.files.keys()):
        return f"its weights are also in {extra[0]}, and all in {', '.join(sorted(expected.files)[:3])} expected"
    for name, value in _config_fields(base.folder).items():
        if value != expected.config[name]:
            return f"config.json: {name} {json.dumps(expected.config[name])} expected, {json.dumps(value)} found"
    for name, path in paths.items():
        nbytes = _status(path).st_size
        if nbytes != expected.files[name].nbytes:
            return f"{path.name}: {expected.files[name].nbytes} bytes expected, {nbytes} bytes found"
    for name, path in paths.items():
        sha256 = sha256_of(path, say)
        if sha256 != expected.files[name].sha256:
            return f"{path.name}: sha256 {expected.files[name].sha256[:16]}... expected, {sha256[:16]}... found"
    return None


def sha256_of(path: Path, say: Callable[[str], None] = lambda line: None) -> str:
    """The file's hash, read only when it is not known yet. Raises CheckpointError when it cannot be read."""
    status = _status(path)
    if status.st_size > _LARGE_BYTES and not _is_known(path, status):
        say(f"reading {path} once for its sha256: {status.st_size / 1e9:.1f} GB")
    return _sha256_once(os.path.realpath(path), *_times(status))


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _times(status: os.stat_result) -> tuple[int, int, int]:
    # the time of the last change of any kind too: the other can be set back
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _config_fields(folder: Path) -> dict[str, Any]:
    config = read_hf_config(folder)
    return {name: config.get(name) for name in _FIELDS}


def _kept_at(path: str) -> Path:
    return cache_folder("sha256") / f"{hashlib.blake2b(path.encode(), digest_size=8).hexdigest()}.json"


def _is_known(path: Path, status: os.stat_result) -> bool:
    return _kept(os.path.realpath(path), *_times(status)) is not None


def _kept(path: str, nbytes: int, mtime_ns: int, ctime_ns: int) -> str | None:
    try:
        found = json.loads(_kept_at(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # as good as absent: the hash is taken again
    same = isinstance(found, dict) and found.get("of") == [path, nbytes, mtime_ns, ctime_ns]
    return str(found["sha256"]) if same else None


@lru_cache(maxsize=1000)
def _sha256_once(path: str, nbytes: int, mtime_ns: int, ctime_ns: int) -> str:
    """Kept in this process too, as not every machine has a cache that can be written."""
    kept = _kept(path, nbytes, mtime_ns, ctime_ns)
    if kept is not None:
        return kept
    sha256 = sha256_of_file(Path(path))
    target = _kept_at(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial:
            text = json.dumps({"of": [path, nbytes, mtime_ns, ctime_ns], "sha256": sha256})
            partial.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        warnings.warn(
            f"{target}: the hash of {path} is not kept: {error.strerror or error}; LEMA_CACHE says where it goes",
            stacklevel=2,
        )
    return sha256
