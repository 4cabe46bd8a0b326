"""The part of AdapterSuite in which a model's weights are quantized in its files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lema_core.device import Device
from lema_core.runtime.generation import generate_greedy
from lema_core.testing.adapter_case import AdapterCase, Shape, batch_of, train
from lema_core.testing.comparing import assert_all_close, assert_equal
from lema_core.testing.quantizing import quantize_folder
from lema_core.testing.simulated import SimulatedAccelerator

_SHAPES: tuple[Shape, ...] = ((2, 5, "left"), (1, 11, ""))
_NEW_TOKENS = 4


class QuantizedSuite(AdapterCase):
    """Every matrix of a model in each of ``formats``, in int8 where it cannot have one."""

    def test_quantized_weights(self, variant: str, form: str) -> None:
        """LoRA on every linear of a model whose matrices are all quantized: no window changes a bit, on the CPU or
        beside it, and the numbers are those of the same model in fp32 files that hold what they decode to."""
        source = self.folder(variant)
        path = quantize_folder(source, self.own / "quantized", form)
        decoded = quantize_folder(source, self.own / "decoded", form, plain=True)
        _, bound = self.bound(path)
        matrices = [info for info in bound.values() if len(info.shape) == 2]
        assert matrices and all(info.quantized is not None for info in matrices)
        resident = self._computed(path, True)
        assert_equal("streamed", self._computed(path, False), resident)
        device = SimulatedAccelerator(latency_s=1e-4)
        assert_equal("on an accelerator", self._computed(path, False, device), resident)
        assert device.overwrites_while_read == 0
        plain = self._computed(decoded, True)
        ids, expected_ids = resident.pop("new ids"), plain.pop("new ids")
        assert ids.equal(expected_ids), f"generated {ids.tolist()}, expected {expected_ids.tolist()}"
        assert_all_close("against the decoded numbers", resident, plain)

    def _computed(self, folder: Path, resident: bool, device: Device | None = None) -> dict[str, Tensor]:
        adapter, _ = self.bound(folder)
        updates = self.lora(adapter)
        runner = self.open(folder, updates, resident, device)
        batches = [batch_of(shape, adapter.vocab_size, seed) for seed, shape in enumerate(_SHAPES)]
        found = train(runner, updates, batches, 0)
        found["new ids"] = torch.tensor(generate_greedy(runner, [[3, 1, 4], [1, 5]], _NEW_TOKENS, chunk_size=4))
        runner.close()
        return found
