"""The checkpoint source of Hub names: ``org/name``, ``org/name@revision``, or a bare ``name``.

A model lies in Hugging Face's own cache, where other programs find it and theirs is found here; ``HF_HOME``,
``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` mean what they mean everywhere. What is complete there is taken as
it is, without asking the network: a run that is resumed next month has the weights it began with. Which small files the
repository does not have is noted as Hugging Face's tools note it (``.no_exist``), so that nobody asks for them again.

Files are fetched by plain HTTP into the cache's blobs: what an interrupted download has received stays, and the next
one goes on behind it. ``huggingface_hub`` is imported when a name is located, never before.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import Queue
from typing import Any, BinaryIO

from lema.display import byte_progress
from lema_core.atomic import check_free_space
from lema_core.errors import CheckpointError
from lema_core.files import replacing
from lema_core.folder_source import looks_like_path
from lema_core.records import CheckpointSource

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: taken where the repository has them: how the model generates, its tokenizer, its chat template
BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".h5", ".msgpack", ".pt", ".pth", ".ckpt", ".gguf", ".onnx")
_NAME = re.compile(
    r"(?P<repo>(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[A-Za-z0-9_](?:[\w./+-]*[\w+-])?))?"
)
#: connections at a time
_WORKERS = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubModel:
    """A repository at a revision, and where the cache has it."""

    repo: str
    revision: str

    @classmethod
    def parse(cls, ref: str) -> HubModel | None:
        """``org/name@revision`` or None; the revision is a branch, a tag or a commit, ``main`` by default."""
        match = _NAME.fullmatch(ref)
        if match is None or looks_like_path(ref):
            return None
        repo = match["repo"]
        if len(repo) > 96 or any(wrong in repo for wrong in ("--", "..")) or repo.endswith((".", "-", ".git")):
            return None
        return cls(repo, match["revision"] or "main")

    @cached_property
    def storage(self) -> Path:
        """The repository's folder in the cache: ``blobs/ snapshots/ refs/``."""
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(HF_HUB_CACHE) / f"models--{self.repo.replace('/', '--')}"

    @property
    def url(self) -> str:
        from huggingface_hub.constants import ENDPOINT

        return f"{ENDPOINT}/{self.repo}"

    def snapshot(self, commit: str) -> Path:
        return self.storage / "snapshots" / commit

    def cached_commit(self) -> str | None:
        """The commit that the revision was when it was last asked for."""
        ref = self.storage / "refs" / self.revision
        if ref.is_file():
            return ref.read_text(encoding="utf-8").strip()
        return self.revision if self.snapshot(self.revision).is_dir() else None

    def missing(self, commit: str) -> tuple[list[str], list[str]]:
        """What the snapshot lacks: files that a model needs, and files that the repository may have beside them."""
        folder, noted = self.snapshot(commit), self.storage / ".no_exist" / commit
        needed = [CONFIG, *_shards_needed(folder)]
        return (
            [name for name in needed if not (folder / name).is_file()],
            [name for name in BESIDE if not (folder / name).is_file() and not (noted / name).exists()],
        )

    def note(self, commit: str, names: Iterable[str]) -> None:
        """Write down which commit the revision is, and which of :data:`BESIDE` the repository does not have."""
        noted = self.storage / ".no_exist" / commit
        noted.mkdir(parents=True, exist_ok=True)
        for name in names:
            (noted / name).touch()
        if commit != self.revision:
            ref = self.storage / "refs" / self.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            with replacing(ref) as partial:
                partial.write_text(commit, encoding="utf-8")


def _shards_needed(folder: Path) -> list[str]:
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
        return _shards(folder / INDEX)
    return [WEIGHTS]


def _shards(index: Path) -> list[str]:
    """The files that an index names. Raises CheckpointError when it is not one."""
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: has no weight_map of file names; delete it and run again") from error
    if odd := [name for name in files if Path(name).name != name or "\\" in name]:
        raise CheckpointError(f"{index}: names {odd[0]!r}; file names in the same folder expected")
    return files


def _refuses(ref: str) -> str | None:
    return None if HubModel.parse(ref) else "not a name on the Hub (org/name, or org/name@revision)"


def _locate(ref: str) -> Path:
    """The snapshot of ``ref``, downloaded where the cache lacks it. Raises CheckpointError saying what to do."""
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    model = HubModel.parse(ref)
    assert model is not None
    commit = model.cached_commit()
    lacks, unsure = model.missing(commit) if commit else ([], [])
    usable = commit is not None and not lacks
    if usable and (HF_HUB_OFFLINE or not unsure):
        return model.snapshot(commit)
    if HF_HUB_OFFLINE:
        held = f"an unfinished copy of {ref!r}, without {', '.join(lacks[:3])}" if lacks else f"no copy of {ref!r}"
        raise CheckpointError(
            f"{ref}: no such folder here, and HF_HUB_OFFLINE is set while the cache {HF_HUB_CACHE} holds {held}; run "
            "once with HF_HUB_OFFLINE=0, or give the folder of a model"
        )
    with _in_one_line(model, ref):
        try:
            return _download(model)
        except _unreachable() as error:
            if not usable:
                raise
            _log.warning("%s was asked in vain (%s); the cached copy is used", model.url, _first_line(error))
            return model.snapshot(commit)


# ------------------------------------------------------------------------------------------------------------ download


def _download(model: HubModel) -> Path:
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT

    info = HfApi().model_info(model.repo, revision=model.revision, timeout=HF_HUB_DOWNLOAD_TIMEOUT, files_metadata=True)
    commit = str(info.sha)
    # Bytes of every file of the repository, None where the Hub does not say.
    sizes: dict[str, int | None] = {each.rfilename: each.size for each in info.siblings or ()}
    if CONFIG not in sizes:
        lora = "; it holds LoRA weights: give its base model, and this as lora_path=FOLDER"
        raise CheckpointError(
            f"{model.url} has no {CONFIG} at {model.revision}, so it is no model in Hugging Face layout"
            + (lora if "adapter_config.json" in sizes else "")
        )
    model.note(commit, [name for name in BESIDE if name not in sizes])
    folder = model.snapshot(commit)
    small = [name for name in (CONFIG, *BESIDE) if name in sizes]
    if WEIGHTS in sizes:
        weights = [WEIGHTS]
    elif INDEX in sizes:
        # Which shards there are is only known when the index is here.
        _fetch_all(model, commit, {INDEX: sizes[INDEX]})
        weights = _shards(folder / INDEX)
        if absent := [name for name in weights if name not in sizes]:
            raise CheckpointError(f"{model.url}: {INDEX} names {absent[0]!r}, which is not there; try another revision")
    else:
        found = sorted(name for name in sizes if name.endswith(_WEIGHT_SUFFIXES))
        raise CheckpointError(
            f"{model.url} has no {WEIGHTS} at {model.revision}, only {', '.join(found[:3]) or 'no weights'}; other "
            "formats are not read: take a copy in safetensors (many repositories have one at revision @refs/pr/1), or "
            "convert it with transformers"
        )
    _fetch_all(model, commit, {name: sizes[name] for name in [*small, *weights]})
    return folder


def _fetch_all(model: HubModel, commit: str, sizes: Mapping[str, int | None]) -> None:
    """Bring the files that the snapshot lacks, several at a time. The first error, or Ctrl-C, ends all of them."""
    folder = model.snapshot(commit)
    wanted = [name for name in sizes if not (folder / name).is_file()]
    known = [sizes[name] for name in wanted]
    total_bytes = None if None in known else sum(size for size in known if size is not None)
    if not wanted:
        return
    check_free_space(model.storage, max(0, (total_bytes or 0) - _received_bytes(model)))
    stop = threading.Event()
    with byte_progress(f"downloading {model.repo}", total_bytes, sys.stderr) as advance:

        def received(n_bytes: int) -> None:
            if stop.is_set():
                raise _Stopped
            advance(n_bytes)

        names, results = iter(wanted), Queue[BaseException | None]()

        def work() -> None:
            for name in names:
                if stop.is_set():
                    return
                try:
                    _fetch(model, commit, name, received)
                except BaseException as error:
                    results.put(error)
                else:
                    results.put(None)

        # Daemons, and joined for a moment only: on a dead connection one of them may wait for minutes.
        threads = [threading.Thread(target=work, name="lema-hub", daemon=True) for _ in range(_WORKERS)]
        try:
            for thread in threads:
                thread.start()
            for _ in wanted:
                if (error := results.get()) is not None:
                    raise error
        finally:
            stop.set()
            for thread in threads:
                thread.join(1)


class _Stopped(Exception):
    """Ends a download beside which another one failed."""


def _received_bytes(model: HubModel) -> int:
    """What earlier downloads left unfinished, which is on the disk already."""
    return sum(path.stat().st_size for path in (model.storage / "blobs").glob("*.lema.incomplete"))


def _fetch(model: HubModel, commit: str, name: str, received: Callable[[int], None]) -> None:
    """Bring one file to its blob, behind what is there of it, and give it its name in the snapshot."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import WeakFileLock

    url = hf_hub_url(model.repo, name, revision=commit)
    metadata = get_hf_file_metadata(url)
    etag = str(metadata.etag)
    blob = model.storage / "blobs" / etag
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock = model.storage.parent / ".locks" / model.storage.name / f"{etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.exists():
            partial = blob.with_name(f"{etag}.lema.incomplete")
            with open(partial, "ab") as file:
                _receive(url, file, metadata.size, received)
                os.fsync(file.fileno())
            _check(partial, etag, url)
            os.replace(partial, blob)
    hf_hub_download(model.repo, name, revision=commit)  # the blob is there: this names it


def _receive(url: str, file: BinaryIO, size: int | None, received: Callable[[int], None]) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    have_bytes = file.tell()
    if size is not None and have_bytes > size:
        file.truncate(0)
        have_bytes = file.seek(0)
    http_get(
        url,
        file,
        resume_size=have_bytes,
        headers=build_hf_headers(),
        expected_size=size,
        tqdm_class=_counting(received, have_bytes),  # type: ignore[arg-type]
    )


def _counting(received: Callable[[int], None], have_bytes: int) -> Callable[..., Any]:
    """What ``http_get`` takes for a progress bar."""

    class Counting:
        def __init__(self, *_: object, **__: object) -> None:
            received(have_bytes)

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, n_bytes: float = 1) -> None:
            received(int(n_bytes))

    return Counting


def _check(partial: Path, etag: str, url: str) -> None:
    """Large files are named by their SHA-256. Raises CheckpointError, and removes the file, when it is another."""
    if not re.fullmatch("[0-9a-f]{64}", etag):
        return
    digest = hashlib.sha256()
    with open(partial, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    if digest.hexdigest() != etag:
        partial.unlink()
        raise CheckpointError(f"{url}: what arrived is not the file that was announced (SHA-256); run again")


# -------------------------------------------------------------------------------------------------------------- errors


def _unreachable() -> tuple[type[BaseException], ...]:
    """What is raised when no answer comes, as opposed to an answer that refuses."""
    from huggingface_hub.errors import HfHubHTTPError

    # The HTTP library is huggingface_hub's choice; its errors that are no answers share this base.
    transport = [base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"]
    return (*transport, ConnectionError, TimeoutError)


@contextmanager
def _in_one_line(model: HubModel, ref: str) -> Iterator[None]:
    """Turns what the Hub's client raises into a CheckpointError that says what to do."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        raise CheckpointError(_answer_in_words(error, model, ref)) from error
    except _unreachable() as error:
        raise CheckpointError(
            f"{ref}: no such folder here, and {model.url} cannot be reached ({_first_line(error)}); check the network "
            "and HF_ENDPOINT, and run again: what was received is kept"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{ref}: {model.url} does not answer as the Hub does ({_first_line(error)}); check HF_ENDPOINT"
        ) from error
    except OSError as error:
        if error.errno is None:  # the client's own: less arrived than was announced
            raise CheckpointError(f"{ref}: {_first_line(error)}; run again: what was received is kept") from error
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = "make room, or set HF_HOME to a larger disk, and run again" if full else "HF_HOME says where it goes"
        raise CheckpointError(
            f"{ref}: cannot be kept in {model.storage}: {error.strerror or _first_line(error)}; {way_out}"
        ) from error


def _answer_in_words(error: Any, model: HubModel, ref: str) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = error.response.status_code
    log_in = "hf auth login, or set HF_TOKEN"
    if isinstance(error, GatedRepoError):
        return f"{ref}: {model.url} is gated; accept its terms on that page, then log in: {log_in}"
    if isinstance(error, RevisionNotFoundError):
        return f"{ref}: {model.url} has no revision {model.revision!r}; its page lists branches and tags"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{ref}: no such folder here, and no model {model.repo!r} at {model.url.removesuffix('/' + model.repo)}; "
            f"check the name (a private model needs a login: {log_in})"
        )
    if status in (401, 403):
        return f"{ref}: {model.url} refuses the access token (HTTP {status}); log in again: {log_in}"
    return f"{ref}: {model.url} answers HTTP {status} ({_first_line(error)}); try again later"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


HUB_SOURCE = CheckpointSource(name="hub", refuses=_refuses, locate=_locate, priority=0)
