"""A local byte-level tokenizer of 128 ids, so that tests need no download."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from lema_train.data import Tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]

# Closes each turn as it writes it, as most templates do.
CHATML = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """128 tokens: 4 special, newline, space and printable ASCII, the bytes of é and 😀, merges for the rest."""
    # Byte-level BPE writes space as Ġ, newline as Ċ and other bytes as printable stand-ins.
    letters = ["Ċ", "Ġ", *map(chr, range(33, 127)), *"Ã©ðŁĺĢ"]
    words = ["he", "hel", "hell", "hello", "Ġw", "Ġwo", "Ġwor", "Ġworl", "Ġworld", "us", "use", "user"]
    words += ["an", "is", "it", "on", "in", "re", "st", "ĠĠ", "ĊĊ"]
    pieces = [*SPECIAL, *letters, *words]
    pieces += ["".join(pair) for pair in ("ab", "cd")][: 128 - len(pieces)]
    assert len(pieces) == len(set(pieces)) == 128, len(pieces)
    return {piece: i for i, piece in enumerate(pieces)}, [(piece[:-1], piece[-1]) for piece in pieces if piece in words]


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Callable[..., Path]:
    """``tokenizer_folder(template=..., auto_bos=False, **tokenizer_config)`` writes a folder and returns it.

    A config value of None is written as null; ``eos_token`` is ``</s>`` and ``bos_token`` ``<s>`` unless given.
    """
    count = 0

    def build(template: object = CHATML, auto_bos: bool = False, **config: object) -> Path:
        nonlocal count
        count += 1
        folder = tmp_path / f"tokenizer{count}"
        folder.mkdir()
        vocabulary, merges = _vocabulary()
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
        backend.add_special_tokens(SPECIAL)
        if auto_bos:
            backend.post_processor = processors.TemplateProcessing(
                single=["<s>", "$A"], special_tokens=[("<s>", backend.token_to_id("<s>"))]
            )
        # Left in many published files; an example of what must not cut rows in silence.
        backend.enable_truncation(max_length=12)
        backend.save(str(folder / "tokenizer.json"))
        settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **config}
        if template is not None:
            settings["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return build


@pytest.fixture
def make_tokenizer(tokenizer_folder: Callable[..., Path]) -> Callable[..., Tokenizer]:
    """``tokenizer_folder`` and ``Tokenizer.from_folder`` in one."""
    return lambda *args, **kwargs: Tokenizer.from_folder(tokenizer_folder(*args, **kwargs))
