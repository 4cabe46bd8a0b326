"""Whether a library can be used, and what to do when it cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata

#: loggers that, while torchao is imported, speak of GPU libraries which nobody asked for
_TALKATIVE = ("torchao", "torch.utils._pytree")


def unavailable(package: str, load: Callable[[], object]) -> str | None:
    """Why ``load``, which imports what is needed of a package, fails; None when it does not."""
    try:
        with quietly():
            load()
    except ImportError as error:
        return f"{_one_line(error)} (pip install {package})"
    except Exception as error:  # a library that is there and broken may raise anything while it is imported
        return f"it cannot be imported: {type(error).__name__}: {_one_line(error)}"
    return None


def version_of(package: str) -> str:
    """What changes when the library's bytes might."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


@contextmanager
def quietly() -> Iterator[None]:
    """Warnings that come with an import, not with its failure, are not shown."""
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in _TALKATIVE]
    for logger, _ in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
