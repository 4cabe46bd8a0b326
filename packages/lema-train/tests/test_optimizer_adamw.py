"""AdamW, its states in files, and gradient clipping, against torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

from lema_core.errors import CheckpointError, ConfigError
from lema_train.clipping import clip_
from lema_train.optimizer import AdamW, load_optimizer_state, optimizer_state_tensors

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


def parameters(seed: int = 0) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: Parameter(torch.randn(shape, generator=generator))
        for name, shape in {"a.lora_A": (3, 37), "a.lora_B": (41, 3), "b.lora_A": (3, 5)}.items()
    }


def take_steps(optimizer: object, params: dict[str, Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=generator) * 10.0 ** (step % 5 - 2)
        optimizer.step()
        optimizer.zero_grad()


def same(one: dict[str, Parameter], other: dict[str, Parameter]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def exact_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own square root is a unit off for some numbers, depending on the CPU; for this test the nearest ones."""
    root = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda values: root(values.double()).float())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.usefixtures("exact_root")
def test_adamw_equals_torchs_bit_for_bit(weight_decay: float) -> None:
    ours, theirs = parameters(), parameters()
    options = {**OPTIONS, "weight_decay": weight_decay}
    take_steps(AdamW(ours.values(), **options), ours, range(20))
    take_steps(torch.optim.AdamW(theirs.values(), foreach=False, **options), theirs, range(20))
    assert same(ours, theirs)


def test_adamw_is_torchs_but_for_the_last_place_of_a_root() -> None:
    ours, theirs, start = parameters(), parameters(), parameters()
    take_steps(make_lema(ours), ours, range(20))
    take_steps(make_torch(theirs), theirs, range(20))
    for name, param in ours.items():
        moved = (theirs[name] - start[name]).norm()
        assert (param - theirs[name]).norm() < 1e-6 * moved


def make_lema(params: dict[str, Parameter], **options: object) -> AdamW:
    return AdamW(params.values(), **{**OPTIONS, **options})


def make_torch(params: dict[str, Parameter], **options: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params.values(), foreach=False, **{**OPTIONS, **options})


def make_momentum(params: dict[str, Parameter], **options: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params.values(), momentum=0.9, **{"lr": 1e-3, **options})


def make_rprop(params: dict[str, Parameter], **options: object) -> torch.optim.Optimizer:
    return torch.optim.Rprop(params.values(), **options)


def resumed(
    make: Callable[..., object], make_after: Callable[..., object], **options: object
) -> tuple[dict[str, Parameter], dict[str, torch.Tensor]]:
    """Weights and states after 5 steps, a hand-over by named tensors, and 5 steps of a new optimizer."""
    params = parameters()
    before = make(params)
    take_steps(before, params, range(5))
    stored = {name: tensor.clone() for name, tensor in optimizer_state_tensors(before, params).items()}
    later = {name: Parameter(param.detach().clone()) for name, param in params.items()}
    after = make_after(later, **options)
    load_optimizer_state(after, later, stored, type(before).__name__)
    take_steps(after, later, range(5, 10))
    return later, optimizer_state_tensors(after, later)


@pytest.mark.parametrize("make", [make_lema, make_torch, make_momentum, make_rprop])
def test_a_resumed_optimizer_continues_bit_for_bit(make: Callable[..., object]) -> None:
    straight = parameters()
    optimizer = make(straight)
    take_steps(optimizer, straight, range(10))
    later, states = resumed(make, make)
    assert same(straight, later)
    expected = optimizer_state_tensors(optimizer, straight)
    assert list(expected) == list(states) and all(torch.equal(expected[name], states[name]) for name in expected)


@pytest.mark.usefixtures("exact_root")
def test_either_adamw_continues_from_the_other() -> None:
    straight = parameters()
    take_steps(make_lema(straight), straight, range(10))
    for make, make_after in ((make_lema, make_torch), (make_torch, make_lema)):
        assert same(straight, resumed(make, make_after)[0])


@pytest.mark.usefixtures("exact_root")
def test_new_betas_and_rate_win_after_a_resume_in_the_bias_correction_too() -> None:
    options = {"betas": (0.5, 0.9), "lr": 1e-2}
    ours = resumed(make_lema, make_lema, **options)[0]
    params = parameters()
    oracle = make_torch(params)
    take_steps(oracle, params, range(5))
    oracle.param_groups[0].update(options)
    take_steps(oracle, params, range(5, 10))
    assert same(ours, params)


def test_states_have_documented_names_and_are_not_copies() -> None:
    params = parameters()
    optimizer = make_lema(params)
    states = optimizer_state_tensors(optimizer, params)
    assert list(states)[:3] == ["a.lora_A.step", "a.lora_A.exp_avg", "a.lora_A.exp_avg_sq"]
    assert states["a.lora_A.exp_avg"] is optimizer.state[params["a.lora_A"]]["exp_avg"]
    assert {tensor.dtype for tensor in states.values()} == {torch.float32}


class Counting(torch.optim.Optimizer):
    """Keeps numbers, a flag and, if asked, something that no file of tensors can hold."""

    def __init__(self, params: object, extra: object = None) -> None:
        super().__init__(params, {"lr": 1.0})
        self.extra = extra

    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["count"] = state.get("count", 0) + 1
            state["scale"] = 0.1
            state["warm"] = True
            if self.extra is not None:
                state["extra"] = self.extra


def test_numbers_in_states_come_back_as_they_were() -> None:
    params = parameters()
    before, after = Counting(params.values()), Counting(params.values())
    before.step()
    stored = optimizer_state_tensors(before, params)
    assert list(stored)[:3] == ["a.lora_A.count:int", "a.lora_A.scale:float", "a.lora_A.warm:bool"]
    load_optimizer_state(after, params, stored, "Counting")
    assert after.state[params["a.lora_A"]] == {"count": 1, "scale": 0.1, "warm": True}
    assert type(after.state[params["a.lora_A"]]["count"]) is int


def test_a_state_that_no_file_holds_is_refused() -> None:
    params = parameters()
    optimizer = Counting(params.values(), extra=["history"])
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"Counting: state 'extra' of a\.lora_A is a list"):
        optimizer_state_tensors(optimizer, params)


def test_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    params = parameters()
    trained = make_lema(params)
    take_steps(trained, params, range(2))
    good = optimizer_state_tensors(trained, params)
    fresh = make_lema(params)

    def refused(tensors: dict[str, torch.Tensor], match: str, written_by: str = "AdamW") -> None:
        with pytest.raises(CheckpointError, match=match):
            load_optimizer_state(fresh, params, tensors, written_by)
        assert all(not tensor.any() for tensor in optimizer_state_tensors(fresh, params).values())

    refused({**good, "c.lora_A.exp_avg": torch.zeros(1)}, "1 tensors that do not train.*c.lora_A.exp_avg")
    refused({name: tensor for name, tensor in good.items() if "b." not in name}, r"1 parameters .*b\.lora_A")
    refused({**good, "a.lora_B.exp_avg": torch.zeros(2, 3)}, r"a\.lora_B\.exp_avg: shape \[41, 3\] expected, \[2, 3\]")
    refused({name: tensor for name, tensor in good.items() if name != "a.lora_A.step"}, "'step' of parameter 0")
    refused({}, "'step' of parameter 0: a tensor expected, none found")
    refused({**good, "b.lora_A.max_exp_avg_sq": torch.zeros(3, 5)}, "max_exp_avg_sq, which AdamW lacks")
    refused(good, "state of SGD found, AdamW is to be resumed", written_by="SGD")
    with pytest.raises(CheckpointError, match=r"shape \[3, 5\] is not one of this model's"):
        optimizer_state_tensors(fresh, {name: param for name, param in params.items() if name != "b.lora_A"})


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"lr": math.nan}, {"lr": "1e-4"}, {"betas": (1.0, 0.9)}, {"eps": math.inf}]
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        AdamW(parameters().values(), **options)


def gradients() -> dict[str, torch.Tensor]:
    return {name: param.detach() * 3 for name, param in parameters(5).items()}


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
def test_clipping_equals_torchs(max_norm: float) -> None:
    ours = gradients()
    theirs = [Parameter(grad) for grad in gradients().values()]
    for param in theirs:
        param.grad = param.detach().clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, foreach=False)
    result = clip_(ours, max_norm)
    assert result.finite and result.norm == pytest.approx(expected.item(), rel=1e-6)
    for grad, param in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=1e-6, atol=0)


def test_the_norm_does_not_depend_on_the_order_of_layers() -> None:
    grads = gradients()
    assert clip_(grads, None).norm == clip_(dict(reversed(grads.items())), None).norm


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_is_named_and_nothing_is_scaled(bad: float) -> None:
    grads = gradients()
    grads["b.lora_A"][2, 4] = bad
    before = {name: grad.clone() for name, grad in grads.items()}
    result = clip_(grads, 0.1)
    assert not result.finite and result.non_finite == "b.lora_A"
    assert all(
        torch.equal(
            grads[name],
            before[name],
        )
        or name == "b.lora_A"
        for name in grads
    )
    assert torch.equal(grads["b.lora_A"].nan_to_num(1, 2, 3), before["b.lora_A"].nan_to_num(1, 2, 3))


def test_large_finite_gradients_are_finite() -> None:
    grads = {"a": torch.full((4,), 1e30), "b": torch.tensor([3.0])}
    result = clip_(grads, 1.0)
    assert result.finite and result.norm == pytest.approx(2e30)
    assert grads["a"].tolist() == pytest.approx([0.5] * 4)


def test_no_gradients_and_no_limit() -> None:
    assert clip_({}, 1.0) == (0.0, None)
    grads = gradients()
    clip_(grads, None)
    assert all(torch.equal(grads[name], each) for name, each in gradients().items())
    with pytest.raises(ConfigError, match="max_grad_norm"):
        clip_(grads, 0.0)
