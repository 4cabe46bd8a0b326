"""``tokenizer.json`` and ``tokenizer_config.json`` from a GGUF file's vocabulary.

A GGUF file has the vocabulary and the merges, and only the *name* of the rule that cuts text into words before merging
(``tokenizer.ggml.pre``). The rules are those of llama.cpp's ``llama-vocab.cpp`` and of the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from lema_core.errors import CheckpointError
from lema_gguf.metadata import GGUFMetadata

# tokenizer.ggml.token_type
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Rule:
    """How text is cut before merging. ``whole_words``: a piece that is a token stays whole; ``bos``: the default."""

    cut: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words: bool = False
    bos: bool = False


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    # Digits are cut out first, so white space in front of one is a piece of its own: "\n\n1" is "\n\n", "1"
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _llama3_words() -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_RULES: dict[str, _Rule] = {
    "gpt-2": _Rule(_gpt2_words),
    "smollm": _Rule(_single_digits),
    "starcoder": _Rule(_single_digits),
    "llama-bpe": _Rule(_llama3_words, whole_words=True, bos=True),
}


def build_tokenizer(metadata: GGUFMetadata) -> Tokenizer:
    """The tokenizer. Raises CheckpointError for a kind of vocabulary or a rule, by name, that is not known here."""
    kind = metadata.need("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise CheckpointError(
            f"{metadata.path}: tokenizer.ggml.model {kind!r} is not supported; expected 'gpt2' (byte-level BPE)"
        )
    pre = metadata.need("tokenizer.ggml.pre", str)
    rule = _RULES.get(pre)
    if rule is None:
        raise CheckpointError(
            f"{metadata.path}: tokenizer.ggml.pre {pre!r} is not supported; expected one of {', '.join(_RULES)}"
        )
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens", list)
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml.tokens has {len(tokens) - len(vocab)} tokens twice")
    merges = [tuple(merge.split(" ")) for merge in metadata.need("tokenizer.ggml.merges", list)]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.whole_words))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml.merges do not fit the vocabulary: {error}") from error
    tokenizer.pre_tokenizer = rule.cut()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, tokens, rule)
    kinds = metadata.get("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml.token_type: {len(tokens)} expected, {len(kinds)} found")
    typed = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens([_added(token, True) for token, kind in typed if kind == _CONTROL])
    tokenizer.add_tokens([_added(token, False) for token, kind in typed if kind == _USER_DEFINED])
    return tokenizer


def tokenizer_config(metadata: GGUFMetadata, tokenizer: Tokenizer) -> dict[str, Any]:
    """``tokenizer_config.json`` as Hugging Face writes it, with the chat template."""
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens", list)
    config: dict[str, Any] = {
        "added_tokens_decoder": {
            str(index): {
                "content": token.content,
                "lstrip": token.lstrip,
                "normalized": token.normalized,
                "rstrip": token.rstrip,
                "single_word": token.single_word,
                "special": token.special,
            }
            for index, token in sorted(tokenizer.get_added_tokens_decoder().items())
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.need("llama.context_length", int),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token = _special_token(metadata, tokens, key)
        if token is not None:
            config[f"{name}_token"] = token
    template = metadata.get("tokenizer.chat_template", str)
    if template is not None:
        config["chat_template"] = template
    return config


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, normalized=False, special=special)


def _special_token(metadata: GGUFMetadata, tokens: list[str], key: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{key}_token_id", int)
    if index is None:
        return None
    if index >= len(tokens):
        raise CheckpointError(
            f"{metadata.path}: tokenizer.ggml.{key}_token_id is {index}, the vocabulary has {len(tokens)} tokens"
        )
    return tokens[index]


def _post_processor(metadata: GGUFMetadata, tokens: list[str], rule: _Rule) -> processors.PostProcessor:
    """Puts begin and end of text around each sequence where the file says so."""
    byte_level = processors.ByteLevel(trim_offsets=False)
    around = {"bos": metadata.get("tokenizer.ggml.add_bos_token", bool, rule.bos)}
    around["eos"] = metadata.get("tokenizer.ggml.add_eos_token", bool, False)
    token = {key: _special_token(metadata, tokens, key) if wanted else None for key, wanted in around.items()}
    absent = [key for key, wanted in around.items() if wanted and token[key] is None]
    if absent:
        raise CheckpointError(
            f"{metadata.path}: tokenizer.ggml.add_{absent[0]}_token is set without tokenizer.ggml.{absent[0]}_token_id"
        )
    special = [(token[key], tokens.index(token[key])) for key in ("bos", "eos") if token[key] is not None]
    if not special:
        return byte_level

    def sequence(letter: str, number: int) -> list[str]:
        pieces = [token["bos"], f"${letter}", token["eos"]]
        return [f"{piece}:{number}" for piece in pieces if piece is not None]

    template = processors.TemplateProcessing(
        single=sequence("A", 0), pair=sequence("A", 0) + sequence("B", 1), special_tokens=list(dict(special).items())
    )
    return processors.Sequence([byte_level, template])
