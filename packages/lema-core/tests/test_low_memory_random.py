"""Random module trees: shared tensors, shared modules and views come out as load_state_dict leaves them, to the bit."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from lema_core.low_memory import empty_model, load_checkpoint_with_low_memory, load_state_dict_with_low_memory

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SHAPES = ((), (3,), (2, 3), (4, 0))


@dataclass(frozen=True)
class Held:
    """One tensor of a module. ``shared``: which of the tensors that came before it is, or shows the memory of."""

    kind: Literal["parameter", "buffer", "non-persistent"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    shared: int | None
    view: bool


@dataclass(frozen=True)
class Node:
    """A module. A child that is a number is the module that had this number."""

    held: list[Held]
    children: list[Node | int] = field(default_factory=list)


SCALAR = Held("parameter", (), torch.float32, False, None, False)
HELD = st.builds(
    Held,
    st.sampled_from(["parameter", "parameter", "buffer", "non-persistent"]),
    st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.none() | st.integers(0, 5),
    st.booleans(),
)
LEAVES = st.builds(Node, st.lists(HELD, max_size=3))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.builds(Node, st.lists(HELD, max_size=3), st.lists(inner | st.integers(0, 3), max_size=3)),
    max_leaves=6,
)


#: a module that is visited twice, and between its visits one that has another tensor in the same memory
OVERLAPPING = Node(
    [],
    [
        Node([], [Node([SCALAR, SCALAR]), Node([SCALAR, replace(SCALAR, shared=0, view=True)])]),
        0,
    ],
)


class Builder:
    """Builds a tree, the same each time but for the values of what a checkpoint has."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._tensors: list[tuple[str, nn.Module, str]] = []
        self._modules: list[nn.Module] = []

    def build(self, node: Node) -> nn.Module:
        module = nn.Module()
        for number, held in enumerate(node.held):
            self._hold(module, f"t{number}", held)
        for number, child in enumerate(node.children):
            if isinstance(child, Node):
                module.add_module(f"m{number}", self.build(child))
            elif self._modules:
                module.add_module(f"m{number}", self._modules[child % len(self._modules)])
        self._modules.append(module)
        return module

    def _hold(self, module: nn.Module, name: str, held: Held) -> None:
        tensor: Tensor | None = None
        same = [each for each in self._tensors if each[0] == held.kind]
        if held.shared is not None and same:
            _, owner, other = same[held.shared % len(same)]
            tensor = getattr(owner, other)  # what it has become by now
            if held.view:
                rows = tensor.detach()[:2] if tensor.dim() else tensor.detach()
                tensor = nn.Parameter(rows, requires_grad=False) if held.kind == "parameter" else rows
        if tensor is None:
            seeded = held.kind != "non-persistent"
            values = torch.randint(-99, 99, held.shape, generator=self._random if seeded else None)
            tensor = values.to(held.dtype) if seeded else torch.full(held.shape, 7).to(held.dtype)
            if held.kind == "parameter":
                tensor = nn.Parameter(tensor, requires_grad=held.trained and tensor.is_floating_point())
        if isinstance(tensor, nn.Parameter):
            setattr(module, name, tensor)
        else:
            module.register_buffer(name, tensor, persistent=held.kind == "buffer")
        self._tensors.append((held.kind, module, name))


def structure(module: nn.Module) -> list[tuple[object, ...]]:
    """Every name with its dtype, ``requires_grad`` and values, and which earlier names are it or share its memory."""
    found: list[tuple[str, Tensor]] = [
        *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    ]  # fmt: skip
    rows: list[tuple[object, ...]] = []
    for number, (name, tensor) in enumerate(found):
        is_it = [other for other, earlier in found[:number] if earlier is tensor]
        shares = [other for other, earlier in found[:number] if tensor.numel() and overlap(earlier, tensor)]
        rows.append((name, tensor.dtype, tensor.requires_grad, tensor.tolist(), is_it, shares))
    return rows


def overlap(one: Tensor, other: Tensor) -> bool:
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(tree=OVERLAPPING, untied=True, halved=False)
@given(tree=TREES, untied=st.booleans(), halved=st.booleans())
def test_any_module_is_loaded_as_by_load_state_dict(tree: Node, untied: bool, halved: bool, tmp_path: Path) -> None:
    state = Builder(1).build(tree).state_dict()
    if untied:  # values that differ under names that are one tensor in the module
        state = OrderedDict((key, tensor.clone() + number % 3) for number, (key, tensor) in enumerate(state.items()))
    if halved:
        state = OrderedDict((key, tensor.half()) for key, tensor in state.items())
    torch.save(state, tmp_path / "a.pt")
    expected = Builder(2).build(tree)
    report = expected.load_state_dict(torch.load(tmp_path / "a.pt"))
    with empty_model():
        on_meta = Builder(3).build(tree)
    for module in (on_meta, Builder(4).build(tree)):
        assert load_checkpoint_with_low_memory(module, tmp_path / "a.pt") == report
        assert structure(module) == structure(expected)
    with empty_model():
        module = Builder(5).build(tree)
    load_state_dict_with_low_memory(module, state)
    assert [row[:4] for row in structure(module)] == [row[:4] for row in structure(expected)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES)
def test_what_safetensors_writes_of_a_module_is_loaded_as_it_does(tree: Node, tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    source = Builder(1).build(tree)
    save_model(source, path)
    expected = Builder(2).build(tree)
    load_model(expected, path)
    with empty_model():
        on_meta = Builder(3).build(tree)
    for module in (on_meta, Builder(4).build(tree)):
        load_checkpoint_with_low_memory(module, path)
        assert structure(module) == structure(expected)
