"""Modules that have a say in their loading: hooks, extra state, versions, lazy and parametrized weights."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lema_core.errors import CheckpointError
from lema_core.low_memory import (
    StateDictError,
    empty_model,
    load_checkpoint_with_low_memory,
    load_state_dict_with_low_memory,
)


def saved_zip(module: nn.Module, folder: Path) -> Path:
    torch.save(module.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def test_hooks_that_rename_split_and_transpose(tmp_path: Path) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.out = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4, bias=False)
            self.register_load_state_dict_pre_hook(self._split)

        @staticmethod
        def _split(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
            for kind in ("weight", "bias"):
                state[f"{prefix}q.{kind}"], state[f"{prefix}k.{kind}"] = state.pop(f"{prefix}qk.{kind}").split([4, 2])
            state[f"{prefix}out.weight"] = state.pop(f"{prefix}o").t()

    state = {"qk.weight": torch.randn(6, 4), "qk.bias": torch.randn(6), "o": torch.randn(4, 4)}
    expected = Split()
    expected.load_state_dict(state)
    torch.save(state, tmp_path / "a.pt")
    save_file(state, tmp_path / "a.safetensors")
    for file in ("a.pt", "a.safetensors"):
        with empty_model():
            module = Split()
        load_checkpoint_with_low_memory(module, tmp_path / file)
        for name, tensor in expected.state_dict().items():
            assert torch.equal(module.state_dict()[name], tensor)


def test_hooks_that_compute_are_refused_by_name(tmp_path: Path) -> None:
    module = nn.Linear(3, 3)
    module.register_load_state_dict_pre_hook(
        lambda module, state, *_: state.update(weight=torch.empty(3, 3, device="meta"))
    )
    before = module.weight.clone()
    with pytest.raises(CheckpointError, match=r"/model\.pt: tensor 'weight': without data: .* a hook of the module"):
        load_checkpoint_with_low_memory(module, saved_zip(nn.Linear(3, 3), tmp_path))
    assert torch.equal(module.weight, before)


def test_hooks_that_follow_a_load_see_what_was_loaded_and_may_amend_the_report(tmp_path: Path) -> None:
    class Derived(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.calls: list[str] = []
            self.largest = 0.0
            self.first.register_load_state_dict_post_hook(lambda *_: self.calls.append("first"))
            self.register_load_state_dict_post_hook(self._after)

        @staticmethod
        def _after(module: nn.Module, report: Any) -> None:
            module.calls.append("root")
            module.largest = module.first.weight.max().item()
            if "second.bias" in report.missing_keys:
                report.missing_keys.remove("second.bias")

    source = Derived()
    state = source.state_dict()
    del state["second.bias"]
    torch.save(state, tmp_path / "a.pt")
    with empty_model():
        module = Derived()
    assert load_checkpoint_with_low_memory(module, tmp_path / "a.pt").missing_keys == []
    assert module.calls == ["first", "root"] and module.largest == source.first.weight.max().item()
    assert len(module._load_state_dict_post_hooks) == len(module.first._load_state_dict_post_hooks) == 1

    del state["second.weight"]
    torch.save(state, tmp_path / "a.pt")
    with empty_model():
        module = Derived()
    with pytest.raises(StateDictError) as found:
        load_checkpoint_with_low_memory(module, tmp_path / "a.pt")
    with pytest.raises(RuntimeError) as expected:
        Derived().load_state_dict(state)
    assert str(found.value) == f"{tmp_path / 'a.pt'}: {expected.value}"
    assert all(parameter.is_meta for parameter in module.parameters())


class WithExtra(nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state(tmp_path: Path) -> None:
    source = WithExtra(2, 2)
    source.extra = {"scales": torch.randn(3), "text": "x", "list": [torch.ones(2).t(), 1]}
    path = saved_zip(source, tmp_path)
    with empty_model():
        module = WithExtra(2, 2)
    load_checkpoint_with_low_memory(module, path)
    assert torch.equal(module.extra["scales"], source.extra["scales"])
    assert module.extra["text"] == "x" and module.extra["list"][0].tolist() == [1, 1]

    module.extra = "before"
    state = source.state_dict()
    del state["bias"]
    with pytest.raises(RuntimeError, match="Missing key"):
        load_state_dict_with_low_memory(module, state)
    assert module.extra == "before"
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "_extra_state"'):
        load_state_dict_with_low_memory(WithExtra(2, 2), nn.Linear(2, 2).state_dict())


def test_versions_that_torch_save_keeps_and_safetensors_does_not(tmp_path: Path) -> None:
    """Batch norms before version 2 had no counter; a file without versions is taken for such a one."""
    source = nn.BatchNorm1d(3)
    state = {key: tensor for key, tensor in source.state_dict().items() if key != "num_batches_tracked"}
    save_file(state, tmp_path / "a.safetensors")
    with empty_model():
        module = nn.BatchNorm1d(3)
    load_checkpoint_with_low_memory(module, tmp_path / "a.safetensors")
    assert module.num_batches_tracked.item() == 0 and not module.num_batches_tracked.is_meta
    torch.save(OrderedDict(state), tmp_path / "a.pt")
    with_versions = source.state_dict()
    del with_versions["num_batches_tracked"]
    torch.save(with_versions, tmp_path / "b.pt")
    load_checkpoint_with_low_memory(module, tmp_path / "a.pt")
    with pytest.raises(StateDictError, match=r'Missing key.*"num_batches_tracked"'):
        load_checkpoint_with_low_memory(module, tmp_path / "b.pt")


def test_lazy_modules_take_their_shapes_from_the_checkpoint(tmp_path: Path) -> None:
    source = nn.Linear(4, 2)
    with empty_model():
        module = nn.LazyLinear(2)
    load_checkpoint_with_low_memory(module, saved_zip(source, tmp_path))
    assert torch.equal(module.weight, source.weight)


def test_parametrized_weights(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    source = make()
    with empty_model():
        module = make()
    load_checkpoint_with_low_memory(module, saved_zip(source, tmp_path))
    assert torch.equal(module.weight, source.weight)
