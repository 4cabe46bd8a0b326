"""Logits, loss and every LoRA gradient against transformers + PEFT.

Calibration, worst tensor over all cases here (relative, by norm): PEFT eager against PEFT SDPA differ by 2.2e-6, PEFT
eager against fp64 by 2.1e-6, lema against fp64 by 2.0e-6. So 1e-5 has room for rounding and for nothing else.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

CLOSE = 1e-5
VARIANTS = ["untied", "tied", "biased", "wide_heads", "tied_sharded", "bf16", "fp16", "llama3", "llama3_old"]
SELECTIONS = {
    "all_linear": {},
    "q_and_v": {"lora_target_modules": ["q_proj", "v_proj"]},
    "rslora": {"use_rslora": True, "lora_alpha": 8},
    "last_two": {"trainable_layers": ["last:2"]},
    "middle": {"trainable_layers": [1], "lora_target_modules": ["mlp.up_proj", "o_proj"]},
    "head": {"lora_target_modules": ["lm_head"]},
}


def token_ids(rows: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(3))


def check_against_peft(llamas, oracle, folder: Path, tmp_path: Path, ids, labels=None, mask=None, **options) -> None:
    """lema is within 1e-5 of PEFT eager in fp32, and no farther from fp64 than a few times PEFT eager is."""
    model = llamas.with_lora(folder, max_grad_norm=None, **options)
    loss, gradients, logits = oracle.step(model, ids, labels, mask, logits=True)
    lora = model.save_pretrained(tmp_path / "lora")
    theirs = oracle.peft_step(llamas.peft(folder, lora), ids, labels, mask)
    truth = oracle.peft_step(oracle.in_fp64(llamas.peft(folder, lora, "sdpa")), ids, labels, mask)

    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    assert oracle.relative(logits[real], theirs[2][real]) <= CLOSE
    assert loss == pytest.approx(theirs[0], rel=CLOSE)
    assert loss == pytest.approx(truth[0], rel=1e-6)
    errors = oracle.errors(gradients, theirs[1])
    assert max(errors.values()) <= CLOSE, max(errors, key=errors.get)
    ours = max(oracle.errors(gradients, truth[1]).values())
    assert ours <= CLOSE and ours <= 3 * max(oracle.errors(theirs[1], truth[1]).values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant, llamas, oracle, tmp_path) -> None:
    check_against_peft(llamas, oracle, llamas.folder(variant), tmp_path, token_ids(), batch_size=2)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_selection_with_all_activations_kept(selection, llamas, oracle, tmp_path) -> None:
    options = {"gradient_checkpointing": False, "batch_size": 2, **SELECTIONS[selection]}
    check_against_peft(llamas, oracle, llamas.folder("untied"), tmp_path, token_ids(), **options)


@pytest.mark.parametrize("selection", ["q_and_v", "last_two", "head"])
def test_every_selection_with_recomputation(selection, llamas, oracle, tmp_path) -> None:
    options = {"gradient_checkpointing": True, "batch_size": 2, **SELECTIONS[selection]}
    check_against_peft(llamas, oracle, llamas.folder("untied"), tmp_path, token_ids(), **options)


@pytest.mark.parametrize("variant", ["tied", "biased", "bf16"])
def test_matrices_in_row_blocks(variant, llamas, oracle, tmp_path, small_granules) -> None:
    folder = llamas.folder(variant)
    cut = llamas.cut(llamas.open(folder), small_granules)
    assert max(map(len, cut.layout.parts.values())) > 1
    check_against_peft(
        llamas, oracle, folder, tmp_path, token_ids(), batch_size=2, weights_ram=f"{cut.smallest_bytes}B"
    )


@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_padding_and_masked_labels(side, llamas, oracle, tmp_path) -> None:
    ids = token_ids(3, 12)
    mask = torch.ones_like(ids)
    if side != "left":
        mask[0, 9:] = 0
    if side != "right":
        mask[1, :5] = 0
    labels = ids.masked_fill(mask == 0, -100)
    # transformers lets the padding before a row's first token predict it; lema does not
    labels[1, :6] = -100
    labels[2, :6] = -100
    check_against_peft(llamas, oracle, llamas.folder("untied"), tmp_path, ids, labels, mask, batch_size=3)


def test_micro_batches_of_one_row(llamas, oracle, tmp_path) -> None:
    ids = token_ids(3, 12)
    mask = torch.ones_like(ids)
    mask[0, 4:], mask[2, 9:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    check_against_peft(llamas, oracle, llamas.folder("untied"), tmp_path, ids, labels, mask, batch_size=1)


def test_several_chunks_of_the_head(llamas, oracle, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("lema_core.runtime.head_loss._CHUNK_BYTES", 1)
    options = {"batch_size": 2, "lora_target_modules": ["lm_head", "down_proj"]}
    check_against_peft(llamas, oracle, llamas.folder("untied"), tmp_path, token_ids(2, 30), **options)
