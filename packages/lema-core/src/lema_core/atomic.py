"""Folders and files that appear under their name only when they are complete and on the disk.

A folder is written as ``.<name>.tmp-<pid>`` beside its place, synced, and renamed. One that is there already is
renamed aside to ``.<name>.old-<pid>`` first, and back if anything fails; one to be deleted becomes
``.<name>.del-<pid>``. What a killed process leaves is recognised by its pid and put right by
:func:`clean_leftovers`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lema_core.errors import CheckpointError
from lema_core.files import replacing

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old|del)-(?P<pid>\d{1,9})")
_PARTIAL = re.compile(r".+\.(?P<pid>\d{1,9})\.partial")


class NoRoomError(CheckpointError):
    """The disk has, or leaves, too little room."""


@contextmanager
def atomic_folder(final: Path, needed_bytes: int) -> Iterator[Path]:
    """Yields an empty folder to write into; on leaving, it becomes ``final``, replacing what was there as a whole.

    Whatever is raised inside, ``final`` stays as it was and nothing else is left. ``needed_bytes`` is what will be
    written: with less free, nothing is begun. Raises CheckpointError with path, needed and free bytes when the disk
    is or becomes full, and when ``final`` holds files that the new folder does not, since they would be lost.
    """
    final = Path(os.path.abspath(final))
    temporary = _beside(final, "tmp")
    with room_for(final, needed_bytes):
        temporary.mkdir()
        try:
            yield temporary
            put_in_place(temporary, final)
        except BaseException:
            # the first error counts; what cannot be deleted now is found as a leftover later
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextmanager
def room_for(final: Path, needed_bytes: int) -> Iterator[None]:
    """For writing ``final`` inside: its parent is made, what a killed process left of it is put right, and there is
    room. Raises CheckpointError with path, needed and free bytes when the disk is or becomes full."""
    with _explained(final, needed_bytes):
        final.parent.mkdir(parents=True, exist_ok=True)
        clean_leftovers(final.parent, final.name)
        check_free_space(final, needed_bytes)
        yield


def check_replaceable(final: Path, names: Set[str]) -> None:
    """Raises CheckpointError when a folder of ``names`` cannot take the place of ``final``: it is a file, or holds
    others, which would be lost."""
    if not final.exists():
        return
    if not final.is_dir():
        raise CheckpointError(f"{final}: a folder expected, a file found: move it away")
    foreign = {path.name for path in final.iterdir()} - names
    if foreign:
        raise CheckpointError(
            f"{final}: holds files that are not part of this save and would be lost: {', '.join(sorted(foreign)[:4])}: "
            "move them away"
        )


def check_target(output_dir: Path, names: Set[str], sources: Iterable[Path]) -> Path:
    """The folder that ``output_dir`` is, links followed, when a folder of ``names`` may be written there.

    Raises CheckpointError when it is a folder of ``sources`` or holds one, holds a file of theirs under whatever name,
    or files that are not of ``names``.
    """
    final = Path(os.path.realpath(output_dir))
    read: dict[tuple[int, int], Path] = {}
    for source in sources:
        if final == source.resolve() or final in source.resolve().parents:
            raise CheckpointError(
                f"output_dir: {output_dir} is or holds {source}, which is read: give a folder of its own"
            )
        read |= {identity_of(path): path for path in source.iterdir() if path.is_file()}
    for path in final.rglob("*") if final.is_dir() else ():
        if path.is_file() and identity_of(path) in read:
            raise CheckpointError(
                f"output_dir: {path} is {read[identity_of(path)]} by another name: give a folder of its own"
            )
    check_replaceable(final, names)
    return final


def identity_of(path: Path) -> tuple[int, int]:
    """What two names of one file have in common."""
    status = path.stat()
    return status.st_dev, status.st_ino


def put_in_place(folder: Path, final: Path) -> None:
    """``folder``, complete and beside its place, becomes ``final``, replacing what was there as a whole; synced.

    Raises CheckpointError when ``final`` holds files that ``folder`` does not, OSError when the disk refuses.
    """
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)
    if not final.exists():
        os.rename(folder, final)
        _sync(final.parent)
        return
    check_replaceable(final, {path.name for path in folder.iterdir()})
    aside = _beside(final, "old")
    os.rename(final, aside)
    try:
        os.rename(folder, final)
    except OSError:
        os.rename(aside, final)
        raise
    _sync(final.parent)
    shutil.rmtree(aside)


def remove_folder(folder: Path) -> None:
    """Delete ``folder`` so that no half-deleted one is ever seen under its name."""
    doomed = _beside(folder, "del")
    os.rename(folder, doomed)
    _sync(folder.parent)
    shutil.rmtree(doomed)


def clean_leftovers(parent: Path, name: str | None = None) -> list[str]:
    """Put right what killed processes left in ``parent`` of the folder ``name`` (None: of any ``checkpoint-<step>``),
    and of files that were being written there.

    Call it before this process writes there. Returns a line per leftover for the log; those of living processes stay.
    """
    messages: list[str] = []
    if not parent.is_dir():
        return messages
    for path in sorted(parent.iterdir()):
        partial = _PARTIAL.fullmatch(path.name)
        if partial is not None and path.is_file() and not _is_running(int(partial["pid"])):
            path.unlink()
            messages.append(f"{path}: removed, left by an interrupted run")
            continue
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or not (match["name"] == name if name else re.fullmatch(r"checkpoint-\d+", match["name"])):
            continue
        if _is_running(int(match["pid"])):
            messages.append(f"{path}: left alone, process {match['pid']} is running")
        elif match["kind"] == "old" and not (parent / match["name"]).exists():
            os.rename(path, parent / match["name"])
            messages.append(f"{parent / match['name']}: put back, its replacement was interrupted")
        else:
            shutil.rmtree(path)
            messages.append(f"{path}: removed, left by an interrupted run")
    return messages


def check_free_space(path: Path, needed_bytes: int) -> None:
    """Raises NoRoomError with path, needed and free bytes if the disk ``path`` is or will be on has too little."""
    free_bytes = _free_bytes(path)
    if free_bytes < needed_bytes:
        raise NoRoomError(f"{path}: {needed_bytes} bytes needed, {free_bytes} bytes free on its disk: make room")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` so that ``path`` is never seen in part; synced. Raises CheckpointError when the disk refuses."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        with replacing(path) as partial, open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _explained(final: Path, needed_bytes: int) -> Iterator[None]:
    """Turns what the disk refuses, straight or from a writer below, into one line with path, needed and free bytes."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        if cause.errno not in _FULL:
            raise CheckpointError(f"{final}: cannot be written: {cause.strerror or cause}") from error
        raise NoRoomError(
            f"{final}: cannot be written: {cause.strerror}: {needed_bytes} bytes needed, {_free_bytes(final)} bytes "
            "free on its disk: make room, or raise the limit on file sizes"
        ) from error


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}-{os.getpid()}")


def _is_running(pid: int) -> bool:
    if pid == os.getpid():
        # a container restarts with the same pids; this process has written nothing yet
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _free_bytes(path: Path) -> int:
    existing = path
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems keep folders' entries by themselves and refuse to sync them
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
