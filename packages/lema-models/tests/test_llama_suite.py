"""Llama through lema_core alone, against transformers and PEFT."""

from __future__ import annotations

from lema_core.testing.adapter_case import batch_of, train
from lema_core.testing.adapter_suite import AdapterSuite
from lema_models.llama import LlamaAdapter

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


class TestLlama(AdapterSuite):
    adapter = LlamaAdapter
    hf_config = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    variants = {
        "untied": {},
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3},
        "odd heads": {
            "hidden_size": 66,
            "head_dim": 24,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-2,
        },
        "no groups": {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "llama3": {"rope_parameters": LLAMA3},
    }
    slow = frozenset({"untied", "tied", "odd heads", "no groups", "llama3"})
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}

    def test_nothing_below_the_lowest_trained_linear_is_computed_backwards(self) -> None:
        """LoRA on one linear of layer 1: no weight before it is borrowed a second time."""
        folder = self.folder("untied")
        adapter, _ = self.bound(folder)
        name = "model.layers.1.mlp.up_proj"
        updates = {name: self.lora(adapter)[name]}
        runner = self.open(folder, updates)
        borrowed: list[str] = []
        borrow = runner.store.borrow
        runner.store.borrow = lambda part: borrowed.append(part.tensor) or borrow(part)
        train(runner, updates, [batch_of((2, 9, ""), adapter.vocab_size)], step=0, first_layer=1)
        weights = [spec.name for spec in adapter.tensors() if spec.role != "embedding"]
        uses = {name: borrowed.count(name) / len(runner.store.parts(name)) for name in weights}
        assert all(count == 1 for name, count in uses.items() if ".layers.0." in name), uses
        assert uses["model.layers.1.self_attn.q_proj.weight"] == 1
        assert uses["model.layers.1.mlp.down_proj.weight"] == 2
