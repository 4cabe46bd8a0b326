"""lema as a library user runs it; see side.py. Options: ``folder`` ``tokens`` ``rank``, and ``model`` (a name instead
of the folder) ``rows`` ``modules`` ``threads`` ``config`` (further LemaConfig fields) ``paced_bytes_per_s`` (reads go
no faster, where no control group sees to it) ``frozen`` (updates of weights change nothing). Without ``rank`` the
config says what trains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock
from typing import Any

from side import serve, token_ids

from lema import LemaConfig, LemaModel
from lema_core.memory import anonymous_bytes
from lema_core.store.disk import DiskReader
from lema_core.store.granules import Read
from lema_core.training import AdamWDecision


def open_model(options: dict[str, Any]):
    if options.get("paced_bytes_per_s"):
        pace(options["paced_bytes_per_s"])
    if options.get("frozen"):
        AdamWDecision.apply = lambda *given: None
    more = dict(options.get("config", {}))
    if "rank" in options:
        rank = options["rank"]
        more |= {"lora_rank": rank, "lora_alpha": 2 * rank}
        more["lora_target_modules"] = options.get("modules", "all-linear")
    config = LemaConfig(
        model_name_or_path=options.get("model", options["folder"]),
        max_seq_length=options["tokens"],
        num_threads=options.get("threads"),
        max_steps=1000,
        **more,
    )
    model = LemaModel(config)
    model.initialize_training()
    trainer = model.get_trainer()
    ids = token_ids(options, model.adapter.vocab_size)

    def step() -> dict[str, Any]:
        trainer.train_step(ids, labels=ids, return_logits=False)
        return {**trainer.metrics, "anonymous_bytes": anonymous_bytes()}

    return {"trained": model.training.numbers, "budget": list(model.budget.because), **_weights(model)}, step


def _weights(model: LemaModel) -> dict[str, int]:
    """Bytes of all that streams, of the slots it streams through, and of one slot."""
    store = model.runner.store
    layout = store.model.layout
    return {
        "weights_bytes": sum(granule.nbytes for granule in layout.granules),
        "slots_bytes": store.sizes.ram_slots * layout.slot_bytes,
        "granule_bytes": layout.slot_bytes,
    }


def pace(bytes_per_s: float) -> None:
    """Let the store's reads take as long as a disk of that speed would need for them."""
    read_all, lock = DiskReader.read_all, Lock()
    free_at = time.perf_counter()

    def paced(reader: DiskReader, wanted: Sequence[Read], *rest: Any) -> int:
        nonlocal free_at
        started = time.perf_counter()
        done = read_all(reader, wanted, *rest)
        with lock:
            free_at = due = max(free_at, started) + sum(read.nbytes for read in wanted) / bytes_per_s
        time.sleep(max(0.0, due - time.perf_counter()))
        return done

    DiskReader.read_all = paced


if __name__ == "__main__":
    serve(open_model)
