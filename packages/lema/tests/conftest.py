"""Tiny Llama folders with a tokenizer, and the program as a user starts it: in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors

from lema_core.checkpoint import write_safetensors
from lema_core.testing.quick_figures import quick_figures
from lema_models.llama import LlamaAdapter

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: no test takes longer; a child that does is stopped
TIMEOUT_S = 240


def write_model(
    folder: Path, *, dtype: torch.dtype = torch.float32, shards: int = 1, seed: int = 0, **config: Any
) -> Path:
    """A random Llama in Hugging Face layout, unless changed: hidden 64, 4 layers, 4 heads, 2 of them k/v, 128 ids."""
    hf_config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 3,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | config
    adapter = LlamaAdapter.from_hf_config(hf_config)
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...], role: str) -> Callable[[], torch.Tensor]:
        def values() -> torch.Tensor:
            if role == "norm":
                return torch.ones(shape, dtype=dtype)
            return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

        return values

    folder.mkdir(parents=True)
    tensors = [(t.name, dtype, t.shape, draw(t.shape, t.role)) for t in adapter.tensors() if t.tied_to is None]
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        weight_map = {}
        for i in range(shards):
            part = tensors[i * len(tensors) // shards : (i + 1) * len(tensors) // shards]
            name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            write_safetensors(folder / name, part)
            weight_map |= dict.fromkeys((tensor[0] for tensor in part), name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(hf_config))
    return folder


def write_tokenizer(folder: Path, *, template: str | None = CHATML, auto_bos: bool = False, **settings: Any) -> Path:
    """A byte-level tokenizer of 128 ids: 4 special, printable ASCII, space and newline, pairs of letters."""
    pieces = [*SPECIAL, "Ġ", "Ċ", *map(chr, range(33, 127))]
    pairs = [(a, b) for a in "aeiou" for b in "nrstlm"][: 128 - len(pieces)]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *map("".join, pairs)])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if auto_bos:
        backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    written = {"bos_token": "<s>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"} | settings
    if template is not None:
        written["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return folder


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat_rows(n: int, answer: str = "{}") -> list[dict[str, Any]]:
    """``n`` chats of unequal length, each of its own."""
    words = ["one", "three red", "a", "seventeen tall trees", "no"]
    return [
        {
            "messages": [
                {"role": "user", "content": f"say {i} {words[i % 5]}"},
                {"role": "assistant", "content": answer.format(i)},
            ]
        }
        for i in range(n)
    ]


class Child:
    """A program under way. What it prints is in two files, which may be read at any time."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkServerProcess, out: Path, err: Path) -> None:
        self._process = process
        self._files = out, err

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    @property
    def code(self) -> int | None:
        """Exit code, minus a signal's number when one ended it; None while it runs."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
        return self._process.exitcode

    def wait_for(self, pattern: str) -> None:
        """Until what was printed matches; fails when the program ends first."""
        self.wait_until(lambda: re.search(pattern, self.out + self.err) is not None, pattern)

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Until ``ready()``; fails when the program ends first."""
        until = time.monotonic() + TIMEOUT_S
        while not ready():
            ended = self.code is not None and not ready()
            assert not ended and time.monotonic() < until, f"{what}: never\n{self.out}\n{self.err}"
            time.sleep(0.002)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Exit code; fails after ``timeout_s``."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.wait(timeout_s)
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"still running after {timeout_s} s"
        return self._process.exitcode

    def kill(self) -> None:
        if self.code is None:
            self._process.kill()
            self.wait()


_FORKED = """
import os, sys
from lema_core.testing.quick_figures import quick_figures
figures = quick_figures()
figures.__enter__()
for number, path in ((1, {out!r}), (2, {err!r})):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
os.chdir({cwd!r})
{before}
from lema.cli import main
sys.exit(main({argv!r}))
"""
_STARTED = """
import sys
{before}
from lema.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Lema:
    """Runs ``lema key=value ...`` in a folder that is the test's own, in a process of its own with one thread.

    Importing torch takes seconds, and so does measuring the machine, so a run is forked from a server that has imported
    torch, and measures little, unless ``exact``: then it is ``python -m lema``, from start to exit. ``before`` is code
    that runs in the process first.
    """

    def __init__(self, cwd: Path, server: ForkServerContext) -> None:
        self.cwd = cwd
        self._server = server
        self._children: list[Child] = []

    def start(
        self, *arguments: object, exact: bool = False, before: str = "", cwd: Path | None = None, **env: str
    ) -> Child:
        out, err = (self.cwd / f"{name}{len(self._children)}.txt" for name in ("stdout", "stderr"))
        out.touch()
        err.touch()
        argv, where = list(map(str, arguments)), str(cwd or self.cwd)
        process: subprocess.Popen[bytes] | ForkServerProcess
        if exact:
            program = ["-c", _STARTED.format(before=before)] if before else ["-m", "lema"]
            with out.open("wb") as out_file, err.open("wb") as err_file:
                process = subprocess.Popen(
                    [sys.executable, *program, *argv],
                    cwd=where,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                    stdin=subprocess.DEVNULL,
                    stdout=out_file,
                    stderr=err_file,
                )
        else:
            assert not env, "a forked run has the server's environment"
            code = _FORKED.format(out=str(out), err=str(err), cwd=where, before=before, argv=argv)
            process = self._server.Process(target=exec, args=(code, {}), daemon=True)
            process.start()
        child = Child(process, out, err)
        self._children.append(child)
        return child

    def run(self, *arguments: object, **how: Any) -> Child:
        """As :meth:`start`, waiting for the end."""
        child = self.start(*arguments, **how)
        child.wait()
        return child

    def ok(self, *arguments: object, **how: Any) -> Child:
        """As :meth:`run`; fails unless the exit code is 0."""
        child = self.run(*arguments, **how)
        assert child.code == 0, f"{child.out}\n{child.err}"
        return child

    def error(self, *arguments: object, code: int = 1, **how: Any) -> str:
        """As :meth:`run`; fails unless it ends with ``code`` and exactly one line of error, which is returned."""
        child = self.run(*arguments, **how)
        lines = [line for line in child.err.splitlines() if line.startswith("lema: error: ")]
        assert child.code == code, f"{child.code}\n{child.out}\n{child.err}"
        assert len(lines) == 1 and "Traceback" not in child.err, child.err
        return lines[0]

    def close(self) -> None:
        for child in self._children:
            child.kill()


@pytest.fixture(autouse=True, scope="module")
def hardly_any_measuring() -> Iterator[None]:
    with quick_figures():
        yield


@pytest.fixture(scope="session")
def fork_server() -> ForkServerContext:
    """Forks processes that have all imported and nothing computed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    server = multiprocessing.get_context("forkserver")
    # tracing a step on the meta device brings in torch's compiler, another two seconds
    server.set_forkserver_preload(["lema.cli", "lema.tasks", "lema_models.llama", "hydra", "torch._dynamo"])
    return server


@pytest.fixture
def lema(tmp_path: Path, fork_server: ForkServerContext) -> Iterator[Lema]:
    """The program; children that a failed test leaves are stopped."""
    program = Lema(tmp_path, fork_server)
    yield program
    program.close()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with tokenizer and chat template that tests only read."""
    return write_tokenizer(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def make_model() -> Callable[..., Path]:
    return write_model


@pytest.fixture
def make_tokenizer() -> Callable[..., Path]:
    return write_tokenizer


@pytest.fixture
def make_rows() -> Callable[..., Path]:
    """``make_rows(path, rows)`` writes JSONL."""
    return write_rows


@pytest.fixture
def chats() -> Callable[..., list[dict[str, Any]]]:
    return chat_rows


@pytest.fixture
def read_steps() -> Callable[[Path], list[dict[str, Any]]]:
    """The objects of ``output_dir/metrics.jsonl``."""
    return lambda output_dir: [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
