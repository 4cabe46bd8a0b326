"""What the writer writes, the safetensors library reads."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lema_core.checkpoint import TensorToWrite, read_elements, read_header, read_tensor, write_safetensors
from lema_core.errors import CheckpointError


def lazy(name: str, tensor: Tensor) -> TensorToWrite:
    return name, tensor.dtype, tuple(tensor.shape), lambda: tensor


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "z.first": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),  # 14 bytes: what follows starts at no multiple of four
        "double": torch.randn(2, 2, dtype=torch.float64),
        "a.scalar": torch.tensor(4.0, dtype=torch.float16),
        "none": torch.empty(0, 3),
        "transposed": torch.randn(4, 6).t(),
        "ünïcode": torch.tensor([True, False]),
    }


def test_the_library_reads_it(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, [lazy(name, tensor) for name, tensor in tensors.items()], {"made": "here"})
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "made": "here"}


def test_own_reader_order_and_alignment(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, (lazy(name, tensor) for name, tensor in tensors.items()))
    infos = read_header(path).tensors
    assert list(infos) == list(tensors)
    offsets = [info.segment.offset for info in infos.values()]
    assert offsets == sorted(offsets) and offsets[0] % 4096 == 0
    assert all(torch.equal(read_tensor(infos[name]), tensor) for name, tensor in tensors.items())


def test_nothing_to_write_is_a_valid_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "empty.safetensors", [])
    assert load_file(tmp_path / "empty.safetensors") == {}
    assert read_header(tmp_path / "empty.safetensors").metadata == {"format": "pt"}


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Each tensor is asked for when it is written, and its memory let go before the next is asked for."""

    class Memory(bytearray):  # a bytearray itself takes no weak reference
        pass

    made: list[weakref.ref[Memory]] = []

    def make() -> Tensor:
        assert not any(memory() for memory in made)
        memory = Memory(40)
        made.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=torch.float32)

    write_safetensors(tmp_path / "m.safetensors", [(f"t{i}", torch.float32, (10,), make) for i in range(5)])
    assert len(made) == len(load_file(tmp_path / "m.safetensors")) == 5


def test_memory_of_python_stays_small(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        big = torch.ones(4_000_000)
        write_safetensors(tmp_path / "m.safetensors", [lazy(f"t{i}", big) for i in range(3)], fsync=False)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.ones(3).half(), r"torch\.float32 \[3\] expected, torch\.float16 \[3\] found"),
        (torch.ones(4), r"\[4\] found"),
    ],
)
def test_a_tensor_unlike_its_declaration_leaves_no_file(tmp_path: Path, given: Tensor, words: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(CheckpointError, match=rf"'w'.*{words}"):
        write_safetensors(path, [("w", torch.float32, (3,), lambda: given)])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_the_caller_passes_through(tmp_path: Path) -> None:
    def fail() -> Tensor:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        write_safetensors(tmp_path / "m.safetensors", [("w", torch.float32, (3,), fail)])
    assert list(tmp_path.iterdir()) == []


def test_names_twice_and_folders_that_are_not_there(tmp_path: Path) -> None:
    one = lazy("w", torch.ones(2))
    with pytest.raises(CheckpointError, match="'w' given twice"):
        write_safetensors(tmp_path / "m.safetensors", [one, one])
    with pytest.raises(CheckpointError, match=r"none/m\.safetensors: cannot be written: No such file"):
        write_safetensors(tmp_path / "none" / "m.safetensors", [one])


def test_a_tensor_may_come_in_blocks_one_in_memory_at_a_time(tmp_path: Path) -> None:
    whole = torch.arange(35.0).view(7, 5)
    alive: list[weakref.ref[Tensor]] = []

    def blocks() -> Iterator[Tensor]:
        for start in (0, 3, 6):
            assert not any(block() is not None for block in alive)
            block = whole[start : start + 3].clone()
            alive.append(weakref.ref(block))
            yield block
            del block

    path = tmp_path / "m.safetensors"
    write_safetensors(path, [("w", torch.float32, (7, 5), blocks), ("none", torch.float32, (0, 4), lambda: iter(()))])
    assert len(alive) == 3 and torch.equal(load_file(path)["w"], whole)
    infos = read_header(path).tensors
    assert infos["none"].shape == (0, 4)
    assert torch.equal(read_elements(infos["w"], 8, 11), whole.flatten()[8:19])


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([torch.ones(2)], "1 elements are missing"),
        ([torch.ones(2), torch.ones(2)], r"a block of torch\.float32 \[2\] found"),
        ([torch.ones(3).half()], r"a block of torch\.float16 \[3\] found"),
    ],
)
def test_blocks_that_do_not_make_the_tensor_leave_no_file(tmp_path: Path, blocks: list[Tensor], words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'w': torch\.float32 \[3\] expected, {words}"):
        write_safetensors(tmp_path / "m.safetensors", [("w", torch.float32, (3,), lambda: blocks)])
    assert list(tmp_path.iterdir()) == []
