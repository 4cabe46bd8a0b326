"""What lies beside the weights in a model's folder and goes with them to another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: configs, tokenizers, chat templates, code and vocabularies
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab", ".spm", ".bpe", ".py")
_TERMS = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_TEMPLATES = "additional_chat_templates"
#: transformers would load an adapter that lies in the folder onto the model; the report is about the weights there
_LEFT = ("adapter_config.json", "trainer_state.json", "quantization_report.json")


def files_beside(folder: Path) -> Iterator[Path]:
    """What is copied with a model whose weights are written anew, as paths below ``folder``: no weights, no index of
    them, no hidden files."""
    for path in sorted([*folder.iterdir(), *(folder / _TEMPLATES).glob("*.jinja")]):
        index = path.name.endswith(".index.json")
        kept = path.name.endswith(_SUFFIXES) or path.name.upper().startswith(_TERMS)
        if kept and not index and path.name not in _LEFT and not path.name.startswith(".") and path.is_file():
            yield path.relative_to(folder)
