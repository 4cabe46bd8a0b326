"""Quantized weights stream and compute: the same bits whatever the windows, the numbers of what they decode to."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lema_core.checkpoint import TensorInfo, read_tensor
from lema_core.checkpoint.reading import read_rows
from lema_core.device import CpuDevice, Device
from lema_core.errors import CheckpointError
from lema_core.ops.linear import LinearKernel
from lema_core.quantization.block import QuantizedBlock
from lema_core.quantization.formats import wire_formats
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.generation import generate_greedy
from lema_core.runtime.runner import TrainPass
from lema_core.store.granules import SECTOR_BYTES
from lema_core.store.model import cut_model
from lema_core.testing.checking import CheckingStore
from lema_core.testing.comparing import assert_all_close, assert_equal
from lema_core.testing.quantizing import encoded, quantize_folder
from lema_core.testing.simulated import SimulatedAccelerator
from lema_core.testing.toy import (
    PlainToy,
    ToyAdapter,
    ToyConfig,
    granules_of,
    linear_names,
    open_toy,
    toy_tensors,
    toy_updates,
    write_toy,
)

GRANULE_BYTES = 1500
FORMATS = list(wire_formats())
UNTIED = ToyConfig(hidden_size=64, feed_forward=64, n_layers=2)
#: every width odd, so that rows end in the middle of a byte and of a group
ODD = ToyConfig(hidden_size=20, feed_forward=33, n_layers=2, vocab_size=35, tied=True)
IDS = torch.arange(14).view(2, 7) * 5 % 33, torch.arange(5).view(1, 5) + 9
BATCHES = tuple(TokenBatch.of(ids, labels=ids) for ids in IDS)


def quantized(tmp_path: Path, config: ToyConfig, form: str) -> dict[str, TensorInfo]:
    plain = tmp_path / "plain"
    plain.mkdir()
    write_toy(plain, config, 3)
    quantize_folder(plain, tmp_path / form, form)
    return toy_tensors(tmp_path / form, config)


def run(
    config: ToyConfig, tensors: dict[str, TensorInfo], budget_slots: int | None, device: Device | None = None
) -> dict[str, Tensor]:
    """Loss and gradients of two steps, logits, and what is generated."""
    cut, updates = granules_of(config, tensors, GRANULE_BYTES), toy_updates(config, linear_names(config))
    in_ram = on_device = None
    if budget_slots is not None:
        on_device = budget_slots * cut.layout.slot_bytes
        in_ram = cut.smallest_bytes - cut.layout.slot_bytes + on_device
    make = partial(CheckingStore, tensors)
    runner = open_toy(
        config, tensors, device or CpuDevice(), updates, in_ram, on_device, GRANULE_BYTES, make_store=make
    )
    found: dict[str, Tensor] = {}
    with runner.store:
        for step in range(2):
            found[f"loss {step}"] = torch.tensor(runner.train_step(BATCHES, TrainPass(0, 7), step))
        for name, update in updates.items():
            found[f"{name}.A"], found[f"{name}.B"] = update.lora_A.grad, update.lora_B.grad
        found["logits"] = runner.logits(BATCHES[0])
        found["ids"] = torch.tensor(generate_greedy(runner, [[1, 2, 3], [4, 5, 6]], 5, []))
    return found


@pytest.mark.parametrize(
    ("config", "form"),
    [
        *((UNTIED, form) for form in ("int8", "int4-32", "nf4")),
        *(pytest.param(UNTIED, form, marks=pytest.mark.slow) for form in ("int4-64", "int4-128")),
        (ODD, "int8"),
        (ODD, "int4-32"),
    ],
    ids=lambda each: each if isinstance(each, str) else "tied and odd" if each.tied else "untied",
)
def test_streamed_equals_resident_and_what_it_decodes_to(tmp_path: Path, config: ToyConfig, form: str) -> None:
    tensors = quantized(tmp_path, config, form)
    streamed = run(config, tensors, 2)
    assert_equal("streamed", streamed, run(config, tensors, None))
    updates = toy_updates(config, linear_names(config))
    weights = {name: read_tensor(info) for name, info in tensors.items()}
    model = PlainToy(config, weights, updates)
    loss = sum(model.loss_sum(b.input_ids, b.labels, b.attention_mask) for b in BATCHES)
    mean = loss / sum(b.n_targets for b in BATCHES)
    (2 * mean).backward()  # of two steps
    expected = {"loss 0": mean, "loss 1": mean, "logits": model.logits(BATCHES[0].input_ids)}
    for name, update in updates.items():
        expected[f"{name}.A"], expected[f"{name}.B"] = update.lora_A.grad, update.lora_B.grad
    expected["ids"] = streamed["ids"]
    # the toy's attention is sharp: fp32 rounding grows in it
    assert_all_close("against plain torch", streamed, expected, 1e-4)


@pytest.mark.parametrize("form", ["int8", "int4-32"])
def test_on_an_accelerator(tmp_path: Path, form: str) -> None:
    tensors = quantized(tmp_path, UNTIED, form)
    device = SimulatedAccelerator(latency_s=1e-4, compute_lag_s=1e-4)
    found = run(UNTIED, tensors, 2, device)
    assert device.overwrites_while_read == 0
    assert_equal("on the device", found, run(UNTIED, tensors, None))


@pytest.mark.parametrize("form", FORMATS)
def test_what_moves_is_what_lies_in_the_files(tmp_path: Path, form: str) -> None:
    """Payload and scales of every row once, with whole sectors around runs of them and nothing else."""
    tensors = quantized(tmp_path, UNTIED, form)
    cut = granules_of(UNTIED, tensors, GRANULE_BYTES)
    covered: dict[tuple[str, str], int] = {}
    for name, parts in cut.layout.parts.items():
        for part in parts:
            reads = cut.layout.granules[part.granule].reads
            for piece, stored in zip(part.stored, tensors[name].stored, strict=True):
                row_bytes = stored.nbytes // stored.shape[0]
                first = stored.segment.offset + part.start * row_bytes
                nbytes = prod(piece.shape) * piece.dtype.itemsize
                assert (piece.dtype, piece.shape) == (stored.dtype, (part.stop - part.start, *stored.shape[1:]))
                (read,) = [r for r in reads if r.slot_offset <= piece.offset < r.slot_offset + r.nbytes]
                assert read.file_offset + piece.offset - read.slot_offset == first
                assert piece.offset + nbytes <= read.slot_offset + read.needed_bytes
                covered[name, stored.name] = covered.get((name, stored.name), 0) + nbytes
    for (name, stored_name), nbytes in covered.items():
        assert nbytes == next(each.nbytes for each in tensors[name].stored if each.name == stored_name)
    for granule in cut.layout.granules:
        pieces = [p for parts in cut.layout.parts.values() for p in parts if p.granule == granule.index]
        wanted = sum(prod(piece.shape) * piece.dtype.itemsize for part in pieces for piece in part.stored)
        n_pieces = sum(len(part.stored) for part in pieces)
        assert granule.nbytes <= wanted + n_pieces * 4 * SECTOR_BYTES


def test_scales_that_are_none_are_met_when_they_are_read(tmp_path: Path) -> None:
    tensors = quantized(tmp_path, UNTIED, "int8")
    scale = tensors["model.layers.1.up.weight"].quantized.parts[1]
    with open(scale.segment.path, "r+b") as file:
        file.seek(scale.segment.offset + 8)
        file.write(b"\xff\xff\xff\x7f")  # NaN
    with pytest.raises(CheckpointError, match=r"model.layers.1.up.weight'?: int8.*infinite or NaN") as caught:
        run(UNTIED, tensors, 2)
    assert str(scale.segment.path) in str(caught.value)


def test_a_row_of_an_embedding_whose_scale_is_none(tmp_path: Path) -> None:
    tensors = quantized(tmp_path, UNTIED, "int8")
    scale = tensors["model.tokens.weight"].quantized.parts[1]
    with open(scale.segment.path, "r+b") as file:
        file.seek(scale.segment.offset + 4 * 3)
        file.write(b"\x00\x00\x80\xbf")  # -1
    cut = granules_of(UNTIED, tensors, GRANULE_BYTES)
    runner = open_toy(UNTIED, tensors, CpuDevice(), ram_bytes=cut.smallest_bytes, max_granule_bytes=GRANULE_BYTES)
    with runner.store as store:
        read = partial(store.rows, "model.tokens.weight", dtype=torch.float32)
        before = read(torch.tensor([0, 1]))
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"model.tokens.weight.*-1, below zero"):
                read(torch.tensor([2, 3]))
        assert read(torch.tensor([0, 1])).equal(before)
        assert read(torch.tensor([30])).equal(read_rows(tensors["model.tokens.weight"], 30, 31))


def test_what_trains_is_not_quantized(tmp_path: Path) -> None:
    tensors = quantized(tmp_path, UNTIED, "int4-32")
    with pytest.raises(CheckpointError, match=r"model.layers.0.q.weight.*is to train and is int4-32.*LoRA"):
        cut_model(ToyAdapter(UNTIED), tensors, trained=["model.layers.0.q.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMATS)
def test_products_with_a_quantized_block(form: str, dtype: torch.dtype) -> None:
    """The bits of a product with the decoded numbers, forward and backward, with and without an update."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = 70, 128
    weight_RK = torch.randn(rows, columns, generator=generator)
    block = QuantizedBlock(wire_formats()[form], (rows, columns), encoded(weight_RK, form))
    decoded = torch.empty(rows, columns)
    block.decode(decoded)
    decoded = decoded.to(dtype)
    x_KN, dy_RN = (torch.randn(n, 9, generator=generator).to(dtype) for n in (columns, rows))
    low_rank, inner = torch.randn(rows, 3, generator=generator), torch.randn(3, 9, generator=generator).to(dtype)
    found, expected = [], []
    for weight, into in ((block, found), (decoded, expected)):
        kernel = LinearKernel()
        y_RN, dx_KN = torch.empty(rows, 9, dtype=dtype), torch.ones(columns, 9, dtype=dtype)
        kernel.forward(weight, x_KN, y_RN, (low_rank, inner, 0.5))
        kernel.input_gradient(weight, dy_RN, dx_KN, first=False)
        into += [y_RN, dx_KN]
    assert all(map(torch.equal, found, expected))
