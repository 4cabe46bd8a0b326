"""The architectures of this package."""

from __future__ import annotations

from collections.abc import Iterable

from lema_core.hookspecs import hookimpl
from lema_core.records import Architecture


@hookimpl
def lema_architectures() -> Iterable[Architecture]:
    yield Architecture("llama", model_types=("llama",), adapter="lema_models.llama:LlamaAdapter")
    yield Architecture("mistral", model_types=("mistral",), adapter="lema_models.mistral:MistralAdapter")
    yield Architecture("mixtral", model_types=("mixtral",), adapter="lema_models.mixtral:MixtralAdapter")
    yield Architecture("gpt2", model_types=("gpt2",), adapter="lema_models.gpt2:GPT2Adapter")
    yield Architecture("lfm2", model_types=("lfm2",), adapter="lema_models.lfm2:Lfm2Adapter")
    yield Architecture("lfm2_moe", model_types=("lfm2_moe",), adapter="lema_models.lfm2_moe:Lfm2MoeAdapter")
