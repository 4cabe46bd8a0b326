"""lema as a library user runs it; see side.py. Options: ``folder`` ``tokens`` ``rank``, and ``model`` (a name instead
of the folder) ``rows`` ``modules`` ``threads`` ``config`` (further LemaConfig fields) ``dry`` (plan, never step)."""

from __future__ import annotations

from typing import Any

from lema import LemaConfig, LemaModel
from lema_core.memory import anonymous_bytes
from side import serve, token_ids


def open_model(options: dict[str, Any]):
    config = LemaConfig(
        model_name_or_path=options.get("model", options["folder"]),
        lora_rank=options["rank"],
        lora_alpha=2 * options["rank"],
        lora_target_modules=options.get("modules", "all-linear"),
        max_seq_length=options["tokens"],
        num_threads=options.get("threads"),
        max_steps=1000,
        **options.get("config", {}),
    )
    model = LemaModel(config)
    model.initialize_lora()
    trainer = model.get_trainer()
    ids = token_ids(options, model.adapter.vocab_size)

    def step() -> dict[str, Any]:
        trainer.train_step(ids, labels=ids, return_logits=False)
        return {**trainer.metrics, "anonymous_bytes": anonymous_bytes()}

    return {"trained": model.lora.num_parameters, "budget": list(model.budget.because), **_weights(model)}, step


def _weights(model: LemaModel) -> dict[str, int]:
    """Bytes of all that streams, of the window, and of a granule."""
    layout = model.runner.store.model.layout
    return {
        "weights_bytes": sum(granule.nbytes for granule in layout.granules),
        "window_bytes": model.stats()["weights"].ram_window_bytes,
        "granule_bytes": layout.slot_bytes,
    }


if __name__ == "__main__":
    serve(open_model)
