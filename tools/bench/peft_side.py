"""transformers + PEFT in fp32 with all weights in RAM, as one would write it; see side.py. Options: ``folder``
``tokens`` ``rank``, and ``rows`` ``modules`` ``checkpointing`` ``threads``; with ``full`` the model's own weights
train, without PEFT."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from side import serve, token_ids
from transformers import AutoModelForCausalLM


def open_model(options: dict[str, Any]):
    if options.get("threads"):
        torch.set_num_threads(options["threads"])
    base = AutoModelForCausalLM.from_pretrained(options["folder"], dtype=torch.float32)
    base.config.use_cache = False
    model = base
    if not options.get("full"):
        rank, modules = options["rank"], options.get("modules", "all-linear")
        model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules))
    if options.get("checkpointing"):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
    ids = token_ids(options, base.config.vocab_size)

    def step() -> dict[str, Any]:
        started = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step_s = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"loss": loss.item(), "step_s": step_s, "rss_peak_bytes": peak}

    return {"trained": sum(p.numel() for p in trained)}, step


if __name__ == "__main__":
    serve(open_model)
