"""Cases about LoRA weights on a Llama, each named after its id: files, selection, recomputation, dropout."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lema import LemaConfig, LemaModel
from lema_core.errors import CheckpointError, ConfigError

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def token_ids(rows: int = 2, length: int = 12, seed: int = 7) -> torch.Tensor:
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def peft_made(llamas, folder: Path, path: Path, **options) -> Path:
    """A PEFT adapter with random A and B, saved."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(**{"r": 4, "target_modules": ATTENTION, "init_lora_weights": False, **options})
    get_peft_model(llamas.hf(folder), config).save_pretrained(path)
    return path


def logits_of(module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(ids).logits


def check_peft_files(path: Path, modules: int) -> None:
    tensors = load_file(path / "adapter_model.safetensors")
    assert len(tensors) == 2 * modules
    assert all(("lora_A" in name or "lora_B" in name) and tensor.numel() for name, tensor in tensors.items())


def test_b01_saved_here_loaded_by_peft(llamas, tmp_path) -> None:
    """Five steps, saved, loaded by PeftModel.from_pretrained: same logits, away from the base, nothing else written."""
    folder = llamas.folder("untied")
    model = llamas.open(folder, lora_target_modules=ATTENTION, learning_rate=1e-2)
    model.initialize_lora()
    trainer = model.get_trainer()
    for step in range(5):
        trainer.train_step(token_ids(seed=step), return_logits=False)
    path = model.save_pretrained(tmp_path / "lora")
    assert {file.name for file in path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    check_peft_files(path, modules=4 * 4)
    ids = token_ids(seed=99)
    logits = model.logits(ids)
    assert (logits - logits_of(llamas.peft(folder, path, trainable=False), ids)).abs().max() <= 1e-5
    assert (logits - logits_of(llamas.hf(folder), ids)).abs().max() > 1e-3
    again = LemaModel.from_pretrained(path, device="cpu")
    assert torch.equal(again.logits(ids), logits)
    again.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"target_modules": "all-linear", "lora_alpha": 3},
        {"layers_to_transform": [1, 3], "target_modules": ["down_proj", "q_proj"]},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.v_proj": 5}},
        {"target_modules": r".*\.(0|2)\.mlp\.(up|gate)_proj"},
    ],
    ids=["plain", "rslora", "all_linear", "layers", "patterns", "regex"],
)
def test_b01_saved_by_peft_loaded_here(options, llamas, tmp_path) -> None:
    """init_lora_weights=False, saved by PEFT, loaded here, saved again here: the same logits each time."""
    folder = llamas.folder("untied")
    path = peft_made(llamas, folder, tmp_path / "theirs", **options)
    model = llamas.open(folder)
    model.load_lora(path)
    ids = token_ids()
    logits = model.logits(ids)
    assert (logits - logits_of(llamas.peft(folder, path, trainable=False), ids)).abs().max() <= 1e-5
    assert (logits - logits_of(llamas.hf(folder), ids)).abs().max() > 1e-3
    ours = model.save_pretrained(tmp_path / "ours")
    check_peft_files(ours, modules=len(model.lora.modules))
    assert (logits - logits_of(llamas.peft(folder, ours, trainable=False), ids)).abs().max() <= 1e-5


def test_b02_every_layer_trains_with_recomputation_on_and_off(llamas, oracle) -> None:
    """Frozen base, B at its start of zero: after one step no lora_B of any layer is zero; gradients agree."""
    gradients = {}
    for recompute in (True, False):
        model = llamas.open(
            llamas.folder("untied"), gradient_checkpointing=recompute, max_grad_norm=None, learning_rate=1e-3
        )
        model.initialize_lora()
        gradients[recompute] = oracle.step(model, token_ids())[1]
        model.get_trainer().train_step(token_ids(), return_logits=False)
        norms = {
            name: float(p.detach().norm()) for name, p in model.lora.parameters().items() if name.endswith("lora_B")
        }
        assert len(norms) == 7 * 4 and all(norm > 0 for norm in norms.values()), norms
    for name, gradient in gradients[True].items():
        assert (gradient - gradients[False][name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_target_modules": ["q_proj", "nope"]}, ["lora_target_modules", "'nope'", "q_proj"]),
        ({"lora_target_modules": ["o_projj"]}, ["'o_projj'", "did you mean 'o_proj'"]),
        ({"trainable_layers": ["last:99"]}, ["trainable_layers", "last:4", "'last:99'"]),
        ({"trainable_layers": [7]}, ["trainable_layers", "0 to 3"]),
        ({"trainable_layers": [1], "lora_target_modules": ["q_proj", "lm_head.weight"]}, ["lm_head.weight"]),
    ],
)
def test_b28_targets_that_do_not_exist(options, words, llamas) -> None:
    """A name that matches nothing or a layer that is not there: one line that says what there is."""
    model = llamas.open(llamas.folder("untied"), **options)
    with pytest.raises(ConfigError) as caught:
        model.initialize_lora()
    assert all(word in str(caught.value) for word in words), caught.value


def test_b28_first_zero_is_refused() -> None:
    """first:0 would train nothing."""
    with pytest.raises(ConfigError, match="trainable_layers"):
        LemaConfig(trainable_layers=["first:0"])


def test_b28_last_two_layers_only(llamas, tmp_path) -> None:
    """last:2 trains layers 2 and 3 and says so; the count is exact and the base's bytes stay."""
    folder = llamas.folder("untied")
    before = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    model = llamas.open(folder, trainable_layers=["last:2"], lora_target_modules=["q_proj", "down_proj"])
    said = model.initialize_lora()
    assert "4 modules train in layers 2-3" in said and "q_proj: 2" in said and "down_proj: 2" in said
    assert sum(p.numel() for p in model.get_trainable_parameters()) == 2 * 4 * ((64 + 64) + (112 + 64))
    started = {name: p.detach().clone() for name, p in model.lora.parameters().items()}
    trainer = model.get_trainer()
    for step in range(2):
        trainer.train_step(token_ids(seed=step), return_logits=False)
    for name, parameter in model.lora.parameters().items():
        assert name.split(".")[2] in "23" and not torch.equal(parameter, started[name]), name
    names = load_file(model.save_pretrained(tmp_path / "lora") / "adapter_model.safetensors")
    assert {name.split(".layers.")[1][0] for name in names} == {"2", "3"}
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == before
    # what trains alone makes the difference to the base
    model.lora.copy_({name: torch.zeros_like(p) for name, p in model.lora.parameters().items()})
    ids = token_ids()
    assert torch.equal(model.logits(ids), llamas.open(folder).logits(ids))


def test_b28_head_beside_a_layer_list(llamas, oracle) -> None:
    """lm_head by name with trainable_layers: the head trains too, and nothing of other layers."""
    model = llamas.open(
        llamas.folder("untied"), trainable_layers=[1], lora_target_modules=["v_proj", "lm_head"], max_grad_norm=None
    )
    model.initialize_lora()
    oracle.randomize(model)
    gradients = oracle.step(model, token_ids())[1]
    assert {name.rpartition(".")[0] for name in gradients} == {"model.layers.1.self_attn.v_proj", "lm_head"}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


def spoil(path: Path, change=lambda tensors: tensors, **config: object) -> None:
    file = path / "adapter_model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    values = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**values, **config}))


@pytest.mark.parametrize("fault", ["layer_removed", "renamed", "six_layers", "other_width", "modules_to_save"])
def test_b32_foreign_lora_weights(fault, llamas, tmp_path) -> None:
    """Made for something else: an error that lists keys or the field, never a partial load."""
    folder, path = llamas.folder("untied"), tmp_path / "lora"
    if fault == "six_layers":
        peft_made(llamas, llamas.folder("untied", num_hidden_layers=6), path)
        words = ["model.layers.4.self_attn.k_proj.lora_A", "fit no targeted module"]
    elif fault == "other_width":
        peft_made(llamas, llamas.folder("untied", hidden_size=32, head_dim=16), path)
        words = ["[4, 64] expected, [4, 32] found"]
    elif fault == "modules_to_save":
        peft_made(llamas, folder, path, modules_to_save=["lm_head"])
        words = ["modules_to_save", "lm_head"]
    else:
        peft_made(llamas, folder, path)
        if fault == "layer_removed":
            spoil(path, lambda tensors: {n: t for n, t in tensors.items() if ".layers.2." not in n})
            words = ["missing", "model.layers.2.self_attn.k_proj.lora_A"]
        else:
            spoil(path, lambda tensors: {n.replace("base_model.model.", ""): t for n, t in tensors.items()})
            words = ["not named base_model.model.", "model.layers.0.self_attn.k_proj.lora_A.weight"]
    model = llamas.open(folder)
    with pytest.raises(CheckpointError) as caught:
        model.load_lora(path)
    assert all(word in str(caught.value) for word in words), caught.value
    assert model.lora is None


def dropout_run(llamas, oracle, recompute: bool | None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of two steps and all gradients of both."""
    model = llamas.with_lora(
        llamas.folder("untied"),
        lora_dropout=0.5,
        gradient_checkpointing=recompute,
        max_grad_norm=None,
        learning_rate=1e-2,
        batch_size=2,
    )
    trainer = model.get_trainer()
    kept: list[torch.Tensor] = []
    for parameter in model.get_trainable_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.clone()))
    losses = [trainer.train_step(token_ids(3), return_logits=False)[1] for _ in range(2)]
    assert len(kept) == 2 * 56
    return losses, kept


def test_b42_recomputation_redraws_the_forward_passes_dropout(llamas, oracle) -> None:
    """LoRA dropout 0.5: recomputation on and off give the same losses and gradients; two runs are bit-equal."""
    on, off, again = (dropout_run(llamas, oracle, recompute) for recompute in (True, False, True))
    assert on[0] == pytest.approx(off[0], abs=1e-6)
    assert all((a - b).abs().max() <= 1e-6 for a, b in zip(on[1], off[1], strict=True))
    assert on[0] == again[0] and all(torch.equal(a, b) for a, b in zip(on[1], again[1], strict=True))
    without = llamas.with_lora(llamas.folder("untied"), batch_size=2)
    assert without.get_trainer().train_step(token_ids(3), return_logits=False)[1] != pytest.approx(on[0][0], rel=1e-5)


def test_b42_gradients_belong_to_the_loss_that_dropout_drew(llamas, oracle) -> None:
    """Central differences of the reported loss, dropout on and its masks fixed by the seed, against the gradient."""
    folder = llamas.folder("untied", num_hidden_layers=2)
    options = {"lora_dropout": 0.5, "max_grad_norm": None, "lora_target_modules": ["q_proj", "up_proj"]}
    model = llamas.with_lora(folder, **options)
    gradients = oracle.step(model, token_ids(1))[1]
    generator = torch.Generator().manual_seed(1)
    direction = {n: torch.randn(g.shape, generator=generator) for n, g in gradients.items()}
    expected = sum(float((g.double() * direction[n]).sum()) for n, g in gradients.items())
    start = {n: p.detach().clone() for n, p in model.lora.parameters().items()}
    losses = []
    for step in (1e-3, -1e-3):
        model.lora.copy_({n: value + step * direction[n] for n, value in start.items()})
        losses.append(oracle.step(model, token_ids(1))[0])
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(expected, rel=2e-2)


def test_b43_generating_in_between_changes_nothing(llamas) -> None:
    """Two steps, two generations, two steps: both texts equal, and the last losses are those without generating."""

    def run(generate: bool) -> tuple[list[float], list[list[list[int]]]]:
        model = llamas.with_lora(llamas.folder("untied"), lora_dropout=0.5, learning_rate=1e-2)
        trainer, texts = model.get_trainer(), []
        losses = [trainer.train_step(token_ids(seed=s), return_logits=False)[1] for s in (0, 1)]
        if generate:
            texts = [model.generate_ids([[1, 2, 3]], 5) for _ in range(2)]
            model.logits(token_ids())
        losses += [trainer.train_step(token_ids(seed=s), return_logits=False)[1] for s in (2, 3)]
        return losses, texts

    with_text, texts = run(True)
    assert texts[0] == texts[1] and len(texts[0][0]) == 5
    assert with_text == run(False)[0]
