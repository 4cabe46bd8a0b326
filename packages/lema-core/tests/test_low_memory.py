"""Loading into any module: values, ties, buffers, dtypes, hooks and reports are those of PyTorch's load_state_dict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from lema_core.errors import CheckpointError, ConfigError
from lema_core.low_memory import (
    StateDictError,
    empty_model,
    get_keys_to_submodule,
    load_checkpoint_with_low_memory,
    load_state_dict_with_low_memory,
)


class Everything(nn.Module):
    """A parameter and buffers of the root, a tied head, a shared module, a view of a weight, an LSTM's second list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.register_buffer("steps", torch.randint(0, 9, ()))
        self.register_buffer("inv_freq", 1.0 / 10 ** (torch.arange(3) / 3), persistent=False)
        self.register_parameter("absent", None)
        self.embedding = nn.Embedding(9, 6)
        self.lstm = nn.LSTM(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.blocks.append(self.blocks[0])
        self.top = nn.Parameter(self.blocks[1].weight.data[:2])
        self.scale.requires_grad_(False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x, _ = self.lstm(self.embedding(ids_BT) * self.scale)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.flatten(0, 1))) * self.inv_freq.sum()


def filled(seed: int) -> Everything:
    torch.manual_seed(seed)
    module = Everything()
    module.norm.running_mean.normal_()
    module.norm.num_batches_tracked.fill_(seed)
    return module


def empty() -> Everything:
    with empty_model():
        return Everything()


def saved_zip(module: nn.Module, folder: Path) -> Path:
    torch.save(module.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def saved_single(module: nn.Module, folder: Path) -> Path:
    """Tied tensors are in the file under one of their names, as the library writes them."""
    save_model(module, str(folder / "model.safetensors"))
    return folder / "model.safetensors"


def saved_shards(module: nn.Module, folder: Path) -> Path:
    whole = {key: tensor.clone().contiguous() for key, tensor in module.state_dict().items()}
    names = {f"model-0000{number}-of-00002.safetensors": list(whole)[number - 1 :: 2] for number in (1, 2)}
    for file, keys in names.items():
        save_file({key: whole[key] for key in keys}, folder / file)
    text = {"weight_map": {key: file for file, keys in names.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(str(text).replace("'", '"'))
    return folder


def saved_index(module: nn.Module, folder: Path) -> Path:
    return saved_shards(module, folder) / "model.safetensors.index.json"


FORMATS = [saved_zip, saved_single, saved_shards, saved_index]


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """Bit for bit, non-persistent buffers included."""
    for members in ("named_parameters", "named_buffers"):
        pairs = zip(getattr(found, members)(), getattr(expected, members)(), strict=True)
        for (name, tensor), (other_name, other) in pairs:
            assert name == other_name and tensor.dtype == other.dtype and tensor.shape == other.shape
            assert tensor.requires_grad == other.requires_grad, name
            assert (
                tensor.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
            ), name


@pytest.mark.parametrize("make", [empty, lambda: filled(2)], ids=["empty", "filled"])
@pytest.mark.parametrize("save", FORMATS)
def test_equals_load_state_dict(save: Callable[..., Path], make: Callable[[], Everything], tmp_path: Path) -> None:
    source = filled(1)
    expected = filled(3)
    result = expected.load_state_dict(torch.load(saved_zip(source, tmp_path)))
    module = make()
    assert load_checkpoint_with_low_memory(module, save(source, tmp_path)) == result
    assert_same(module, expected)
    assert module.head.weight is module.embedding.weight and module.blocks[2] is module.blocks[0]
    assert module.top.data_ptr() == module.blocks[1].weight.data_ptr()
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)
    ids = torch.randint(0, 9, (4, 5))
    assert torch.equal(module(ids), expected(ids))


def test_a_module_built_on_torchs_own_meta_device_is_filled_too(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module = nn.Sequential(nn.Linear(3, 4, device="meta"), nn.BatchNorm1d(4, device="meta"))
    load_checkpoint_with_low_memory(module, saved_zip(source, tmp_path))
    assert_same(module, source)


def test_tensors_that_are_not_on_meta_remain_the_same_objects(tmp_path: Path) -> None:
    """So an optimizer made before still trains them."""
    module = filled(2)
    before = {name: (id(tensor), tensor.data_ptr()) for name, tensor in module.state_dict(keep_vars=True).items()}
    module.scale.grad = torch.ones(6)
    load_checkpoint_with_low_memory(module, saved_zip(filled(1), tmp_path))
    after = {name: (id(tensor), tensor.data_ptr()) for name, tensor in module.state_dict(keep_vars=True).items()}
    assert before == after and module.scale.grad is not None


def test_what_autograd_saved_of_an_overwritten_tensor_is_known_to_be_stale(tmp_path: Path) -> None:
    source, module = nn.Linear(3, 3), nn.Linear(3, 3)
    output = module(torch.ones(3, requires_grad=True)).square().sum()
    load_checkpoint_with_low_memory(module, saved_zip(source, tmp_path))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_what_surrounds_the_call_does_not_matter(tmp_path: Path) -> None:
    source = nn.Conv2d(3, 4, 3).double()
    path = saved_zip(source, tmp_path)
    with torch.device("meta"):
        module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        load_checkpoint_with_low_memory(module, path)
    assert torch.equal(module.weight, source.weight.float())
    with torch.inference_mode():
        module = nn.Conv2d(3, 4, 3)
        load_checkpoint_with_low_memory(module, path)
        assert torch.equal(module.weight, source.weight.float())


def test_mode_attributes_and_hooks_remain(tmp_path: Path) -> None:
    with empty_model():
        module = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    module[0].eval()
    calls: list[str] = []
    module.register_forward_hook(lambda *_: calls.append("forward"))
    weight = module[0].weight
    weight.marked = "yes"
    handle = weight.register_hook(lambda grad: calls.append("grad"))
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    load_checkpoint_with_low_memory(module, saved_zip(nn.Sequential(nn.Linear(3, 3)), tmp_path))
    assert (module.training, module[0].training, module[1].training) == (True, False, True)
    assert module[0].weight.marked == "yes"
    module(torch.ones(3)).sum().backward()
    assert calls == ["forward", "grad", "accumulated"]
    handle.remove()
    module(torch.ones(3)).sum().backward()
    assert calls[3:] == ["forward", "accumulated"]


def test_a_parameter_of_another_class_stays_one(tmp_path: Path) -> None:
    class Marked(nn.Parameter):
        pass

    def make() -> nn.Module:
        module = nn.Module()
        module.weight = Marked(torch.ones(2))
        return module

    with empty_model():
        module = make()
    assert type(module.weight) is Marked and module.weight.is_meta
    load_checkpoint_with_low_memory(module, saved_zip(make(), tmp_path))
    assert type(module.weight) is Marked and module.weight.tolist() == [1, 1]


# ------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("make", ["empty", "filled"])
@pytest.mark.parametrize("save", FORMATS)
def test_dtype_policy(save: Callable[..., Path], make: str, tmp_path: Path) -> None:
    source = filled(1).to(torch.bfloat16)
    path = save(source, tmp_path)
    expected = filled(3)
    expected.load_state_dict(source.state_dict())
    module = empty() if make == "empty" else filled(2)
    load_checkpoint_with_low_memory(module, path)
    assert_same(module, expected)

    with empty_model():
        module = nn.Linear(3, 3)
    module = module if make == "empty" else nn.Linear(3, 3)
    source = nn.Linear(3, 3).to(torch.float64)
    load_checkpoint_with_low_memory(module, saved_zip(source, tmp_path), dtype="checkpoint")
    assert_same(module, source)


def test_integers_are_cast_where_grad_is_required_or_refused() -> None:
    state = {"weight": torch.arange(9).view(3, 3), "bias": torch.arange(3)}
    with empty_model():
        module = nn.Linear(3, 3)
    with pytest.raises(CheckpointError, match=r"^weight: requires grad, torch.int64 found; use dtype='module'"):
        load_state_dict_with_low_memory(module, state, dtype="checkpoint")
    assert module.weight.is_meta and module.weight.requires_grad
    load_state_dict_with_low_memory(module, state)
    assert module.weight.dtype == torch.float32 and module.weight.flatten().tolist() == list(range(9))
    module.requires_grad_(False)
    load_state_dict_with_low_memory(module, state, dtype="checkpoint")
    assert module.weight.dtype == torch.int64
    with pytest.raises(ConfigError, match="dtype='float': 'module' or 'checkpoint' expected"):
        load_state_dict_with_low_memory(module, state, dtype="float")  # type: ignore[arg-type]


def test_memory_that_is_shared_on_meta_has_one_dtype() -> None:
    state = {
        key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in filled(1).state_dict().items()
    }
    module = empty()
    with pytest.raises(CheckpointError, match=r"^top: shares memory with another tensor as torch.float32"):
        load_state_dict_with_low_memory(module, state, dtype="checkpoint")
    assert all(parameter.is_meta for parameter in module.parameters())


# ----------------------------------------------------------------------------------------------- a state dict in memory


def test_a_state_dict_in_memory_is_not_copied_into_a_module_on_meta() -> None:
    source = nn.Linear(3, 3)
    state = source.state_dict()
    with empty_model():
        module = nn.Linear(3, 3)
    load_state_dict_with_low_memory(module, state)
    assert module.weight.data_ptr() == source.weight.data_ptr() and module.weight is not source.weight
    load_state_dict_with_low_memory(other := nn.Linear(3, 3), state)
    assert other.weight.data_ptr() != source.weight.data_ptr() and torch.equal(other.weight, source.weight)


def test_one_tensor_under_two_names_does_not_tie_a_module_that_is_not_tied() -> None:
    weight = torch.ones(3, 3)
    state = OrderedDict((f"{i}.weight", weight) for i in (0, 1))
    with empty_model():
        module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    load_state_dict_with_low_memory(module, state)
    with torch.no_grad():
        module[0].weight.zero_()
    assert module[1].weight.sum() == 9


def test_the_callers_state_dict_is_left_alone() -> None:
    source = nn.BatchNorm1d(3)
    state = source.state_dict(keep_vars=True)
    metadata = dict(state._metadata[""])
    load_state_dict_with_low_memory(nn.BatchNorm1d(3), state)
    assert source.weight.requires_grad and state["weight"] is source.weight
    assert state._metadata[""] == metadata


def test_a_state_dict_on_meta_has_no_data() -> None:
    module = nn.Linear(3, 3)
    before = module.weight.clone()
    with pytest.raises(CheckpointError, match=r"^weight: without data: the state dict holds it on the meta device"):
        load_state_dict_with_low_memory(module, nn.Linear(3, 3, device="meta").state_dict())
    assert torch.equal(module.weight, before)
    with pytest.raises(TypeError, match="Expected state_dict to be dict-like, got <class 'list'>"):
        load_state_dict_with_low_memory(module, [])  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- PyTorch's report


def broken(state: dict[str, Tensor], kinds: set[str]) -> OrderedDict[str, Any]:
    state = OrderedDict((key, tensor.clone().contiguous()) for key, tensor in state.items())
    if "missing" in kinds:
        del state["scale"], state["lstm.bias_hh_l0"], state["norm.running_mean"]
    if "unexpected" in kinds:
        state.update({key: torch.ones(2) for key in ("foo", "lstm.bar.weight", "inv_freq", "absent")})
    if "shape" in kinds:
        state["blocks.1.bias"] = torch.ones(7)
    return state


@pytest.mark.parametrize("make", [empty, lambda: filled(2)], ids=["empty", "filled"])
@pytest.mark.parametrize("kinds", [{"missing"}, {"unexpected"}, {"shape"}, {"missing", "unexpected", "shape"}])
def test_strict_reports_what_pytorch_reports(kinds: set[str], make: Callable[[], Everything], tmp_path: Path) -> None:
    state = broken(filled(1).state_dict(), kinds)
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(RuntimeError) as expected:
        filled(3).load_state_dict(state)
    module = make()
    before = {name: (tensor, tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
    with pytest.raises(RuntimeError) as found:
        load_state_dict_with_low_memory(module, state)
    assert str(found.value) == str(expected.value)
    for file, read in (("a.pt", torch.load), ("a.safetensors", load_file)):
        with pytest.raises(RuntimeError) as expected:
            filled(3).load_state_dict(read(tmp_path / file))
        with pytest.raises(StateDictError) as in_file:
            load_checkpoint_with_low_memory(module, tmp_path / file)
        assert str(in_file.value) == f"{tmp_path / file}: {expected.value}"
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert tensor is before[name][0] and (tensor.is_meta or torch.equal(tensor, before[name][1]))
        assert tensor.requires_grad == (
            tensor.is_floating_point() and isinstance(tensor, nn.Parameter) and name != "scale"
        )


def test_without_strict_the_rest_is_loaded_and_the_report_returned(tmp_path: Path) -> None:
    state = broken(filled(1).state_dict(), {"missing", "unexpected"})
    expected = filled(2)
    report = expected.load_state_dict(state, strict=False)
    module = filled(2)
    assert load_state_dict_with_low_memory(module, state, strict=False) == report
    assert report.missing_keys and report.unexpected_keys
    assert_same(module, expected)
    module = empty()
    assert load_state_dict_with_low_memory(module, state, strict=False) == report
    assert [key for key, tensor in module.state_dict().items() if tensor.is_meta] == report.missing_keys


def test_a_name_of_a_tied_tensor_is_missing_where_pytorch_says_so() -> None:
    state = filled(1).state_dict()
    del state["head.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "head.weight"'):
        load_state_dict_with_low_memory(empty(), state)


def test_keys_to_submodule() -> None:
    module = filled(1)
    found = get_keys_to_submodule(module)
    assert list(found) == list(module.state_dict())
    assert found["scale"] is found["steps"] is module
    assert found["head.weight"] is module.head and found["embedding.weight"] is module.embedding
    assert found["blocks.2.bias"] is found["blocks.0.bias"] is module.blocks[0]
    assert get_keys_to_submodule(empty()).keys() == found.keys()
