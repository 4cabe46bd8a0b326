"""The tokenizer beside a model: ``tokenizer.json``, its special ids and its chat template.

Where this differs from transformers on purpose: a BOS is added at most once, never in front of a text that brings its
own, and nothing is ever added at the end by itself (a prompt that ends in EOS is not to be continued); truncation and
padding that a ``tokenizer.json`` may carry are off. As in transformers, whether there is a BOS at all is what
``tokenizer.json`` says; ``add_bos_token`` in tokenizer_config.json is of an older format and does not count beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lema_core.errors import CheckpointError, DataError
from lema_train.data.chat_template import ChatTemplate, Message

if TYPE_CHECKING:
    import tokenizers

_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back, as the model in ``folder`` expects it.

    Attributes:
        folder: where it was read from.
        bos_id, eos_id, pad_id: special ids, None where the files name none.
        stop_ids: every id that ends an answer: EOS and what generation_config.json and config.json list.
        chat_template: the template, None if the folder has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        special_ids: dict[str, list[int]],
        template: tuple[str, str] | None,
        folder: Path,
    ) -> None:
        """Use :meth:`from_folder`.

        Args:
            special_tokens: name (``bos_token``) -> text.
            special_ids: ``bos``, ``eos``, ``pad`` -> ids of the model's config files, used where no text is named.
            template: Jinja text and where it came from.
        """
        self.folder = folder
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        ids: dict[str, int | None] = {}
        for name in ("bos", "eos", "pad"):
            text = special_tokens.get(f"{name}_token")
            listed = special_ids.get(name, [])
            ids[name] = backend.token_to_id(text) if text is not None else (listed[0] if listed else None)
            if text is None and ids[name] is not None and backend.id_to_token(ids[name]) is not None:
                special_tokens = {**special_tokens, f"{name}_token": backend.id_to_token(ids[name])}
        self.bos_id, self.eos_id, self.pad_id = ids["bos"], ids["eos"], ids["pad"]
        eos = [] if self.eos_id is None else [self.eos_id]
        self.stop_ids = frozenset([*eos, *special_ids.get("eos", [])])
        self.chat_template = None if template is None else ChatTemplate(template[0], special_tokens, template[1])

    @classmethod
    def from_folder(cls, folder: Path, chat_template: str | Path | None = None) -> Tokenizer:
        """Read the tokenizer of the model in ``folder``.

        Args:
            folder: holds tokenizer.json and, where they exist, tokenizer_config.json, special_tokens_map.json,
                generation_config.json, config.json and chat_template.jinja.
            chat_template: a Jinja file to use instead, or the name of one of several templates the folder has.

        Raises:
            CheckpointError: tokenizer.json is missing or unreadable, one of the JSON files is broken, a token has
                another id than tokenizer_config.json says, or no template has that name.
        """
        folder = Path(folder)
        backend = _read_backend(folder)
        config = _read_json(folder / "tokenizer_config.json")
        tokens = {**_special_tokens(_read_json(folder / "special_tokens_map.json")), **_special_tokens(config)}
        try:
            _add_missing_tokens(backend, config, tokens, folder)
            template = _find_template(folder, config, chat_template)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: 'added_tokens_decoder' or 'chat_template' is not built as "
                f"expected ({type(error).__name__}: {error}); download the file again"
            ) from error
        special_ids: dict[str, list[int]] = {}
        # A null in tokenizer_config.json says that texts begin without BOS, whatever id the model reserves for it.
        for name in ("bos", "eos", "pad") if "bos_token" not in config else ("eos", "pad"):
            for file in ("generation_config.json", "config.json"):
                found = _read_json(folder / file).get(f"{name}_token_id")
                listed = found if isinstance(found, list) else [found]
                special_ids.setdefault(name, []).extend(i for i in listed if type(i) is int and i >= 0)
        return cls(backend, tokens, special_ids, template, folder)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def fill_id(self) -> int:
        """An id to fill padded places with: pad, else EOS, else 0. Never masked by value; see ``Batch``."""
        return next((i for i in (self.pad_id, self.eos_id) if i is not None), 0)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the added tokens that are marked special."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def adds_bos(self) -> bool:
        """Whether encoding a text puts BOS in front of it."""
        return self.bos_id is not None and self._backend.encode("").ids[:1] == [self.bos_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with BOS in front if the tokenizer adds one and the text does not begin with it."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return self.with_bos(ids) if add_special_tokens else ids

    def encode_with_extents(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, no BOS added, and the characters [start, end) each stands for.

        Byte-level tokenizers trim spaces off their offsets; here a gap belongs to the token after it, so that a
        token of spaces alone has an extent too.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        extents: list[tuple[int, int]] = []
        previous_end = 0
        for start, end in encoding.offsets:
            extents.append((min(start, previous_end), end))
            previous_end = max(previous_end, end)
        return encoding.ids, extents

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids, without special tokens unless asked for."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as the model's template writes it.

        Raises:
            DataError: there is no template, or it refuses the messages.
        """
        return self.require_chat_template().render(messages, add_generation_prompt)

    def chat_ids(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> list[int]:
        """Token ids of the conversation: the template's own special tokens, and exactly one BOS if there is one.

        Equal to transformers' ``apply_chat_template(tokenize=True)``, but for a tokenizer that adds BOS with a
        template that prints none: there BOS is added, as it is for every other text.
        """
        return self.encode(self.apply_chat_template(messages, add_generation_prompt))

    def require_chat_template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            DataError: there is none; says how to give one.
        """
        if self.chat_template is None:
            raise DataError(
                f"{self.folder}: the tokenizer has no chat template, so 'messages' cannot be turned into text; put the "
                "model's template into chat_template.jinja in that folder, or use 'prompt'/'completion' or 'text' rows"
            )
        return self.chat_template

    def with_bos(self, ids: list[int]) -> list[int]:
        """The ids with BOS in front, if this tokenizer adds one and they lack it."""
        if self.adds_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]  # type: ignore[list-item]
        return ids


class TextStream:
    """Decodes ids one by one into pieces of text that never split a character.

    The pieces, ended by :meth:`flush`, join to what decoding all ids at once gives.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # Tokens of the last piece are decoded again in front of new ones: some decoders drop the first token's space.
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        """Take one id; the text that is now certain, often empty while a character's bytes are incomplete."""
        self._pending.append(token_id)
        text = self._text()
        # An incomplete character decodes to U+FFFD, the replacement character.
        if not text or text.endswith("\ufffd"):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """The rest, incomplete characters as U+FFFD; the stream is then as new."""
        text = self._text()
        self._context, self._pending = [], []
        return text

    def _text(self) -> str:
        before = self._tokenizer.decode(self._context, self._skip_special)
        return self._tokenizer.decode(self._context + self._pending, self._skip_special)[len(before) :]


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend  # a model without a tokenizer needs no such library

    path = folder / "tokenizer.json"
    if not path.is_file():
        way_out = "copy it there from where the model came from"
        if (folder / "tokenizer.model").is_file():
            way_out = "make it with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise CheckpointError(f"{path}: no such file, so there is no tokenizer; {way_out}")
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for everything it cannot read
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: not a readable tokenizer ({reason}); download the file again") from error


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}; download it again")
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens a file names, each written as text or as an object with ``content``."""
    found: dict[str, str] = {}
    for name in _TOKEN_NAMES:
        entry = config.get(name)
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str):
            found[name] = text
    return found


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], tokens: dict[str, str], folder: Path
) -> None:
    """Add what tokenizer_config.json names and tokenizer.json lacks, as transformers does."""
    from tokenizers import AddedToken

    declared = config.get("added_tokens_decoder") or {}
    for index, entry in sorted((int(key), value) for key, value in declared.items()):
        text = entry["content"]
        if backend.token_to_id(text) is None:
            flags = {k: entry[k] for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in entry}
            backend.add_tokens([AddedToken(text, **flags)])
        if backend.token_to_id(text) != index:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: token {text!r} has id {index} there and "
                f"{backend.token_to_id(text)} in tokenizer.json; the two files are of different models, download both"
            )
    backend.add_special_tokens([t for t in dict.fromkeys(tokens.values()) if backend.token_to_id(t) is None])


def _find_template(folder: Path, config: dict[str, Any], choice: str | Path | None) -> tuple[str, str] | None:
    """Jinja text and origin of the template: a file or name given, chat_template.jinja, or tokenizer_config.json."""
    if choice is not None and Path(choice).is_file():
        return Path(choice).read_text(encoding="utf-8"), str(choice)
    origin = str(folder / "tokenizer_config.json")
    declared = config.get("chat_template")
    named: dict[str, str] = {}
    if isinstance(declared, str):
        named = {"default": declared}
    elif isinstance(declared, list):
        named = {entry["name"]: entry["template"] for entry in declared}
    file = folder / "chat_template.jinja"
    if file.is_file():
        if choice in (None, "default"):
            return file.read_text(encoding="utf-8"), str(file)
    elif choice is None and not named:
        return None
    name = "default" if choice is None else str(choice)
    if name not in named:
        known = ", ".join(sorted(named)) or "none"
        raise CheckpointError(f"{origin}: no chat template {name!r}; it has: {known}; name one, or give a Jinja file")
    return named[name], origin
