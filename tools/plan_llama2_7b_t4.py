"""Llama-2-7B on an NVIDIA T4, planned: device peak and step time beside those that LEMA published, in a Markdown table.

LoRA r=16 on all linears, fp16, as in LEMA's benchmark (github.com/Pomilon/LEMA, docs/BENCHMARK_RESULTS.md). No weight
is read: the model is a header, and a file of 13.5 GB without a byte on the disk. The same for one row:

    python -m lema task=plan model_name_or_path=FOLDER hardware=t4 batch_size=1 max_seq_length=128 device_budget=2.9GB

    python tools/plan_llama2_7b_t4.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import NamedTuple

from lema import LemaConfig, LemaModel
from lema.planner import RunPlan, named_machine
from lema.prediction import tier_memory
from lema_core.planning.hardware import named_hardware
from lema_core.planning.predict import smallest_memory
from lema_models.llama import LlamaAdapter

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float16",
}
_RESOLUTION_BYTES = 10_000_000


class Published(NamedTuple):
    """A run of LEMA's: rows and tokens, GB of VRAM, seconds a step."""

    rows: int
    tokens: int
    peak_gb: float
    step_s: float


PUBLISHED = (
    Published(1, 128, 2.9, 3.92),
    Published(2, 512, 3.8, 4.92),
    Published(8, 512, 6.6, 12.8),
    Published(1, 2048, 6.3, 8.41),
)


def write_header(folder: Path) -> Path:
    """A model folder whose weights are a hole in a file."""
    entries, stop = {}, 0
    for spec in LlamaAdapter.from_hf_config(LLAMA_2_7B).tensors():
        start, stop = stop, stop + 2 * prod(spec.shape)
        entries[spec.name] = {"dtype": "F16", "shape": list(spec.shape), "data_offsets": [start, stop]}
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % 4096)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + stop)
    (folder / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return folder


def planned(folder: Path, run: Published, device_budget: str) -> RunPlan:
    config = LemaConfig(
        model_name_or_path=str(folder),
        device="cpu",
        lora_rank=16,
        batch_size=run.rows,
        max_seq_length=run.tokens,
        device_budget=device_budget,
    )
    with LemaModel(config) as model:
        model.initialize_lora()
        return model.plan(named_machine(config, named_hardware("t4")))


def told(plan: RunPlan) -> str:
    """``2.9 GB | 1.85 s | link``."""
    step = plan.prediction
    return f"{tier_memory(plan)['device'].total / 1e9:.1f} GB | {step.step_s:.2f} s | {step.bound_by}"


def row(folder: Path, run: Published) -> str:
    whole = planned(folder, run, "auto")
    same = planned(folder, run, f"{run.peak_gb}GB")
    least = smallest_memory(
        lambda device: whole.step_s(device=device), 0, whole.machine.device_free, run.step_s, _RESOLUTION_BYTES
    )
    as_fast = planned(folder, run, f"{least}B")
    published = f"{run.rows} x {run.tokens} | {run.peak_gb} GB | {run.step_s} s"
    return f"| {published} | {told(same)} | {told(whole)} | {told(as_fast)} |"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lema-7b-") as temporary:
        folder = write_header(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
        print("| rows x tokens | LEMA: peak | step | same memory: peak | step | bound by |", end="")
        print(" all of the T4: peak | step | bound by | least as fast: peak | step | bound by |")
        print("|---" * 12 + "|")
        for run in PUBLISHED:
            print(row(folder, run), flush=True)


if __name__ == "__main__":
    main()
