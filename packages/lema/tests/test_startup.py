"""What a program imports: no more than its task needs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lema.startup import quick_imports

#: code that writes down, when the program ends, what it had imported
WATCH = "import atexit, sys\natexit.register(lambda: open('modules.txt', 'w').write('\\n'.join(sys.modules)))"
#: torch's compiler and what only it needs: 100 MB and seconds
COMPILER = {"torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy", "torch.onnx"}
#: none of lema's business
FOREIGN = {"transformers", "peft", "accelerate", "huggingface_hub", "matplotlib", "pandas"}


def _imported(lema: Any, *arguments: object, code: int = 0) -> set[str]:
    child = lema.run(*arguments, exact=True, before=WATCH)
    assert child.code == code, child.err
    return set((lema.cwd / "modules.txt").read_text().splitlines())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["--version"], 0), (["learning_rat=1"], 2), (["+model=smolm2"], 2), (["task=train"], 2)],
)
def test_help_and_a_wrong_option_need_no_torch(arguments: list[str], code: int, lema: Any) -> None:
    imported = _imported(lema, *arguments, code=code)
    unwanted = {"torch", "numpy", "rich", "tokenizers", "jinja2", "lema.tasks"}
    if arguments[0].startswith("--"):
        unwanted |= {"hydra", "omegaconf", "yaml"}
    assert imported & unwanted == set()


def test_training_on_ids_imports_neither_torchs_compiler_nor_a_tokenizer(
    lema: Any, make_model: Any, make_rows: Any
) -> None:
    model = make_model(lema.cwd / "model")
    rows = make_rows(lema.cwd / "rows.jsonl", [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 8, 7]}])
    options = [f"model_name_or_path={model}", f"train_file={rows}", "output_dir=out", "max_steps=2", "lora_rank=2"]
    imported = _imported(lema, *options)
    assert "torch" in imported
    assert imported & (COMPILER | FOREIGN | {"tokenizers", "jinja2", "rich"}) == set()


def test_training_on_chats_and_generating_import_nothing_of_torchs_compiler(
    lema: Any, tiny_llama: Path, make_rows: Any, chats: Any
) -> None:
    rows = make_rows(lema.cwd / "rows.jsonl", chats(4))
    options = [f"model_name_or_path={tiny_llama}", "output_dir=out", "lora_rank=2", "lora_dropout=0.1"]
    trained = _imported(lema, *options, f"train_file={rows}", f"eval_file={rows}", "max_steps=2", "batch_size=2")
    assert {"torch", "tokenizers", "jinja2"} <= trained
    assert trained & (COMPILER | FOREIGN | {"rich"}) == set()
    generated = _imported(lema, *options, "task=generate", "prompt=say", "max_new_tokens=2")
    assert generated & (COMPILER | FOREIGN | {"rich"}) == set()


def test_merging_imports_neither_a_tokenizer_nor_what_trains(lema: Any, tiny_llama: Path, make_rows: Any) -> None:
    rows = make_rows(lema.cwd / "rows.jsonl", [{"input_ids": [5, 6, 7, 8]}])
    lema.ok(f"model_name_or_path={tiny_llama}", f"train_file={rows}", "output_dir=out", "max_steps=1", "lora_rank=2")
    imported = _imported(lema, "task=merge", "lora_path=out/checkpoint-1", "output_dir=merged")
    unwanted = {"tokenizers", "jinja2", "rich", "lema_core.runtime.runner", "lema_train.trainer", "lema.tasks"}
    assert "torch" in imported and imported & (COMPILER | FOREIGN | unwanted) == set()


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    yield
    gc.unfreeze()


def test_nothing_imported_is_collected_and_the_collector_goes_on_after_an_error(without_torch: None) -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), quick_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() > frozen


def test_beside_a_program_that_has_torch_nothing_changes() -> None:
    frozen = gc.get_freeze_count()
    with quick_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
