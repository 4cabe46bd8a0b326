"""Cases about training a model's own weights, each named after its id; transformers and autograd are the oracles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lema import LemaConfig, LemaModel
from lema._utils._conversion import merge_delta
from lema_core.errors import CheckpointError, ConfigError, NonFiniteError
from lema_core.store.gradients import GradientStream
from lema_train.data.batching import BatchLoader, BatchPlan
from lema_train.data.rows import Dataset, Report, Sample
from lema_train.loop import LoopEvents, LoopOptions, run_training

IGNORED = -100
GPT2 = {"vocab_size": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def token_ids(rows: int = 2, length: int = 8, seed: int = 7) -> Tensor:
    return torch.randint(2, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """GPT-2 with and without dropout, tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    root = tmp_path_factory.mktemp("gpt2")

    def make(name: str) -> Path:
        if not (root / name).exists():
            torch.manual_seed(0)
            dropout = NO_DROPOUT if name == "gpt2" else {"attn_pdrop": 0.0, "embd_pdrop": 0.2, "resid_pdrop": 0.5}
            ids = {"bos_token_id": 0, "eos_token_id": None}
            GPT2LMHeadModel(GPT2Config(**GPT2, **dropout, **ids)).save_pretrained(root / name)
        return root / name

    return make


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., LemaModel]]:
    """A model whose own weights train; closed when the test is over."""
    models: list[LemaModel] = []

    def open_model(folder: Path, **options: Any) -> LemaModel:
        values: dict[str, Any] = {
            "model_name_or_path": str(folder), "training_mode": "selective_full", "learning_rate": 1e-2,
            "device": "cpu", "output_dir": str(tmp_path / "out"), "max_seq_length": 16, "max_steps": 20,
            # one way to run a step is quicker planned than the best of many
            "gradient_checkpointing": False,
        }  # fmt: skip
        models.append(LemaModel(LemaConfig(**{**values, **options})))
        models[-1].initialize_training()
        return models[-1]

    yield open_model
    for model in models:
        model.close()


def hf(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def saved(trainer: Any, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The delta and the optimizer's states."""
    path = trainer.save_checkpoint(folder)
    return load_file(path / "delta.safetensors"), load_file(path / "optimizer.safetensors")


def first_gradients(model: LemaModel, ids: Tensor, labels: Tensor | None, folder: Path) -> dict[str, Tensor]:
    """Unclipped gradients of a first step, from what AdamW keeps of them."""
    assert model.config.max_grad_norm is None
    trainer = model.get_trainer()
    trainer.train_step(ids, labels, return_logits=False)
    states = saved(trainer, folder)[1]
    return {name.removesuffix(".exp_avg"): 10 * m for name, m in states.items() if name.endswith(".exp_avg")}


def assert_unchanged(before: tuple[dict[str, Tensor], ...], after: tuple[dict[str, Tensor], ...]) -> None:
    for one, other in zip(before, after, strict=True):
        assert one.keys() == other.keys() and one
        for name in one:
            assert torch.equal(one[name], other[name]), name


# -- B06


@pytest.mark.parametrize("layers", [["emb", "head"], ["head"]], ids="+".join)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_b06_a_tied_embedding_and_head_are_one_tensor(
    model_type: str, layers: list[str], folders: Any, llamas: Any, opened: Any, tmp_path: Path
) -> None:
    """Its gradient is the sum of both paths'; logits of the live, the resumed and the merged model are the same."""
    folder = folders("gpt2") if model_type == "gpt2" else llamas.folder("tied")
    tied = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}[model_type]
    oracle = hf(folder)
    ids = token_ids(2, 8)
    torch.nn.functional.cross_entropy(oracle(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = dict(oracle.named_parameters())[tied].grad

    model = opened(folder, trainable_layers=layers, max_grad_norm=None, batch_size=2)
    if layers == ["head"]:
        assert (
            f"lm_head.weight is tied to {tied}: they are one tensor, which trains with the sum"
            in model.training.describe()
        )
    gradients = first_gradients(model, ids, None, tmp_path / "first")
    names = {tied} | ({"transformer.wpe.weight"} if model_type == "gpt2" and "emb" in layers else set())
    assert gradients.keys() == names
    # 1e-6 is what rounding of these sums in another order gives
    assert (gradients[tied] - expected).abs().max() <= 1e-6

    trainer = model.get_trainer()
    for step in range(3):
        trainer.train_step(token_ids(seed=step), return_logits=False)
    live = model.logits(ids)
    checkpoint = trainer.save_checkpoint(tmp_path / "checkpoint-3")
    assert load_file(checkpoint / "delta.safetensors").keys() == names
    with LemaModel.from_pretrained(checkpoint, output_dir=str(tmp_path / "again")) as resumed:
        assert torch.equal(resumed.logits(ids), live)
    merged = tmp_path / "merged"
    merge_delta(folder, checkpoint, merged)
    found = hf(merged)
    assert (found(ids).logits - live).abs().max() <= 1e-5
    assert (hf(folder)(ids).logits - live).abs().max() > 1e-2
    assert found.config.tie_word_embeddings
    stored = {name for path in merged.glob("*.safetensors") for name in load_file(path)}
    assert not any(name.endswith("lm_head.weight") for name in stored)


# -- B23, B24


@pytest.mark.parametrize("bits", [None, 8])
def test_b23_accumulated_gradients_are_those_of_one_padded_batch(
    bits: int | None, llamas: Any, opened: Any, tmp_path: Path
) -> None:
    """1 and 7 supervised tokens: two micro-batches against one padded batch of two, within 1e-6, or in 8 bits within
    what lema-quant states: each micro-batch's sum off by less than 3.2 % of its block's largest."""
    ids = token_ids()
    labels = ids.clone()
    labels[0, 2:] = IGNORED
    one, two = (
        first_gradients(
            opened(llamas.folder("untied"), max_grad_norm=None, batch_size=rows, grad_acc_bits=in_bits),
            ids,
            labels,
            tmp_path / f"{rows}",
        )
        for rows, in_bits in ((2, None), (1, bits))
    )
    for name in one:
        # sums lie in between, so the largest of all is no less than the largest of a block
        bound = 1e-6 if bits is None else 2 * 0.032 * 1.5 * one[name].abs().max()
        assert (one[name] - two[name]).abs().max() <= bound, name


def test_b23_b57_groups_steps_and_rates(llamas: Any, opened: Any, tmp_path: Path) -> None:
    """20 micro-batches in groups of 3, warm-up 2, cosine: 7 rates as the formula has them, the last group of 2 counts
    by its own tokens; a step that is skipped is one of the schedule, and none of the bias correction."""
    rows = [token_ids(1, 4 + row % 5, seed=row)[0].tolist() for row in range(20)]
    data = Dataset([Sample(row, row, line) for line, row in enumerate(rows, 1)], Report(tmp_path / "rows"))
    plan = BatchPlan(data.lengths, batch_size=1, gradient_accumulation_steps=3, shuffle=False)
    model = opened(
        llamas.folder("untied"), learning_rate=4e-4, warmup_steps=2, lr_schedule="cosine", max_steps=7,
        trainable_layers=["last:1"], gradient_accumulation_steps=3,
    )  # fmt: skip
    trainer, metrics = model.get_trainer(), []

    def finished(step: dict[str, Any]) -> None:
        metrics.append(step)
        if trainer.step == 3:
            spoil(model, 3)
        if trainer.step == 4:
            del model.runner.store.gradients.complete

    options = LoopOptions(tmp_path / "out", plan.steps_per_epoch)
    run_training(trainer, BatchLoader(data, plan, fill_id=0), options, LoopEvents(step=finished))
    cosine = [4e-4 * 0.5 * (1 + math.cos(math.pi * k / 5)) for k in range(5)]
    assert [step["lr"] for step in metrics] == pytest.approx([0.0, 2e-4, *cosine], rel=1e-12)
    assert [step["tokens"] for step in metrics][-1] == len(rows[18]) + len(rows[19])
    assert (trainer.skipped_steps, trainer.training.updates_made) == (1, 6)


def test_b24_a_step_without_supervised_tokens_changes_nothing(llamas: Any, opened: Any, tmp_path: Path) -> None:
    """And one such micro-batch among others counts as left out, right after as well."""
    ids = token_ids(3, seed=3)
    labels = ids.clone()
    labels[1] = IGNORED
    results = []
    for rows in ([0, 1, 2], [0, 2]):
        said: list[str] = []
        trainer = opened(llamas.folder("untied"), trainable_layers=["emb", "last:1"]).get_trainer(say=said.append)
        trainer.train_step(token_ids(), return_logits=False)
        if 1 in rows:
            # nothing but the first token's label, which nothing predicts
            masked = torch.full_like(ids, IGNORED)
            masked[:, 0] = ids[:, 0]
            _, loss = trainer.train_step(ids, masked, return_logits=False)
            assert math.isnan(loss) and "3 of 3 micro-batches have no supervised token" in said[-1]
        results.append([trainer.train_step(ids[rows], labels[rows], return_logits=False)[1]])
        results[-1] += saved(trainer, tmp_path / f"{len(rows)}")
    assert results[0][0] == results[1][0]
    assert_unchanged(results[0][1:], results[1][1:])


def test_b24_an_all_masked_step_leaves_weights_and_moments(llamas: Any, opened: Any, tmp_path: Path) -> None:
    trainer = opened(llamas.folder("untied"), trainable_layers=["emb", "last:1"]).get_trainer()
    trainer.train_step(token_ids(), return_logits=False)
    before = saved(trainer, tmp_path / "before")
    trainer.train_step(token_ids(), torch.full_like(token_ids(), IGNORED), return_logits=False)
    assert_unchanged(before, saved(trainer, tmp_path / "after"))


# -- B25


def spoil(model: LemaModel, layer: int, value: float = math.nan) -> str:
    """From now on one number of a gradient of ``layer`` is ``value`` when it is complete; returns the tensor."""
    gradients = model.runner.store.gradients
    name = f"model.layers.{layer}.self_attn.v_proj.weight"

    def complete(which: int | None) -> None:
        if which == layer:
            with gradients.borrow(model.runner.store.parts(name)[0]) as gradient:
                gradient.view(-1)[1000] = value
        GradientStream.complete(gradients, which)

    gradients.complete = complete
    return name


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_b25_nan_in_the_layer_that_backward_reaches_last(
    value: float, bits: int | None, llamas: Any, opened: Any, tmp_path: Path
) -> None:
    """No weight or moment of any layer changes, the log names tensor and step; all goes on as if it had not been."""
    said: list[str] = []
    model = opened(llamas.folder("untied"), grad_acc_bits=bits, grad_acc_ram="1B")
    trainer = model.get_trainer(say=said.append)
    for step in range(2):
        trainer.train_step(token_ids(seed=step), return_logits=False)
    before = saved(trainer, tmp_path / "before")
    name = spoil(model, 0, value)
    _, loss = trainer.train_step(token_ids(seed=5), return_logits=False)
    assert math.isfinite(loss) and trainer.skipped_steps == 1
    assert said == [f"step 3: {name} is not finite; the step is skipped, no weight was changed"]
    assert_unchanged(before, saved(trainer, tmp_path / "after"))
    del model.runner.store.gradients.complete
    trainer.train_step(token_ids(seed=6), return_logits=False)
    after = saved(trainer, tmp_path / "next")

    straight = opened(llamas.folder("untied"), grad_acc_bits=bits).get_trainer()
    for step in (0, 1, 6):
        straight.train_step(token_ids(seed=step), return_logits=False)
    assert_unchanged(saved(straight, tmp_path / "straight"), after)


def test_b25_five_in_a_row_end_the_run_and_the_newest_checkpoint_is_finite(
    llamas: Any, opened: Any, tmp_path: Path
) -> None:
    model = opened(llamas.folder("untied"), trainable_layers=["first:2"])
    trainer = model.get_trainer()
    trainer.train_step(token_ids(), return_logits=False)
    spoil(model, 0)
    with pytest.raises(NonFiniteError, match=r"5 steps in a row were not finite \(step 6 is the last\)"):
        for _ in range(9):
            trainer.train_step(token_ids(), return_logits=False)
    for tensors in saved(trainer, tmp_path / "checkpoint-6"):
        assert all(tensor.isfinite().all() for tensor in tensors.values())


# -- B27


def test_b27_small_updates_of_bf16_weights_add_up(llamas: Any, opened: Any, tmp_path: Path) -> None:
    """A norm of ones in bf16, a gradient of constant sign, lr 1e-5, 100 steps: -1e-3, where bf16 alone would stay."""
    folder = llamas.copy(tmp_path / "ones", "bf16")
    name = "model.norm.weight"
    set_tensor(folder, name, lambda tensor: torch.ones_like(tensor))
    model = opened(folder, trainable_modules=["norm"], learning_rate=1e-5, max_steps=100)
    assert model.training.weights == (name,)
    trainer = model.get_trainer()
    store = model.runner.store
    expected = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.AdamW([expected], lr=1e-5, weight_decay=0.0)
    for step in range(100):
        expected.grad = torch.full((64,), 0.5 + 0.001 * step)
        optimizer.step()
        trainer.training.begin_step(step)
        with store.gradients.borrow(store.parts(name)[0]) as gradient:
            gradient.copy_(expected.grad)
        store.gradients.complete(None)
        trainer.training.finish_step(1e-5, None, 1.0)
        if step % 10:
            store.updates.flush()
        else:
            model.logits(token_ids(1, 3))
    delta, states = saved(trainer, tmp_path / "checkpoint-100")
    assert torch.allclose(delta[name], expected - 1, rtol=1e-4)
    assert torch.allclose(delta[name], torch.tensor(-1e-3), rtol=5e-2)
    assert states[f"{name}.exp_avg"].dtype == states[f"{name}.exp_avg_sq"].dtype == torch.float32
    report = merge_delta(folder, tmp_path / "checkpoint-100", tmp_path / "merged")
    assert (report.updated, report.lost) == (64, 64)
    assert "64" in report.describe_lost("merge_dtype=float32")
    assert (hf(tmp_path / "merged").state_dict()[name] == 1).all()


def set_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    from safetensors.torch import save_file

    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})


# -- B28


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trainable_modules": ["q_proj", "nope"]}, "nope"),
        ({"trainable_modules": ["q_prj"]}, "did you mean 'q_proj'"),
        ({"trainable_layers": ["last:99"]}, "last:99"),
        ({"trainable_layers": [7]}, "7"),
    ],
)
def test_b28_what_matches_nothing_is_refused(options: dict[str, Any], said: str, llamas: Any, opened: Any) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(llamas.folder("untied"), **options)


def test_b28_exactly_what_is_selected_changes(folders: Any, llamas: Any, opened: Any, tmp_path: Path) -> None:
    """last:2 of 4 layers; c_proj of GPT-2 is attention's and the feed-forward part's. All else stays byte for byte."""
    cases: list[tuple[Path, dict[str, Any], Callable[[str], bool]]] = [
        (llamas.folder("untied"), {"trainable_layers": ["last:2"]}, lambda n: ".layers.2." in n or ".layers.3." in n),
        (folders("gpt2"), {"trainable_modules": ["c_proj"]}, lambda n: ".c_proj." in n),
    ]
    for number, (folder, options, trains) in enumerate(cases):
        start = {name: p for name, p in hf(folder).named_parameters() if "lm_head" not in name or number == 0}
        names = {name for name in start if trains(name)}
        model = opened(folder, **options)
        assert model.training.numbers == sum(start[name].numel() for name in names)
        trainer = model.get_trainer()
        trainer.train_step(token_ids(), return_logits=False)
        path = trainer.save_checkpoint(tmp_path / f"{number}" / "checkpoint-1")
        assert load_file(path / "delta.safetensors").keys() == names
        merge_delta(folder, path, tmp_path / f"merged-{number}")
        after = dict(hf(tmp_path / f"merged-{number}").named_parameters())
        for name, value in start.items():
            assert torch.equal(after[name], value) != (name in names), name


# -- B42, B43


def test_b42_b43_dropout_recomputed_kept_repeated_and_looked_at(folders: Any, opened: Any, tmp_path: Path) -> None:
    """GPT-2, resid_pdrop 0.5, all weights: recomputed or kept, run twice, with generation in between: the same bits."""
    results = []
    for number, (recompute, looks) in enumerate([(True, False), (False, False), (False, True)]):
        model = opened(folders("dropout"), gradient_checkpointing=recompute, seed=1)
        trainer = model.get_trainer()
        losses = []
        for step in range(3):
            losses.append(trainer.train_step(token_ids(seed=step), return_logits=False)[1])
            if looks:
                assert model.generate_ids([[5, 9]], 4) == model.generate_ids([[5, 9]], 4)
        results.append((losses, saved(trainer, tmp_path / f"{number}")))
    for losses, files in results[1:]:
        assert losses == results[0][0]
        assert_unchanged(results[0][1], files)
    other = opened(folders("dropout"), seed=2).get_trainer()
    assert other.train_step(token_ids(seed=0), return_logits=False)[1] != results[0][0][0]


# -- B55


def test_b55_everything_written_says_its_format_and_other_tools_load_what_is_merged(
    llamas: Any, byte_tokenizer: Any, opened: Any, tmp_path: Path
) -> None:
    folder = llamas.copy(tmp_path / "base", "bf16", shards=3)
    byte_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    model = opened(folder, trainable_layers=["emb"])
    trainer = model.get_trainer()
    trainer.train_step(token_ids(), return_logits=False)
    checkpoint = trainer.save_checkpoint(tmp_path / "checkpoint-1")
    merge_delta(folder, checkpoint, tmp_path / "merged")
    for path in (*checkpoint.glob("*.safetensors"), *(tmp_path / "merged").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt", path
    index = json.loads((tmp_path / "merged/model.safetensors.index.json").read_text())
    stored = [t for path in (tmp_path / "merged").glob("*.safetensors") for t in load_file(path).values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored)
    assert all((tmp_path / "merged" / name).exists() for name in ("tokenizer.json", "generation_config.json"))
    ids = token_ids()
    assert (hf(tmp_path / "merged")(ids).logits - model.logits(ids)).abs().max() <= 0.05  # rounded to bf16


def test_a_delta_of_nothing_is_loaded(llamas: Any, opened: Any, tmp_path: Path) -> None:
    """An unmoved model: saved, looked at and merged as the base."""
    folder = llamas.folder("untied")
    model = opened(folder, trainable_layers=["head"])
    model.save_pretrained(tmp_path / "unmoved")
    assert not any(tensor.any() for tensor in load_file(tmp_path / "unmoved/delta.safetensors").values())
    with LemaModel(LemaConfig(model_name_or_path=str(folder), output_dir=str(tmp_path / "w"))) as plain:
        expected = plain.logits(token_ids())
    with LemaModel(LemaConfig(model_name_or_path=str(folder), output_dir=str(tmp_path / "w"))) as loaded:
        loaded.load_delta(tmp_path / "unmoved", trains=False)
        assert torch.equal(loaded.logits(token_ids()), expected)
        assert "optim" not in loaded.stats()
    with pytest.raises(CheckpointError, match="no such file or folder"):
        opened(folder).load_delta(tmp_path / "nowhere")
