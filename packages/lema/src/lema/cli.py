"""The command line: ``python -m lema +model=NAME key=value ...``. torch is imported by the tasks that need it."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from importlib import metadata
from typing import Any

from lema.compose import compose, group_choices
from lema.config import LemaConfig
from lema.errors_display import report
from lema.startup import quick_imports
from lema_core.budgets import ALLOWED_AMOUNTS
from lema_core.errors import ConfigError

USAGE = """\
usage: python -m lema +model=NAME key=value ...
       python -m lema --config FILE.yaml key=value ...
       python -m lema --help | --version

Train, evaluate and run language models larger than memory. Any option below may be given on the command line as
key=value, or in a YAML file as key: value; the command line wins. Exit codes: 0 done, 2 an option is wrong, 1 another
error, 130 Ctrl-C.

  python -m lema +model=smollm2_135m +recipe=demo
  python -m lema +model=smollm2_135m train_file=rows.jsonl lora_rank=32 output_dir=runs/first
  python -m lema model_name_or_path=./my-model task=generate prompt="Once upon a time"
  python -m lema model_name_or_path=org/name@revision train_file=rows.jsonl
  python -m lema +model=tinyllama init=random model_overrides={hidden_size:64} train_file=rows.jsonl max_steps=2
  python -m lema +model=smollm2_135m quant=torchao train_file=rows.jsonl
  python -m lema +model=smollm2_135m task=quantize weights_bits=4 output_dir=smollm2-int4
  python -m lema task=merge lora_path=runs/first/checkpoint-500 output_dir=merged
  python -m lema +model=smollm2_135m task=plan batch_size=4
  python -m lema task=doctor"""

ONE_MEMORY = "On a CPU, RAM is the device's memory: of an option's two halves, _vram and _ram, the smaller one counts."

_FLAGS = ("--help", "--version", "--config")


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Never raises for what a user can do wrong."""
    debug = any(re.fullmatch(r"\+{0,2}debug=true", token, re.IGNORECASE) for token in argv)
    try:
        if not argv or "--help" in argv or "-h" in argv:
            print(help_text(shutil.get_terminal_size().columns))
        elif "--version" in argv:
            print(f"lema {metadata.version('lema')}")
        else:
            _show_warnings_in_one_line()
            config = compose(*_split(argv))
            debug = config.debug
            _run(config)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (Exception, KeyboardInterrupt) as error:
        return report(error, debug)
    return 0


def _run(config: LemaConfig) -> None:
    if config.task == "doctor":
        from lema.doctor import print_report

        print_report(sys.stdout, config)
        return
    check_complete(config)
    if config.task == "plan":
        with quick_imports():
            from lema.plan_task import print_plan

        print_plan(config, sys.stdout)
        return
    with quick_imports():
        if config.task == "merge":
            from lema.merge_task import merge as run
        elif config.task == "quantize":
            from lema.quantize_task import quantize as run
        else:
            from lema import tasks

            run = getattr(tasks, config.task)
    from lema.display import print_summary

    print_summary(run(config), sys.stdout)


def _show_warnings_in_one_line() -> None:
    logging.basicConfig(format="lema: %(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    warnings.formatwarning = lambda message, *_, **__: f"lema: WARNING: {message}\n"


def _split(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Overrides, and the file of ``--config FILE`` or ``--config=FILE``."""
    overrides: list[str] = []
    config_file: str | None = None
    tokens = iter(argv)
    for token in tokens:
        flag, equals, value = token.partition("=")
        if flag == "--config":
            config_file = value if equals else next(tokens, None)
            if not config_file:
                raise ConfigError("--config: needs the path of a YAML file")
        elif token.startswith("-"):
            name = flag.lstrip("-").replace("-", "_")
            hint = f"write {name}={value or '...'}" if name in LemaConfig.options() else f"known: {', '.join(_FLAGS)}"
            raise ConfigError(f"unknown flag {flag!r}; {hint}")
        else:
            overrides.append(token)
    return overrides, config_file


def check_complete(config: LemaConfig) -> None:
    """Raise ConfigError when the task lacks an option it cannot run without."""
    if config.task == "merge":
        _check_merge(config)
    elif config.task == "quantize":
        _check_quantize(config)
    if config.task != "merge" and config.model_name_or_path is None and config.hf_config is None:
        models = ", ".join(group_choices().get("model", {})) or "none is installed"
        raise ConfigError(
            f"task={config.task} needs a model: +model=NAME ({models}), or model_name_or_path=FOLDER or a Hub name"
        )
    if config.lora_path is not None and config.delta_path is not None:
        raise ConfigError(f"task={config.task} takes lora_path or delta_path, and both are given: leave one out")
    if config.task == "train" and config.train_file is None:
        raise ConfigError(
            "task=train needs rows: train_file=FILE.jsonl, or train_file=demo for the set that lema brings"
        )
    if config.task == "generate" and config.prompt is None:
        raise ConfigError('task=generate needs a prompt: prompt="Once upon a time"')
    if config.task == "evaluate" and config.eval_file is None and not (config.train_file and config.eval_split):
        raise ConfigError(
            "task=evaluate needs rows: eval_file=FILE.jsonl, or train_file=FILE.jsonl with eval_split=0.1"
        )


def _check_merge(config: LemaConfig) -> None:
    """A merge finds its base where the trained weights say, and never writes to where a run's checkpoints would go."""
    if config.lora_path is None and config.delta_path is None:
        raise ConfigError(
            "task=merge needs trained weights: lora_path=FOLDER, a PEFT folder or a checkpoint of a run, or "
            "delta_path=FOLDER, a checkpoint of a run that trained whole weights"
        )
    if config.output_dir == LemaConfig().output_dir:
        raise ConfigError("task=merge needs a folder of its own: output_dir=FOLDER")


def _check_quantize(config: LemaConfig) -> None:
    if config.weights_bits is None:
        raise ConfigError("task=quantize needs to know how far: weights_bits=8 or weights_bits=4")
    if config.output_dir == LemaConfig().output_dir:
        raise ConfigError("task=quantize needs a folder of its own: output_dir=FOLDER")


def help_text(width: int) -> str:
    """What --help prints: usage, the choices of every group, every option with its default, grouped."""
    width = max(60, min(width, 120))
    parts = [USAGE]
    for group, choices in group_choices().items():
        lines = [_entry(f"+{group}={choice.name}", choice.about, width) for choice in choices.values()]
        parts.append("\n".join([f"Choices of {group}:", *lines]))
    sections: dict[str, list[str]] = {}
    for field in fields(LemaConfig):
        option = LemaConfig.option(field.name)
        default = [] if callable(field.default_factory) else field.default
        about = option.help + (f" [{option.allowed}]" if option.brief else "")
        sections.setdefault(option.group, []).append(_entry(f"{field.name}={_shown_default(default)}", about, width))
    parts += ["\n".join([f"{title}:", *lines]) for title, lines in sections.items()]
    parts.append(textwrap.fill(f"Amounts of memory: {ALLOWED_AMOUNTS}. {ONE_MEMORY}", width))
    return "\n\n".join(parts)


def _entry(name: str, about: str, width: int) -> str:
    lines = textwrap.wrap(about, width - 31) or [""]
    head = [f"  {name:<28} {lines[0]}"] if len(name) <= 28 else [f"  {name}", f"{'':31}{lines[0]}"]
    return "\n".join(head + [f"{'':31}{line}" for line in lines[1:]])


def _shown_default(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    words = {None: "null", True: "true", False: "false"}
    return (
        words[value]
        if value is None or isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
