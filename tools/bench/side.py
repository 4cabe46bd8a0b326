"""What both children share: they answer on standard output, one JSON object a line, and nothing else gets there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(open_model: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[], dict[str, Any]]]]) -> None:
    """Open the model that the first argument (JSON) describes, answer what it is, and step at every line that comes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # progress bars and prints of libraries
    options = json.loads(sys.argv[1])
    ready, step = open_model(options)
    answers.write(json.dumps(ready) + "\n")
    for _ in sys.stdin:
        answers.write(json.dumps(step()) + "\n")


def token_ids(options: dict[str, Any], vocab_size: int):
    """The rows that every side trains on: int64 [rows, tokens]."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab_size, (options.get("rows", 1), options["tokens"]), generator=generator)
