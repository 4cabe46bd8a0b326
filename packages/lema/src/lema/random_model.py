"""``init=random``: a model of an architecture that was never trained, as a folder in Hugging Face layout.

It is there to try a run on a machine, not to learn from: the preset's config with ``model_overrides``, weights of
standard deviation 0.02, norms of ones, biases of zeros, a tokenizer of bytes and a plain chat template. The same config
and seed give the same bytes on every machine: the numbers are whole ones from Python's Mersenne Twister, scaled by one
rounded product, where torch's normal numbers depend on the CPU. A folder is made once and found again, in
``$LEMA_CACHE/random``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lema.config import LemaConfig
from lema.display import byte_progress
from lema_core.adapter import TensorSpec
from lema_core.atomic import atomic_folder, check_free_space
from lema_core.cache import cache_folder
from lema_core.checkpoint import read_hf_config, write_safetensors
from lema_core.errors import CheckpointError, ConfigError
from lema_core.memory import format_bytes, process_memory_limit
from lema_core.plugins import get_plugin_manager
from lema_core.records import load_object
from lema_core.suggest import unknown_name

if TYPE_CHECKING:
    from lema_core.adapter import ModelAdapter

#: part of every folder's name: raised when the same config and seed are to give something else
_VERSION = 1
_STD = 0.02
_BLOCK = 1 << 20
#: config files differ in how they spell the common sizes
_OTHER_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "block_ff_dim",
}
_SPECIAL_TOKENS = {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def random_model(config: LemaConfig) -> Path:
    """The folder of the model that ``config`` describes, made when it is not there yet.

    Raises ConfigError when there is no config to start from, an override that it does not have, or sizes that
    contradict each other; CheckpointError with the bytes needed when there is no room. Then nothing was written.
    """
    hf_config = _with_special_ids(overridden(_base(config), config.model_overrides or {}))
    described = json.dumps([_VERSION, config.seed, hf_config], sort_keys=True)
    name = f"{hf_config.get('model_type', 'model')}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"
    folder = cache_folder("random") / name
    if folder.is_dir():
        return folder
    architecture = get_plugin_manager().match_architecture(hf_config)
    adapter: ModelAdapter = load_object(architecture.adapter).from_hf_config(hf_config)
    tokens = byte_tokens()
    if adapter.vocab_size < len(tokens):
        raise ConfigError(
            f"init=random: vocab_size {adapter.vocab_size} is less than the {len(tokens)} ids of its byte-level "
            f"tokenizer; give {len(tokens)} or more"
        )
    dtype = _dtype(hf_config)
    specs = list(file_tensors(adapter))
    needed_bytes = sum(prod(spec.shape) for spec in specs) * dtype.itemsize
    _refuse_without_room(folder, needed_bytes, bool(config.model_overrides))
    with _locked(folder):
        if not folder.is_dir():
            with atomic_folder(folder, needed_bytes) as temporary:
                _write(temporary, hf_config, specs, dtype, config.seed, needed_bytes)
    return folder


# --------------------------------------------------------------------------------------------------------------- config


def overridden(hf_config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``hf_config`` with ``overrides``, whose sizes may have either of their usual names.

    A list with an entry per layer follows the number of layers: it keeps the first of every kind and then the earliest,
    or begins anew. Raises ConfigError with a near match for what the config does not have.
    """
    result = dict(hf_config)
    given = set()
    for name, value in overrides.items():
        key = name if name in hf_config else _OTHER_NAMES.get(name, name)
        if key not in hf_config or key in _special_ids():
            raise ConfigError(
                f"model_overrides: {unknown_name('override', name, set(hf_config) - set(_special_ids()))}"
            )
        result[key] = value
        given.add(key)
    depth = next((key for key in ("num_hidden_layers", "n_layer") if key in hf_config), None)
    if depth is None or not isinstance(result[depth], int) or result[depth] == hf_config[depth]:
        return result
    for key, value in hf_config.items():
        if isinstance(value, list) and len(value) == hf_config[depth] and key not in given:
            result[key] = _resized(value, result[depth])
    return result


def _resized(entries: Sequence[Any], n: int) -> list[Any]:
    def first_of_its_kind(i: int) -> tuple[bool, int]:
        return entries[i] in entries[:i], i

    if n > len(entries):
        return [entries[i % len(entries)] for i in range(n)]
    return [entries[i] for i in sorted(sorted(range(len(entries)), key=first_of_its_kind)[:n])]


def _base(config: LemaConfig) -> dict[str, Any]:
    """The config to start from: ``hf_config``, or that of a local folder."""
    if config.hf_config is not None:
        return dict(config.hf_config)
    if config.model_name_or_path is not None and Path(config.model_name_or_path).expanduser().is_dir():
        return read_hf_config(Path(config.model_name_or_path).expanduser())
    raise ConfigError(
        "init=random needs an architecture: +model=NAME, hf_config={model_type: ...}, or model_name_or_path=FOLDER "
        "with a config.json"
    )


def _special_ids() -> dict[str, int]:
    return {f"{name}_token_id": 256 + i for i, name in enumerate(_SPECIAL_TOKENS)}


def _with_special_ids(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's ids are those of the preset's tokenizer, which is not here."""
    return {**hf_config, **_special_ids()}


def _dtype(hf_config: Mapping[str, Any]) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    name = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    if name not in known:
        raise ConfigError(f"init=random: {unknown_name('torch_dtype', str(name), known)}")
    return known[name]


# -------------------------------------------------------------------------------------------------------------- writing


def _refuse_without_room(folder: Path, needed_bytes: int, sized: bool) -> None:
    """Raises CheckpointError for more than the disk has, and for more than memory unless somebody chose the size."""
    smaller = "make it smaller, such as 'model_overrides={num_hidden_layers:2,hidden_size:64}'"
    memory = process_memory_limit()
    if not sized and needed_bytes > memory.bytes:
        raise CheckpointError(
            f"init=random: this model has {needed_bytes} bytes ({format_bytes(needed_bytes)}) of weights, and this "
            f"process may use {memory.bytes} bytes of memory; {smaller}; any override, its own number of layers too, "
            "says that you mean it"
        )
    try:
        check_free_space(folder, needed_bytes)
    except CheckpointError as error:
        raise CheckpointError(f"init=random: {error}, set LEMA_CACHE to a larger disk, or {smaller}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A second process waits for the first one's folder."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.with_name(f".{folder.name}.lock"), os.O_CREAT | os.O_WRONLY, 0o644)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder}: {error.strerror or error}; LEMA_CACHE says where random models go"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(
    folder: Path,
    hf_config: Mapping[str, Any],
    specs: Sequence[TensorSpec],
    dtype: torch.dtype,
    seed: int,
    total_bytes: int,
) -> None:
    _write_json(folder / "config.json", hf_config)
    _write_json(folder / "generation_config.json", _special_ids())
    write_byte_tokenizer(folder)
    with byte_progress(f"making a model of random weights in {folder.parent}", total_bytes, sys.stderr) as advance:

        def values(spec: TensorSpec) -> Callable[[], Iterator[Tensor]]:
            def blocks() -> Iterator[Tensor]:
                for block in random_blocks(spec, dtype, seed):
                    yield block
                    advance(block.nbytes)

            return blocks

        write_safetensors(
            folder / "model.safetensors", [(spec.name, dtype, spec.shape, values(spec)) for spec in specs]
        )


def file_tensors(adapter: ModelAdapter) -> Iterator[TensorSpec]:
    """What the file holds, named as transformers names its parameters: experts are stacked, [E, out, in]."""
    stacks: dict[int | None, dict[str, list[TensorSpec]]] = {}
    for spec in adapter.linear_modules():
        if spec.expert is not None:
            stacks.setdefault(spec.layer, {}).setdefault(spec.stack, []).append(spec)
    for spec in adapter.tensors():
        if spec.expert is not None:
            for name, members in stacks.pop(spec.layer, {}).items():
                yield TensorSpec(name, (len(members), *members[0].shape), "expert", spec.layer)
        elif spec.tied_to is None:
            yield spec


def random_blocks(spec: TensorSpec, dtype: torch.dtype, seed: int) -> Iterator[Tensor]:
    """The values of one tensor, in blocks: ones for norms, zeros for biases, else sums of four bytes scaled to a
    standard deviation of 0.02. They depend on seed, name and shape alone."""
    left = prod(spec.shape)
    constant = 0.0 if spec.name.endswith("bias") else 1.0 if spec.role == "norm" else None
    source = random.Random(f"lema/{_VERSION}/{seed}/{spec.name}")
    # A byte is uniform over 0 ... 255; four of them have the mean 510.
    scale = _STD / math.sqrt(4 * (256**2 - 1) / 12)
    while left:
        n = min(left, _BLOCK)
        if constant is not None:
            yield torch.full((n,), constant, dtype=dtype)
        else:
            drawn = torch.frombuffer(bytearray(source.randbytes(4 * n)), dtype=torch.int32)
            yield ((_sum_of_bytes(drawn) - 510).to(torch.float32) * scale).to(dtype)
        left -= n


def _sum_of_bytes(words: Tensor) -> Tensor:
    """The sum of the four bytes of every int32: two sums at once, then theirs."""
    pairs = (words & 0x00FF00FF) + ((words >> 8) & 0x00FF00FF)
    return (pairs & 0xFFFF) + (pairs >> 16)


def byte_tokens() -> dict[str, int]:
    """The vocabulary: a token per byte, then BOS, EOS and padding."""
    from tokenizers.pre_tokenizers import ByteLevel

    return {token: i for i, token in enumerate([*sorted(ByteLevel.alphabet()), *_SPECIAL_TOKENS.values()])}


def write_byte_tokenizer(folder: Path) -> None:
    """tokenizer.json of single bytes, and tokenizer_config.json with a plain chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(byte_tokens(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": token for name, token in _SPECIAL_TOKENS.items()}
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **named, "chat_template": _CHAT_TEMPLATE},
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
