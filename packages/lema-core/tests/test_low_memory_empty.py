"""What is empty in a module built under empty_model(), and what is not."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from lema_core.errors import CheckpointError, LemaError
from lema_core.low_memory import empty_model, load_state_dict_with_low_memory


class Buffers(nn.Module):
    """Buffers computed from others, shared ones, one that is a view, one declared with nn.Buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("betas", torch.linspace(0.1, 0.9, 5))
        self.register_buffer("first", self.betas[:2])
        self.register_buffer("same", self.betas)
        self.register_buffer("alphas", (1 - self.betas).cumprod(0), persistent=False)
        self.steps = nn.Buffer(torch.zeros(3))
        self.offsets = nn.Buffer(torch.arange(4), persistent=False)
        self.register_buffer("none", None)
        self.betas = self.betas * 2
        self.plain = torch.linspace(0, 1, 3)


def test_buffers_that_no_checkpoint_has_are_computed_and_the_others_empty() -> None:
    expected = Buffers()
    with empty_model():
        module = Buffers()
    names = {name for name, buffer in module.named_buffers(remove_duplicate=False) if buffer.is_meta}
    assert names == {"betas", "first", "same", "steps"}
    assert {name: buffer.shape for name, buffer in module.named_buffers()} == {
        name: buffer.shape for name, buffer in expected.named_buffers()
    }
    assert torch.equal(module.alphas, expected.alphas) and torch.equal(module.plain, expected.plain)
    assert isinstance(module.steps, nn.Buffer) and list(module.state_dict()) == list(expected.state_dict())

    load_state_dict_with_low_memory(module, expected.state_dict())
    for name, buffer in expected.named_buffers(remove_duplicate=False):
        assert torch.equal(module.get_buffer(name), buffer)
    module.same[0] = 7
    assert module.first[0] == 7 and module.betas[0] != 7


def test_parameters_are_empty_at_once_and_tied_ones_stay_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Parameter(torch.ones(3), requires_grad=False)
            self.a, self.b = shared, shared
            self.was_meta = self.a.is_meta
            self.child = nn.Linear(3, 3)
            self.child.bias = self.a

    with empty_model():
        module = Tied()
    assert module.was_meta and module.a is module.b is module.child.bias and not module.a.requires_grad
    assert [name for name, parameter in module.named_parameters() if parameter.is_meta] == ["a", "child.weight"]
    assert not nn.Linear(2, 2).weight.is_meta


def test_every_way_of_initializing_passes() -> None:
    class Initialized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))
            self.blocks = nn.ModuleList([nn.Embedding(5, 4, padding_idx=0), nn.MultiheadAttention(4, 2), nn.LSTM(4, 4)])
            for initialize in (
                nn.init.normal_, nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.orthogonal_,
                nn.init.trunc_normal_, nn.init.zeros_,
            ):  # fmt: skip
                assert initialize(self.weight) is self.weight
            nn.init.constant_(tensor=self.weight, val=2.0)
            self.weight.data.normal_().clamp_(-1, 1).mul_(2)
            with torch.no_grad():
                self.weight[0] = torch.ones(4)
            self.drop = torch.linspace(0, 0.1, 3)[1].item()
            self.noise = nn.Buffer(torch.empty(3).fill_(4), persistent=False)

    with empty_model():
        module = Initialized()
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.drop == pytest.approx(0.05) and module.noise.tolist() == [4, 4, 4]


def test_building_and_loading_leave_torchs_compiler_alone() -> None:
    """It takes 75 MB."""
    code = """
import sys, torch
from torch import nn
from lema_core.low_memory import empty_model, load_state_dict_with_low_memory
def make():
    return nn.Sequential(nn.Embedding(5, 4), nn.TransformerEncoderLayer(4, 2), nn.BatchNorm1d(4), nn.Conv2d(3, 3, 3))
with empty_model():
    module = make()
load_state_dict_with_low_memory(module, make().state_dict())
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_buffer_computed_from_a_parameter_is_refused_when_loading() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", self.weight.detach()[1:], persistent=False)

    with empty_model():
        module = Scaled()
    state = {"weight": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"^scale: a non-persistent buffer on the meta device"):
        load_state_dict_with_low_memory(module, state)
    assert module.weight.is_meta
    load_state_dict_with_low_memory(module, state, strict=False)
    assert not module.weight.is_meta and module.scale.is_meta
    module.scale = torch.ones(3)
    load_state_dict_with_low_memory(module, state)


def test_other_threads_and_failures_are_not_touched() -> None:
    built: list[nn.Module] = []
    with empty_model(), empty_model():
        thread = threading.Thread(target=lambda: built.append(nn.BatchNorm1d(3)))
        thread.start()
        thread.join()
        inner = nn.BatchNorm1d(3)
    assert inner.weight.is_meta and inner.running_mean.is_meta
    assert not built[0].weight.is_meta and not built[0].running_mean.is_meta
    with pytest.raises(ZeroDivisionError), empty_model():
        nn.Linear(1 // 0, 2)
    assert not nn.BatchNorm1d(3).running_mean.is_meta


def test_loading_comes_afterwards() -> None:
    with empty_model():
        module = nn.Linear(3, 3)
        with pytest.raises(LemaError, match=r"inside empty_model\(\), where every tensor goes to meta again"):
            load_state_dict_with_low_memory(module, {})
