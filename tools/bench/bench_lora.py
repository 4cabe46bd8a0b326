"""LoRA on the 1.1 B shape, streamed inside a capped control group, against transformers + PEFT with everything in RAM.

Both train r=16 on all linears with one sequence of 256 tokens, fp32 compute, recomputation per layer, in turn
(A B A B ...), each in a process of its own; the model file's cached pages are dropped before lema starts. lema is given
no memory option: it sees the group's limit. Figures are medians over the steps after the first.

    python tools/bench/bench_lora.py [--pairs 3] [--steps 3] [--cap-mb 1500] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from cgroup import Cgroup
from make_model import llama_config, make_model

HERE = Path(__file__).parent
TOKENS, RANK = 256, 16


def run_lema(model: str, steps: int) -> None:
    """The streamed side, in this process; prints one JSON object."""
    import torch

    from lema import LemaConfig, LemaModel
    from lema_core.memory import anonymous_bytes

    config = LemaConfig(model_name_or_path=model, lora_rank=RANK, max_seq_length=TOKENS, max_steps=steps)
    with LemaModel(config) as lema_model:
        lema_model.initialize_lora()
        trainer = lema_model.get_trainer()
        ids = _ids(torch, lema_model.adapter.vocab_size)
        rows = []
        for _ in range(steps):
            trainer.train_step(ids, labels=ids, return_logits=False)
            rows.append(dict(trainer.metrics))
        print(json.dumps({"steps": rows, "anonymous_bytes": anonymous_bytes(), "budget": lema_model.budget.because}))


def run_peft(model: str, steps: int) -> None:
    """The resident side: transformers + PEFT, gradient checkpointing, fp32; prints one JSON object."""
    import resource

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base.config.use_cache = False
    peft_model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    peft_model.enable_input_require_grads()
    peft_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    peft_model.train()
    trained = [p for p in peft_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
    ids = _ids(torch, base.config.vocab_size)
    rows = []
    for step in range(steps):
        started = time.perf_counter()
        loss = peft_model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"step": step + 1, "loss": loss.item(), "step_s": time.perf_counter() - started})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"steps": rows, "rss_peak_bytes": peak}))


def _ids(torch, vocab_size: int):
    return torch.randint(0, vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def drop_cached_pages(folder: Path) -> None:
    """Forget the page cache of every file of the model, so that reads come from the disk."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def child(side: str, model: Path, steps: int, group: Cgroup | None) -> dict:
    command = [sys.executable, str(Path(__file__)), "--side", side, "--model", str(model), "--steps", str(steps)]
    enter = group.enter if group is not None else None
    # As `python -m lema` has it; PEFT is left as torch's users run it.
    environment = {**os.environ, **({"OMP_WAIT_POLICY": "passive"} if side == "lema" else {})}
    done = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=enter, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{side} ended with {done.returncode}" + (" inside the capped group" if group else ""))
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cap-mb", type=int, default=1500)
    parser.add_argument(
        "--model", type=Path, help="a model folder; default: the 1.1 B shape, made in a temporary folder"
    )
    parser.add_argument("--side", choices=("lema", "peft"), help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.side:
        {"lema": run_lema, "peft": run_peft}[a.side](str(a.model), a.steps)
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = a.model
        if model is None:
            model = make_model(Path(scratch), llama_config(2048, 5632, 22, 32, 4, 32000, "bfloat16"), "bfloat16")
        compare(model, a.pairs, a.steps, a.cap_mb * 1_000_000)


def compare(model: Path, pairs: int, steps: int, cap_bytes: int) -> None:
    print(f"{'pair':>4} {'lema step s':>12} {'PEFT step s':>12} {'ratio':>6} {'waited %':>9} {'read GB':>8}", end="")
    print(f" {'group peak MB':>14} {'anonymous MB':>13} {'rss peak MB':>12} {'PEFT rss MB':>12}", flush=True)
    ratios, waits = [], []
    for pair in range(pairs):
        drop_cached_pages(model)
        with Cgroup.create(cap_bytes) as group:
            ours = child("lema", model, steps, group)
            group_peak = group.peak_bytes() if group is not None else 0
        theirs = child("peft", model, steps, None)
        our_steps, their_steps = ours["steps"][1:], theirs["steps"][1:]
        our_s, their_s = (median(row["step_s"] for row in rows) for rows in (our_steps, their_steps))
        waited = 100 * median(row["wait_s"] / row["step_s"] for row in our_steps)
        ratios.append(our_s / their_s)
        waits.append(waited)
        read = median(row["read_bytes"] for row in our_steps) / 1e9
        print(f"{pair + 1:>4} {our_s:>12.2f} {their_s:>12.2f} {ratios[-1]:>6.3f} {waited:>9.2f} {read:>8.2f}", end="")
        peaks = (group_peak, ours["anonymous_bytes"], our_steps[-1]["rss_peak_bytes"], theirs["rss_peak_bytes"])
        print(" {:>14.0f} {:>13.0f} {:>12.0f} {:>12.0f}".format(*(peak / 1e6 for peak in peaks)), flush=True)
        drift = max(abs(o["loss"] - t["loss"]) for o, t in zip(ours["steps"][:1], theirs["steps"][:1], strict=True))
        print(
            f"     first loss: lema {ours['steps'][0]['loss']:.6f}, difference {drift:.1e}; {ours['budget'][-1]}",
            flush=True,
        )
    print(f"median ratio lema / PEFT: {median(ratios):.3f}; waited {median(waits):.2f} % of the step")


if __name__ == "__main__":
    main()
