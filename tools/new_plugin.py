"""Begin a plugin: plugins/lema-NAME, a model adapter with its tests, from the files of plugins/lema-qwen.

    python tools/new_plugin.py NAME [--into FOLDER]

NAME is an architecture's, in small letters, digits and single hyphens: falcon, deep-thought. The new adapter is Qwen2's
under the new name, and its tests pass; make it yours file by file, as its README says. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "plugins/lema-qwen"

#: what is copied, and where it goes
FILES = {
    "pyproject.toml": "pyproject.toml",
    "src/lema_qwen/__init__.py": "src/lema_{module}/__init__.py",
    "src/lema_qwen/py.typed": "src/lema_{module}/py.typed",
    "src/lema_qwen/plugin.py": "src/lema_{module}/plugin.py",
    "src/lema_qwen/qwen2.py": "src/lema_{module}/{module}.py",
    "src/lema_qwen/conf/__init__.py": "src/lema_{module}/conf/__init__.py",
    "src/lema_qwen/conf/model/qwen2_5_0_5b.yaml": "src/lema_{module}/conf/model/{module}.yaml",
    "tests/test_qwen2_suite.py": "tests/test_{module}_suite.py",
    "tests/test_qwen_plugin.py": "tests/test_{module}_plugin.py",
}
#: what is renamed, in this order. The tests' model_type stays: it is what transformers compares with.
NAMES = {
    "Qwen2 and Qwen3 for lema": "{title} for lema",
    "Qwen2.5 0.5B Instruct from the Hub": "{title} from the Hub",
    "Qwen/Qwen2.5-0.5B-Instruct": "OWNER/{name}",
    "qwen2_5_0_5b": "{module}",
    "model_type: qwen2": "model_type: {module}",
    'Architecture("qwen2", model_types=("qwen2",)': 'Architecture("{module}", model_types=("{module}",)',
    "lema_qwen.qwen2": "lema_{module}.{module}",
    "lema_qwen": "lema_{module}",
    "lema-qwen": "lema-{name}",
    "qwen = ": "{name} = ",
    "``qwen``": "``{name}``",
    "Qwen2Adapter": "{title}Adapter",
    "Qwen2Config": "{title}Config",
    "TestQwen2": "Test{title}",
}
#: lines that are left out: the example has two architectures
DROPPED = 'Architecture("qwen3"'

README = """\
# lema-{name}

{title} for lema. Install it beside lema and it is there:

```sh
pip install ./packages/lema-core ./plugins/lema-{name}
python -m lema +model={module} train_file=rows.jsonl
```

So far this is Qwen2 under another name. To make it {title}:

1. `src/lema_{module}/{module}.py`: the config, the tensors by transformers' names, the block.
2. `src/lema_{module}/plugin.py`: `model_types`, as the model's `config.json` has them.
3. `tests/test_{module}_suite.py`: `model_type`, which says what to compare with, and the variants worth trying.
4. `src/lema_{module}/conf/model/{module}.yaml`: the Hub name, the config and the size of a model that people have.
5. This page and `CHANGELOG.md`.

## Tests

`python -m pytest plugins/lema-{name}`, or `nox -s plugins -- lema-{name}` in an environment with what it declares.
"""
CHANGELOG = """\
# Changelog

## 0.1.0

- {title}.
"""


def refused(name: str, into: Path) -> str | None:
    """Why there cannot be a plugin of this name there, or None."""
    if name.startswith("lema"):
        return f"{name!r} would become lema-{name}: give the name without lema"
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        return f"{name!r} is no name for a plugin: small letters, digits and single hyphens expected, a letter first"
    if keyword.iskeyword(name) or name in ("conf", "plugin"):
        return f"{name!r} cannot name a module of the plugin; take another name"
    for folder in (into / f"lema-{name}", ROOT / f"packages/lema-{name}"):
        if folder.exists():
            return f"{folder} exists already; take another name or remove it"
    return None


def scaffold(name: str, into: Path) -> Path:
    """Write the plugin; returns its folder."""
    title = "".join(part.capitalize() for part in name.split("-"))
    names = {"name": name, "module": name.replace("-", "_"), "title": title}
    contents = {"README.md": README.format(**names), "CHANGELOG.md": CHANGELOG.format(**names)}
    for source, target in FILES.items():
        lines = (EXAMPLE / source).read_text(encoding="utf-8").splitlines(keepends=True)
        text = "".join(line for line in lines if DROPPED not in line)
        for old, new in NAMES.items():
            text = text.replace(old, new.format(**names))
        contents[target.format(**names)] = text
    folder = into / f"lema-{name}"
    for target, text in contents.items():
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--into", metavar="FOLDER", type=Path, default=ROOT / "plugins", help="where lema-NAME goes")
    given = parser.parse_args(arguments)
    why = refused(given.name, given.into)
    if why is not None:
        print(why, file=sys.stderr)
        return 2
    folder = scaffold(given.name, given.into)
    print(f"{folder} is there; its README says what to change. Next:")
    print(f"    pip install --no-deps -e {folder}")
    print(f"    ruff check --fix {folder} && ruff format {folder}")
    print(f"    python -m pytest {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
