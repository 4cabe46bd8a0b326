"""Blocks, turns and options, without a model's weights; and that lema finds the method."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lema_badam.blocks import BlockOptions, Turns, cut_blocks
from lema_badam.method import BlockTraining
from lema_badam.plugin import lema_training_methods
from lema_core.adapter import TensorSpec
from lema_core.errors import ConfigError
from lema_core.method_options import read_options
from lema_core.plugins import get_plugin_manager
from lema_core.records import load_object
from lema_core.selection import select_tensors


@dataclass
class FiveLayers:
    tied: bool = False
    n_layers: int = 5

    def tensors(self) -> list[TensorSpec]:
        names = [("norm.weight", (4,), "norm"), ("q_proj.weight", (4, 4), "linear")]
        return [
            TensorSpec("model.embed.weight", (9, 4), "embedding"),
            *(
                TensorSpec(f"model.layers.{layer}.{name}", shape, role, layer)
                for layer in range(self.n_layers)
                for name, shape, role in names
            ),
            TensorSpec("model.norm.weight", (4,), "norm"),
            TensorSpec("lm_head.weight", (9, 4), "head", tied_to="model.embed.weight" if self.tied else None),
        ]


def cut(
    adapter: FiveLayers, per_block: int = 1, modules: list[str] | None = None, layers: list[int | str] | None = None
) -> list[list[str]]:
    selected = select_tensors(adapter, modules or [], layers or []).tensors
    return [[short(name) for name in block] for block in cut_blocks(adapter, selected, per_block)]


def short(name: str) -> str:
    return name.removeprefix("model.").removeprefix("layers.").removesuffix(".weight")


def test_every_tensor_is_in_one_block() -> None:
    layers = [[f"{i}.norm", f"{i}.q_proj"] for i in range(5)]
    assert cut(FiveLayers()) == [["embed"], *layers, ["norm", "lm_head"]]
    assert cut(FiveLayers(tied=True)) == [["embed", "norm"], *layers]


def test_neighbours_together() -> None:
    found = cut(FiveLayers(), 2, ["q_proj"])
    assert found == [["0.q_proj", "1.q_proj"], ["2.q_proj", "3.q_proj"], ["4.q_proj"]]
    assert len(cut(FiveLayers(), 99)) == 3


def test_layers_that_have_nothing_selected_have_no_turn() -> None:
    assert cut(FiveLayers(), 2, ["q_proj"], [0, 3, 4]) == [["0.q_proj", "3.q_proj"], ["4.q_proj"]]
    assert cut(FiveLayers(), 1, [], ["head", 2]) == [["2.norm", "2.q_proj"], ["lm_head"]]


@pytest.mark.parametrize(
    "mode, order",
    [("ascending", [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0]), ("descending", [2, 2, 2, 1, 1, 1, 0, 0, 0, 2, 2, 2])],
)
def test_turns(mode: str, order: list[int]) -> None:
    turns = Turns(3, 3, mode, seed=0)
    assert [turns.block(step) for step in range(12)] == order
    assert [step for step in range(12) if turns.begins(step)] == [0, 3, 6, 9]


def test_an_order_is_drawn_for_each_pass_and_from_the_seed() -> None:
    passes = [[Turns(8, 2, "random", 5).block(16 * i + 2 * j) for j in range(8)] for i in range(20)]
    assert all(sorted(order) == list(range(8)) for order in passes)
    assert len(set(map(tuple, passes))) > 15
    assert passes != [[Turns(8, 2, "random", 6).block(16 * i + 2 * j) for j in range(8)] for i in range(20)]
    # A run that goes on years later draws what was drawn.
    assert passes[:2] == [[6, 7, 3, 2, 1, 0, 4, 5], [1, 4, 6, 7, 3, 0, 5, 2]]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"switch_blok_every": 5}, "unknown option 'switch_blok_every'; did you mean 'switch_block_every'?"),
        ({"switch_block_every": 0}, "switch_block_every: a whole number from 1 up expected, 0 found"),
        ({"layers_per_block": -1}, "layers_per_block: a whole number from 1 up expected, -1 found"),
        ({"switch_mode": "acsending"}, "'acsending' found; did you mean 'ascending'?"),
    ],
)
def test_options_that_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(BlockOptions, given)
    assert str(caught.value).startswith("method_options: ") and said in str(caught.value)


def test_it_is_found_once_it_is_installed() -> None:
    manager = get_plugin_manager()
    assert [problem for problem in manager.problems if problem.package == "lema-badam"] == []
    (record,) = lema_training_methods()
    assert manager.training_method("badam") == record and load_object(record.method) is BlockTraining
