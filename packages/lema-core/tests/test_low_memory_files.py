"""Files that cannot be loaded: one line with file and tensor, and the module as it was."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from lema_core.errors import CheckpointError
from lema_core.low_memory import empty_model, load_checkpoint_with_low_memory
from lema_core.store.disk import DiskReader


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))


def refused(path: Path) -> str:
    """What is said of ``path``; modules with and without memory are as they were."""
    with empty_model():
        on_meta = make()
    messages = set()
    for module in (make(), on_meta):
        before = {name: (tensor, tensor.clone()) for name, tensor in module.named_parameters()}
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint_with_low_memory(module, path)
        messages.add(str(caught.value))
        for name, tensor in module.named_parameters():
            assert tensor is before[name][0] and tensor.requires_grad
            assert tensor.is_meta or torch.equal(tensor, before[name][1])
    (message,) = messages
    assert message.startswith(f"{path}") and "\n" not in message
    return message


class Code:
    """Runs a command when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_with_code(tmp_path: Path) -> None:
    torch.save({**make().state_dict(), "x": Code(tmp_path / "ran")}, tmp_path / "a.pt")
    message = refused(tmp_path / "a.pt")
    assert "a pickle that calls posix.system; code is not run, only tensors are read" in message
    assert not (tmp_path / "ran").exists()
    torch.save(make(), tmp_path / "a.pt")
    assert "a pickle that calls torch.nn.modules.container.Sequential; code is not run" in refused(tmp_path / "a.pt")


def test_cut_files(tmp_path: Path) -> None:
    torch.save(make().state_dict(), tmp_path / "a.pt")
    save_file(make().state_dict(), tmp_path / "a.safetensors")
    for name, words in (("a.pt", "a cut or damaged torch.save file"), ("a.safetensors", "bytes expected")):
        whole = (tmp_path / name).read_bytes()
        for size in (len(whole) - 1, len(whole) // 2, 20, 6, 0):
            (tmp_path / name).write_bytes(whole[:size])
            message = refused(tmp_path / name)
            assert size < 100 or words in message


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert "cannot be read: No such file or directory" in refused(tmp_path / "none.pt")
    (tmp_path / "folder").mkdir()
    assert "no *.safetensors in this folder" in refused(tmp_path / "folder")
    path = tmp_path / "a.pt"
    torch.save(make().state_dict(), path, _use_new_zipfile_serialization=False)
    assert "a pickle without a zip around it" in refused(path)
    torch.save(torch.ones(3), path)
    assert "Tensor found, a dict of names to tensors expected" in refused(path)
    torch.save({"epoch": 3, "model": make().state_dict()}, path)
    assert "dicts and no tensors are at its top ('model')" in refused(path)
    torch.save({1: torch.ones(3)}, path)
    assert "dict found, a dict of names to tensors expected" in refused(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "text")
    assert "a zip file, but not of torch.save: it holds no data.pkl" in refused(path)
    torch.save({"0.weight": torch.eye(3).to_sparse()}, path)
    assert "tensor '0.weight': Tensor, torch.sparse_coo: only plain tensors are read" in refused(path)
    torch.save({"0.weight": torch.ones(3, dtype=torch.complex64).conj()}, path)
    assert "tensor '0.weight': saved as a lazy conjugate" in refused(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("a/constants.pkl", "a/data.pkl"):
            archive.writestr(name, "")
    assert "a TorchScript archive, which is a program" in refused(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "a cut or damaged torch.save file" in refused(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "a Git LFS pointer" in refused(path)


def rewritten(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """``path`` with other contents in its records."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            if not name.endswith(".format_version"):  # which promises torch's own layout of the zip file
                archive.writestr(name, change(name, data))
    return path


def test_records_that_are_not_what_the_pickle_says(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"

    def saved() -> Path:
        torch.save(make().state_dict(), path)
        return path

    plain = rewritten(saved(), lambda _, data: data)
    module = make()
    load_checkpoint_with_low_memory(module, plain)
    assert torch.equal(module[0].weight, torch.load(path)["0.weight"])
    message = refused(rewritten(saved(), lambda name, data: data[:-8] if name.endswith("data/2") else data))
    assert "tensor '1.weight': 2400 bytes expected, 2392 found in a/data/2" in message
    message = refused(rewritten(saved(), lambda _, data: data, zipfile.ZIP_DEFLATED))
    assert "tensor '0.weight': compressed" in message
    message = refused(rewritten(saved(), lambda name, data: b"big" if name.endswith("byteorder") else data))
    assert "byte order 'big' found, 'little' expected" in message
    message = refused(rewritten(saved(), lambda name, data: b"" if name.endswith("data.pkl") else data))
    assert "damaged" in message
    message = refused(rewritten(saved(), lambda name, data: pickle.dumps(7, 2) if name.endswith(".pkl") else data))
    assert "int found, a dict of names to tensors expected" in message


def test_one_of_the_shards_is_missing(tmp_path: Path) -> None:
    names = {"0.weight": "one.safetensors", "0.bias": "two.safetensors"}
    save_file({"0.weight": torch.ones(30, 40)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(str({"weight_map": names}).replace("'", '"'))
    assert "two.safetensors is missing" in refused(tmp_path)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_disk_that_fails_while_data_is_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"a.{kind}"
    (save_file if kind == "safetensors" else torch.save)(make().state_dict(), path)
    read = DiskReader.read

    def failing(self: DiskReader, *arguments: Any) -> int:
        if arguments[-1] == ("1.bias",):
            raise CheckpointError(f"{path}: cannot read 1.bias at byte 7: Input/output error")
        return read(self, *arguments)

    monkeypatch.setattr(DiskReader, "read", failing)
    with empty_model():
        module = make()
    with pytest.raises(CheckpointError, match=r"cannot read 1\.bias at byte 7: Input/output error"):
        load_checkpoint_with_low_memory(module, path)
    assert all(parameter.is_meta for parameter in module.parameters())
    monkeypatch.undo()
    load_checkpoint_with_low_memory(module, path)
    assert not any(parameter.is_meta for parameter in module.parameters())


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_saved_views_slices_and_odd_dtypes(tmp_path: Path) -> None:
    """Tensors that share a storage, or are a small part of one, lead to their own bytes; some take several reads."""
    base = torch.randn(1100, 1300)
    state: dict[str, Tensor] = {
        "whole": base, "row": base[7], "block": base[3:9, 2:5], "turned": base.t(), "every": base[::3, ::2],
        "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "fp16": base[:2].half(), "flags": base[0] > 0,
        "complex": torch.complex(base[:4, :4], base[4:8, :4]), "same": base[7], "wide": base[0, :1].expand(5),
        "fp8": base[:3].to(torch.float8_e4m3fn), "long": torch.arange(5), "later": base.reshape(-1)[-1:],
    }  # fmt: skip

    class Holder(nn.Module):
        def __init__(self, dtype: torch.dtype | None = None) -> None:
            super().__init__()
            for name, tensor in state.items():
                self.register_buffer(name, torch.zeros(tensor.shape, dtype=dtype or tensor.dtype))

    torch.save(state, tmp_path / "a.pt")
    for policy, dtype in (("module", None), ("checkpoint", torch.float32), ("module", torch.float64)):
        expected = Holder(dtype if policy == "module" else None)
        expected.load_state_dict(torch.load(tmp_path / "a.pt"))
        with empty_model():
            on_meta = Holder(dtype)
        for module in (on_meta, Holder(dtype)):
            load_checkpoint_with_low_memory(module, tmp_path / "a.pt", dtype=policy)  # type: ignore[arg-type]
            for name, buffer in expected.named_buffers():
                found = module.get_buffer(name)
                assert found.dtype == buffer.dtype and torch.equal(
                    found.to(torch.complex128), buffer.to(torch.complex128)
                )


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of odd pickles
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_load_or_are_refused(data: st.DataObject, tmp_path: Path) -> None:
    """Nothing else than CheckpointError, whatever byte is wrong."""
    buffer = io.BytesIO()
    torch.save(make().state_dict(), buffer)
    damaged = bytearray(buffer.getvalue())
    places = [*range(1500), *range(len(damaged) - 1500, len(damaged))]
    for place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)):
        damaged[place] = data.draw(st.integers(0, 255))
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "a.pt").write_bytes(damaged)
    with empty_model():
        module = make()
    try:
        load_checkpoint_with_low_memory(module, folder / "a.pt")
    except CheckpointError as error:
        assert str(error).startswith(f"{folder / 'a.pt'}: ")
        assert all(parameter.is_meta for parameter in module.parameters())
