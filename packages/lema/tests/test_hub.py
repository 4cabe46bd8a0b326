"""Models by their name on the Hub: the real client against a small server here, each case in its own process."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from lema.hub import BESIDE, HUB_SOURCE
from lema_core.folder_source import FOLDER_SOURCE
from lema_core.memory import format_bytes
from lema_train.peft_format import base_model

COMMITS = {"main": "a" * 40, "old": "b" * 40, "refs/pr/1": "c" * 40}
INDEX = "model.safetensors.index.json"


class Hub:
    """What huggingface.co answers, as far as its client asks: a listing per revision; HEAD and GET of files."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        #: repository -> (status, X-Error-Code) of its files
        self.refuses: dict[str, tuple[int, str]] = {}
        #: file -> bytes after which the connection breaks, once
        self.cuts: dict[str, int] = {}
        #: file -> bytes after which nothing comes any more
        self.stalls: dict[str, int] = {}
        self.stalled, self.closed = threading.Event(), threading.Event()
        #: files that are not served once their connection was cut
        self.gone_after_cut: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), name="hub", daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()

    def add(self, repo: str, files: dict[str, bytes], revision: str = "main") -> None:
        self.repos.setdefault(repo, {})[revision] = files

    def gets(self) -> list[str]:
        """The files whose content was asked for."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(to.path).path)
        self.requests.append((to.command, path, to.headers.get("Range")))
        api = path.startswith("/api/models/")
        repo, _, rest = (
            path.removeprefix("/api/models" if api else "").strip("/").partition("/revision/" if api else "/resolve/")
        )
        if repo not in self.repos:
            return _send(to, 404, {"X-Error-Code": "RepoNotFound"})
        revision, name = (rest, "") if api else rest.rsplit("/", 1)
        by_commit = {COMMITS[each]: each for each in self.repos[repo]}
        files = self.repos[repo].get(by_commit.get(revision, revision))
        if files is None:
            return _send(to, 404, {"X-Error-Code": "RevisionNotFound"})
        if api:
            siblings = [{"rfilename": each, "size": len(content)} for each, content in files.items()]
            body = {"id": repo, "sha": COMMITS[by_commit.get(revision, revision)], "siblings": siblings}
            return _send(to, 200, {"Content-Type": "application/json"}, json.dumps(body).encode())
        if repo in self.refuses:
            status, code = self.refuses[repo]
            return _send(to, status, {"X-Error-Code": code} if code else {})
        if name not in files:
            return _send(to, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": revision})
        return self._send_file(to, name, revision, files[name])

    def _send_file(self, to: BaseHTTPRequestHandler, name: str, commit: str, content: bytes) -> None:
        if name in self.gone_after_cut and name not in self.cuts:
            return _send(to, 503, {})
        large = name.endswith(".safetensors")
        digest = (hashlib.sha256 if large else hashlib.sha1)(content).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status, start = 200, 0
        if asked := to.headers.get("Range"):
            status, start = 206, int(asked.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if to.command == "GET" and name in self.stalls:
            _send(to, status, headers, content[start:], self.stalls[name])
            to.wfile.flush()
            self.stalled.set()
            self.closed.wait()
            return None
        cut = self.cuts.pop(name, None) if to.command == "GET" else None
        return _send(to, status, headers, content[start:], cut)


def _send(
    to: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes = b"", cut: int | None = None
) -> None:
    to.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        to.send_header(name, value)
    to.end_headers()
    if to.command != "HEAD":
        to.wfile.write(body if cut is None else body[:cut])
    to.close_connection = cut is not None


#: the client hands on what it receives in pieces of this many bytes, 10 MB by itself
SMALL_PIECES = "import huggingface_hub.constants as constants; constants.DOWNLOAD_CHUNK_SIZE = 1000"


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.close()


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[str, bytes]:
    """What a repository holds: a model, and what nobody needs to fine-tune it."""
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    return {
        **files,
        "pytorch_model.bin": b"pickle",
        "tf_model.h5": b"h5",
        "README.md": b"# tiny",
        ".gitattributes": b"",
    }


@pytest.fixture
def sharded_files(tmp_path: Path, make_model: Any, make_tokenizer: Any) -> dict[str, bytes]:
    folder = make_tokenizer(make_model(tmp_path / "sharded", shards=3))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {**files, "consolidated.safetensors": b"another copy of the weights"}


class Located:
    """``locate_checkpoint(ref)`` in a process of its own, which has the environment given."""

    def __init__(self, lema: Any, hub: Hub) -> None:
        self.lema, self.hub = lema, hub
        self.home = lema.cwd / "hf"

    def environment(self, **env: str) -> str:
        wanted = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.hub.url, "HF_HUB_OFFLINE": "0", **env}
        return (
            "import os, sys\nassert 'huggingface_hub' not in sys.modules\n"
            f"os.environ.pop('HF_HUB_CACHE', None); os.environ.update({wanted!r})"
        )

    def __call__(self, ref: str, before: str = "", **env: str) -> Path:
        found, said = self._ask(ref, before, env)
        assert found == "folder", said
        return Path(said)

    def error(self, ref: str, before: str = "", **env: str) -> str:
        found, said = self._ask(ref, before, env)
        assert found == "error", said
        assert "\n" not in said and self.lema_error_is_clean
        return said

    def _ask(self, ref: str, before: str, env: dict[str, str]) -> tuple[str, str]:
        answer = self.lema.cwd / "answer.json"
        answer.unlink(missing_ok=True)
        code = f"""
{self.environment(**env)}
import json
from lema_core.errors import CheckpointError
from lema_core.plugins import get_plugin_manager
{before}
try:
    answer = "folder", str(get_plugin_manager().locate_checkpoint({ref!r}))
except CheckpointError as error:
    answer = "error", str(error)
open({str(answer)!r}, "w").write(json.dumps(answer))
sys.exit()
"""
        child = self.lema.run(before=code)
        assert answer.exists(), child.err
        self.lema_error_is_clean = "Traceback" not in child.err
        self.err = child.err
        return tuple(json.loads(answer.read_text()))


@pytest.fixture
def locate(lema: Any, hub: Hub) -> Located:
    return Located(lema, hub)


# ----------------------------------------------------------------------------------------------------------- what works


def test_only_what_a_model_needs_is_fetched_and_the_second_time_nobody_is_asked(
    locate: Located, hub: Hub, model_files: dict[str, bytes]
) -> None:
    hub.add("org/tiny", model_files)
    folder = locate("org/tiny")
    needed = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == needed
    assert all((folder / name).read_bytes() == model_files[name] for name in needed)
    assert folder == locate.home / "hub/models--org--tiny/snapshots" / COMMITS["main"]
    size = format_bytes(sum(len(model_files[name]) for name in needed))
    assert locate.err.splitlines() == [f"lema: downloading org/tiny, {size}"]
    asked = len(hub.requests)
    assert locate("org/tiny") == folder and locate("org/tiny", HF_HUB_OFFLINE="1") == folder
    assert len(hub.requests) == asked


def test_huggingface_hub_itself_finds_what_lema_fetched(
    locate: Located, hub: Hub, model_files: dict[str, bytes]
) -> None:
    hub.add("org/tiny", model_files)
    folder = locate("org/tiny")
    code = (
        "from huggingface_hub import hf_hub_download, try_to_load_from_cache, _CACHED_NO_EXIST\n"
        f"assert hf_hub_download('org/tiny', 'config.json', local_files_only=True) == {str(folder / 'config.json')!r}\n"
        "assert try_to_load_from_cache('org/tiny', 'merges.txt') is _CACHED_NO_EXIST"
    )
    locate("org/tiny", before=code)


def test_what_another_program_left_in_the_cache_is_completed(
    locate: Located, hub: Hub, model_files: dict[str, bytes]
) -> None:
    hub.add("org/tiny", model_files)
    weights_only = (
        "from huggingface_hub import hf_hub_download as get\n"
        "get('org/tiny', 'config.json'); get('org/tiny', 'model.safetensors')"
    )
    folder = locate("org/tiny", before=weights_only)
    assert hub.gets().count("model.safetensors") == 1 and (folder / "tokenizer.json").is_file()


def test_only_the_shards_of_the_index(locate: Located, hub: Hub, sharded_files: dict[str, bytes]) -> None:
    hub.add("org/sharded", sharded_files)
    folder = locate("org/sharded")
    shards = {name for name in sharded_files if name.startswith("model-")}
    assert len(shards) == 3 and {path.name for path in folder.glob("*.safetensors")} == shards
    assert (folder / INDEX).is_file() and "consolidated.safetensors" not in hub.gets()


def test_revisions_are_kept_apart(locate: Located, hub: Hub, model_files: dict[str, bytes]) -> None:
    for revision in COMMITS:
        hub.add("gpt", {**model_files, "config.json": json.dumps({"from": revision}).encode()}, revision)
    named = {"gpt": "main", "gpt@old": "old", "gpt@refs/pr/1": "refs/pr/1", f"gpt@{COMMITS['old']}": "old"}
    for ref, revision in named.items():
        assert json.loads((locate(ref) / "config.json").read_text()) == {"from": revision}
        assert locate(ref, HF_HUB_OFFLINE="1").name == COMMITS[revision]


def test_a_folder_of_that_name_wins(locate: Located, hub: Hub, model_files: dict[str, bytes], tiny_llama: Path) -> None:
    hub.add("org/tiny", model_files)
    (locate.lema.cwd / "org").mkdir()
    (locate.lema.cwd / "org/tiny").symlink_to(tiny_llama)
    assert locate("org/tiny") == Path("org/tiny") and not hub.requests


def test_a_whole_run_from_a_name(
    lema: Any, locate: Located, hub: Hub, sharded_files: dict[str, bytes], make_rows: Any, chats: Any
) -> None:
    hub.add("org/sharded", sharded_files, "old")
    options = ["model_name_or_path=org/sharded@old", "task=generate", "prompt=say", "max_new_tokens=3"]
    first = lema.ok(*options, before=locate.environment())
    again = lema.ok(*options, before=locate.environment(HF_HUB_OFFLINE="1"))
    assert first.out.splitlines()[0] == again.out.splitlines()[0]
    rows = make_rows(lema.cwd / "rows.jsonl", chats(3))
    trained = [options[0], f"train_file={rows}", "lora_rank=2", "max_steps=1", "output_dir=out"]
    lema.ok(*trained, before=locate.environment(HF_HUB_OFFLINE="1"))
    peft_config = json.loads((lema.cwd / "out/checkpoint-1/adapter_config.json").read_text())
    assert (peft_config["base_model_name_or_path"], peft_config["revision"]) == ("org/sharded", "old")
    assert base_model(peft_config) == "org/sharded@old"


# ------------------------------------------------------------------------------------------------- broken connections


def test_a_cut_connection_is_taken_up_where_it_broke(locate: Located, hub: Hub, model_files: dict[str, bytes]) -> None:
    hub.add("org/tiny", model_files)
    hub.cuts["model.safetensors"] = 5000
    folder = locate("org/tiny", before=SMALL_PIECES)
    assert (folder / "model.safetensors").read_bytes() == model_files["model.safetensors"]
    asked = [start for method, path, start in hub.requests if method == "GET" and path.endswith("/model.safetensors")]
    assert asked == [None, "bytes=5000-"]


def test_the_next_run_goes_on_behind_what_an_interrupted_one_received(
    locate: Located, hub: Hub, model_files: dict[str, bytes]
) -> None:
    hub.add("org/tiny", model_files)
    hub.cuts["model.safetensors"] = 5000
    hub.gone_after_cut.add("model.safetensors")
    assert "HTTP 503" in locate.error("org/tiny", before=SMALL_PIECES)
    assert "an unfinished copy of 'org/tiny', without model.safetensors" in locate.error("org/tiny", HF_HUB_OFFLINE="1")
    hub.gone_after_cut.clear()
    hub.requests.clear()
    folder = locate("org/tiny")
    assert (folder / "model.safetensors").read_bytes() == model_files["model.safetensors"]
    assert hub.gets() == ["model.safetensors"] and ("bytes=5000-" in [asked for _, _, asked in hub.requests])
    assert not list(folder.parents[1].glob("blobs/*.incomplete"))


def test_ctrl_c_on_a_dead_connection_ends_at_once_and_keeps_what_was_received(
    lema: Any, locate: Located, hub: Hub, model_files: dict[str, bytes]
) -> None:
    hub.add("org/tiny", model_files)
    hub.stalls["model.safetensors"] = 5000
    options = ["model_name_or_path=org/tiny", "task=generate", "prompt=say", "max_new_tokens=3"]
    child = lema.start(*options, before=f"{locate.environment()}\n{SMALL_PIECES}")
    assert hub.stalled.wait(60)
    digest = hashlib.sha256(model_files["model.safetensors"]).hexdigest()
    partial = locate.home / f"hub/models--org--tiny/blobs/{digest}.lema.incomplete"
    child.wait_until(lambda: partial.exists() and partial.stat().st_size >= 4000, "received")
    child.signal(signal.SIGINT)
    assert child.wait(8) == 130 and "Traceback" not in child.err
    hub.stalls.clear()
    lema.ok(*options, before=locate.environment())
    assert any(start for _, path, start in hub.requests if path.endswith("/model.safetensors"))


def test_what_was_received_is_checked(locate: Located, hub: Hub, model_files: dict[str, bytes]) -> None:
    hub.add("org/tiny", model_files)
    blobs = locate.home / "hub/models--org--tiny/blobs"
    blobs.mkdir(parents=True)
    digest = hashlib.sha256(model_files["model.safetensors"]).hexdigest()
    (blobs / f"{digest}.lema.incomplete").write_bytes(bytes(5000))
    assert "not the file that was announced" in locate.error("org/tiny")
    assert locate("org/tiny")


# ----------------------------------------------------------------------------------------------------- one line each


def test_offline_and_nothing_cached(locate: Located, hub: Hub) -> None:
    said = locate.error("org/tiny", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in said and f"{locate.home}/hub holds no copy of 'org/tiny'" in said
    assert "or give the folder of a model" in said and not hub.requests


def test_nobody_answers(locate: Located, hub: Hub, model_files: dict[str, bytes]) -> None:
    nobody = "http://127.0.0.1:9"
    said = locate.error("org/tiny", HF_ENDPOINT=nobody)
    assert f"{nobody}/org/tiny cannot be reached" in said and "check the network and HF_ENDPOINT" in said
    hub.add("org/tiny", model_files)
    folder = locate("org/tiny")
    (folder / "tokenizer.json").unlink()
    assert locate("org/tiny", HF_ENDPOINT=nobody) == folder
    assert "the cached copy is used" in locate.err


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((403, "GatedRepo"), "is gated; accept its terms on that page, then log in: hf auth login, or set HF_TOKEN"),
        ((401, "GatedRepo"), "is gated; accept its terms"),
        ((401, "RepoNotFound"), "no model 'org/tiny' at"),
        ((403, ""), "refuses the access token (HTTP 403); log in again"),
        ((500, ""), "answers HTTP 500"),
    ],
)
def test_files_that_are_refused(
    locate: Located, hub: Hub, model_files: dict[str, bytes], refusal: tuple[int, str], said: str
) -> None:
    hub.add("org/tiny", model_files)
    hub.refuses["org/tiny"] = refusal
    assert said in locate.error("org/tiny")


def test_names_and_revisions_that_do_not_exist(locate: Located, hub: Hub, model_files: dict[str, bytes]) -> None:
    hub.add("org/tiny", model_files)
    said = locate.error("org/tinny")
    assert said.startswith(f"org/tinny: no such folder here, and no model 'org/tinny' at {hub.url}; check the name")
    assert "has no revision 'v9'" in locate.error("org/tiny@v9")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "only pytorch_model.bin; other formats are not read"),
        ({"adapter_config.json": b"{}"}, "it holds LoRA weights: give its base model"),
        (
            {"config.json": b"{}", INDEX: b'{"weight_map": {"a": "model-1.safetensors"}}'},
            "names 'model-1.safetensors', which is not",
        ),
        (
            {"config.json": b"{}", INDEX: b'{"weight_map": {"a": "../x"}}'},
            "names '../x'; file names in the same folder",
        ),
        ({"config.json": b"{}", INDEX: b"[]"}, "has no weight_map of file names"),
    ],
)
def test_repositories_without_a_model(locate: Located, hub: Hub, files: dict[str, bytes], said: str) -> None:
    hub.add("org/odd", files)
    assert said in locate.error("org/odd")
    assert not (locate.home / "x").exists()


def test_a_server_that_is_no_hub(locate: Located, hub: Hub) -> None:
    hub.answer = lambda to: _send(to, 200, {"Content-Type": "text/html"}, b"<html>Log in to the hotel</html>")
    assert "does not answer as the Hub does" in locate.error("org/tiny")


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (
            "import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(free=1000)",
            "bytes needed, 1000 bytes free on its disk: make room",
        ),
        (
            "import os, errno\ndef full(fd): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\nos.fsync = full",
            "No space left on device; make room, or set HF_HOME to a larger disk",
        ),
    ],
)
def test_a_full_disk(locate: Located, hub: Hub, model_files: dict[str, bytes], before: str, said: str) -> None:
    hub.add("org/tiny", model_files)
    assert said in locate.error("org/tiny", before=before)


@pytest.mark.parametrize(
    "ref",
    [
        "./no/such",
        "/abs/missing",
        "a/b/c",
        "../x",
        "~/x",
        "x.gguf",
        "package:x",
        "https://h/x",
        "a--b",
        "a b",
        "",
        "x@",
    ],
)
def test_what_is_no_name_never_gets_near_the_network(ref: str) -> None:
    assert HUB_SOURCE.refuses(ref) is not None


@pytest.mark.parametrize(
    "ref", ["gpt2", "org/name", "org/name@v1.0", "org/name@refs/pr/1", "Qwen/Qwen2.5-0.5B", "01-ai/Yi-6B"]
)
def test_names(ref: str) -> None:
    assert HUB_SOURCE.refuses(ref) is None and FOLDER_SOURCE.refuses(ref) == "no such local folder"


def test_every_file_that_is_taken_is_harmless() -> None:
    assert not [name for name in BESIDE if name.endswith((".bin", ".h5", ".py", ".pt"))]
