"""Gradients with the native kernels, judged in fp64: no instructions lose what plain torch keeps."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from lema_cuda.testing import AMX


@pytest.mark.parametrize("variant", ["bf16", "fp16", "untied"])
def test_gradients_are_as_near_to_fp64_as_those_of_plain_torch(
    variant: str, native_instructions: str, llamas: Any, oracle: Any, tmp_path: Path
) -> None:
    folder = llamas.folder(variant, num_hidden_layers=2)
    ids = torch.randint(0, 128, (2, 11), generator=torch.Generator().manual_seed(3))
    steps = {}
    for backend in ("cpp", "python"):
        model = llamas.with_lora(folder, backend=backend, max_grad_norm=None)
        oracle.randomize(model)
        model.save_pretrained(str(tmp_path / "lora"))
        steps[backend] = oracle.step(model, ids)
        model.close()
    judge = oracle.in_fp64(llamas.peft(folder, tmp_path / "lora", attention="sdpa"))
    expected_loss, expected, _ = oracle.peft_step(judge, ids)
    errors = {backend: oracle.errors(gradients, expected).values() for backend, (_, gradients, _) in steps.items()}
    assert max(errors["cpp"]) <= 1.2 * max(errors["python"]) <= 2e-6
    assert median(errors["cpp"]) <= (0.9 if native_instructions == AMX else 1.2) * median(errors["python"])
    assert steps["cpp"][0] == pytest.approx(expected_loss, rel=1e-7)
