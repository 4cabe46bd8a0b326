"""What a program imports: no more than its task needs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lema.startup import quick_imports

#: code that writes down, when the program ends, what it had imported
WATCH = "import atexit, sys\natexit.register(lambda: open('modules.txt', 'w').write('\\n'.join(sys.modules)))"


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
