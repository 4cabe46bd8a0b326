"""Every backend and number of bits, and a plugin's format, through LemaModel: LoRA on them against PEFT."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lema import LemaModel
from lema_core.checkpoint import read_manifest, read_tensor
from lema_core.plugins import get_plugin_manager
from lema_core.testing.comparing import assert_all_close, assert_equal

IDS = torch.arange(26).view(2, 13) * 7 % 128
slow = pytest.mark.slow
#: (backend, bits): the format of linears, and what a warning says of the fallback
SERVED = {
    ("custom", 8): ("int8", None),
    ("custom", 4): ("int4-32", None),
    ("torchao", 8): ("int8", None),
    ("torchao", 4): ("int4-32", "quant_backend=torchao: its weights of 4 bits"),
    ("quanto", 8): ("int8", None),
    ("quanto", 4): ("int4-32", "quant_backend=quanto: its weights of 4 bits"),
    ("bitsandbytes", 8): ("int8", None),
    ("bitsandbytes", 4): ("nf4", None),
    ("fp8", 8): ("fp8-e4m3", None),
    ("fp8", 4): ("int4-32", "quant_backend=fp8: has no 4 bits, only 8 bits: fp8 (fp8-e4m3)"),
}
#: the others are slow tests
QUICK = (("torchao", 8), ("quanto", 4), ("bitsandbytes", 4), ("fp8", 8))


def skip_without(backend: str, bits: int) -> None:
    records = [each for each in get_plugin_manager().quant_backends() if (each.name, each.bits) == (backend, 8)]
    reason = records[0].unavailable("cpu") if records else "its plugin is not installed"
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")


def decoded_folder(quantized: Path, target: Path) -> Path:
    """The same numbers in fp32, for PEFT."""
    target.mkdir()
    for path in quantized.glob("*.json"):
        if not path.name.endswith("index.json"):
            shutil.copy(path, target)
    tensors = {name: read_tensor(info) for name, info in read_manifest(quantized).tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "lema"
    (target / "config.json").write_text(json.dumps(config))
    return target


def step(model: LemaModel, oracle: Any) -> dict[str, Tensor]:
    loss, gradients, logits = oracle.step(model, IDS, IDS, logits=True)
    return {"loss": torch.tensor(loss), "logits": logits, **gradients}


@pytest.mark.parametrize(
    ("backend", "bits", "engine"),
    [
        *(pytest.param(*key, "python", marks=() if key in QUICK else slow) for key in SERVED),
        pytest.param("fp8", 8, "cpp", marks=slow),
    ],
)
def test_lora_on_every_backend_is_peft_on_its_numbers(
    llamas: Any, oracle: Any, tmp_path: Path, backend: str, bits: int, engine: str
) -> None:
    skip_without(backend, bits)
    form, said = SERVED[backend, bits]
    folder = llamas.folder("untied", num_hidden_layers=2, intermediate_size=130)
    how = {"weights_bits": bits, "quant_backend": backend, "backend": engine, "max_grad_norm": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = llamas.with_lora(folder, strategy="streaming", weights_ram="150KB", **how)
    lines = [str(each.message) for each in caught if str(each.message).startswith("quant_backend=")]
    assert len(lines) == (said is not None) and all(line.startswith(said) for line in lines), lines
    tensors = read_manifest(model.quantized.path).tensors
    formats = {name: info.quantized.format.name for name, info in tensors.items() if info.quantized is not None}
    assert formats["model.layers.0.self_attn.q_proj.weight"] == form
    # NF4 has no width of 130; nothing is left as it is.
    assert formats["model.layers.1.mlp.down_proj.weight"] == ("int4-32" if form == "nf4" else form)
    streamed = step(model, oracle)
    assert_equal("resident", step(llamas.with_lora(folder, strategy="resident", **how), oracle), streamed)
    model.save_pretrained(tmp_path / "lora")
    peft = llamas.peft(decoded_folder(model.quantized.path, tmp_path / "plain"), tmp_path / "lora")
    loss, gradients, logits = oracle.peft_step(peft, IDS, IDS)
    assert_all_close("PEFT", streamed, {"loss": torch.tensor(loss), "logits": logits, **gradients}, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=slow)])
def test_lora_on_nf4_is_peft_with_bitsandbytes(llamas: Any, oracle: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """The same packed weights, in bitsandbytes' own layers under PEFT, computed in fp32."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    folder = llamas.folder("untied", num_hidden_layers=2, intermediate_size=128, dtype=dtype)
    how = {"weights_bits": 4, "quant_backend": "bitsandbytes", "backend": "python", "max_grad_norm": None}
    model = llamas.with_lora(folder, **how)
    streamed = step(model, oracle)
    model.save_pretrained(tmp_path / "lora")
    peft = llamas.peft(decoded_folder(model.quantized.path, tmp_path / "plain"), tmp_path / "lora")
    tensors = read_manifest(model.quantized.path).tensors
    replaced = 0
    for name, module in list(peft.named_modules()):
        if isinstance(module, torch.nn.Linear) and name.endswith("base_layer"):
            info = tensors[name.removeprefix("base_model.model.").removesuffix("base_layer") + "weight"]
            weight = bitsandbytes.nn.Params4bit(
                _source(folder, info.name).float(),
                requires_grad=False,
                blocksize=64,
                compress_statistics=False,
                quant_type="nf4",
            )
            layer = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            layer.weight = weight.to("cpu")
            packed = read_tensor(info.quantized.parts[0])
            assert layer.weight.data.flatten().equal(packed.flatten()), f"{info.name} is packed otherwise"
            parent, _, last = name.rpartition(".")
            setattr(peft.get_submodule(parent), last, layer)
            replaced += 1
    assert replaced == 14
    loss, gradients, logits = oracle.peft_step(peft, IDS, IDS)
    assert_all_close(
        "PEFT on bitsandbytes", streamed, {"loss": torch.tensor(loss), "logits": logits, **gradients}, 1e-4
    )


def _source(folder: Path, name: str) -> Tensor:
    return read_tensor(read_manifest(folder).tensors[name])
