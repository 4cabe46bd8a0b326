"""One run at a time in a folder: a lock that ends with its process, however that ends.

``.lema-run`` says to who comes second which process it is, and is what is locked (flock). A killed process leaves the
file, without a lock: the next run takes it over.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lema_core.errors import CheckpointError, ConfigError
from lema_core.locks import is_open_at, lock_file

LOCK_FILE = ".lema-run"


@contextmanager
def claimed(folder: Path, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Inside, ``folder`` is there and no other run's; one that was made for it and stays empty goes again.

    Raises ConfigError naming the process that has it, CheckpointError where the folder cannot be made or written to.
    ``say`` hears of a file system that keeps no locks.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"output_dir: {folder}: cannot be made: {error.strerror or error}") from error
    descriptor = _lock(folder, say)
    try:
        yield
    finally:
        (folder / LOCK_FILE).unlink(missing_ok=True)
        os.close(descriptor)
        if made:
            # unless there is something in it
            with suppress(OSError):
                folder.rmdir()


def _lock(folder: Path, say: Callable[[str], None]) -> int:
    path = folder / LOCK_FILE
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(f"output_dir: {folder}: cannot be written to: {error.strerror or error}") from error
        try:
            locked = lock_file(path, descriptor)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ConfigError(
                f"output_dir: {folder} is in use by another run, {holder}: wait until it is over, stop it, or give "
                "another output_dir"
            ) from None
        except CheckpointError:
            os.close(descriptor)
            raise
        if not locked:
            say(f"{folder}: its file system keeps no locks: see to it that no other run writes there")
        if is_open_at(path, descriptor):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return descriptor
        # The run that had it ended in between, and took the file away.
        os.close(descriptor)
