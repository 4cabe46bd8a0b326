"""Hostile and odd safetensors files; the oracle for what is valid is the safetensors library."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from lema_core.checkpoint import read_header, read_tensor
from lema_core.checkpoint.header import DTYPES
from lema_core.errors import CheckpointError

SOME = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_reads_what_the_library_writes(tmp_path: Path, dtype: torch.dtype) -> None:
    if dtype is torch.float8_e8m0fnu:
        pytest.skip("the library has no torch type for F8_E8M0")
    torch.manual_seed(0)
    tensors = {
        "matrix": torch.randint(0, 2, (3, 5)).to(dtype),
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.zeros((0, 4), dtype=dtype),
        "ünïcode": torch.zeros(7, dtype=dtype),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = read_tensor(header.tensors[name])
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert read.untyped_storage().tolist() == tensor.untyped_storage().tolist()


@pytest.mark.parametrize("metadata", [None, {}])
def test_metadata_may_be_absent_or_empty(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    header = {"a": SOME} if metadata is None else {"__metadata__": metadata, "a": SOME}
    path = write_raw(tmp_path / "a.safetensors", header, bytes(8))
    assert read_header(path).metadata == {}
    assert load_file(path).keys() == read_header(path).tensors.keys()


def test_a_file_of_metadata_alone_is_valid(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.safetensors", {"__metadata__": {"k": "v"}})
    assert read_header(path).tensors == {} and read_header(path).metadata == {"k": "v"}


def entry(**changes: object) -> dict[str, object]:
    return {"a": {**SOME, **changes}}


BAD: list[tuple[str, object, bytes, str]] = [
    ("no bytes after the header", {"a": SOME}, b"", "bytes expected"),
    ("16 stray bytes", {"a": SOME}, bytes(24), "bytes expected"),
    ("overlap", {"a": SOME, "b": {**SOME, "data_offsets": [4, 12]}}, bytes(12), "'b' overlaps tensor 'a'"),
    ("same place", {"a": SOME, "b": SOME}, bytes(8), "overlaps"),
    ("hole", {"a": SOME, "b": {**SOME, "data_offsets": [12, 20]}}, bytes(20), "'b' leaves a hole after tensor 'a'"),
    ("hole at the start", entry(data_offsets=[8, 16]), bytes(16), "leaves a hole after the header"),
    ("range too short", entry(data_offsets=[0, 4]), bytes(4), "8 bytes expected for F32 [2], 4 found"),
    ("range backwards", entry(data_offsets=[8, 0]), bytes(8), "'a'"),
    ("unknown dtype", entry(dtype="F31"), bytes(8), "dtype 'F31'"),
    ("dtype is no string", entry(dtype=["F32"]), bytes(8), "dtype ['F32']"),
    ("negative size", entry(shape=[-2]), bytes(8), "shape [-2]"),
    ("fraction", entry(shape=[2.0]), bytes(8), "shape [2.0]"),
    ("boolean size", entry(shape=[True, 2]), bytes(8), "shape [True, 2]"),
    ("infinite size", b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}', bytes(8), "shape [inf]"),
    ("huge shape", entry(shape=[2**62, 2**62]), bytes(8), "8 found"),
    ("offsets are no list", entry(data_offsets=8), bytes(8), "data_offsets 8"),
    ("three offsets", entry(data_offsets=[0, 4, 8]), bytes(8), "data_offsets"),
    ("more fields", entry(note="x"), bytes(8), "header entry"),
    ("entry is no map", {"a": [1]}, bytes(8), "header entry"),
    ("metadata of numbers", {"__metadata__": {"a": 1}}, b"", "__metadata__"),
    ("metadata is no map", {"__metadata__": "x"}, b"", "__metadata__"),
    ("a list", [1, 2], b"", "does not begin with '{'"),
    ("not JSON", b"{'a': 1}", b"", "not valid JSON"),
    ("not UTF-8", b'{"\xff": 1}', b"", "not valid JSON"),
    ("nested without end", b'{"a":' + b"[" * 100_000, b"", "not valid JSON"),
    ("empty header", b"", b"", "does not begin with '{'"),
    ("name twice", b'{"a":%b,"a":%b}' % ((json.dumps(SOME).encode(),) * 2), bytes(8), "'a' twice"),
    ("field twice", b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', bytes(8), "'dtype' twice"),
]


@pytest.mark.parametrize(("header", "data", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_headers_are_refused_by_name(tmp_path: Path, header: object, data: bytes, words: str) -> None:
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert words in message and str(path) in message and "\n" not in message


@pytest.mark.parametrize("length", [2**40, 2**63, 2**64 - 1, 100_000_001, 99_999_999, 64])
def test_a_lying_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = write_raw(tmp_path / "bad.safetensors", {"a": SOME}, bytes(8), length=length)
    path.write_bytes(path.read_bytes()[:60])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"bytes .*expected, \d+ found; .*download it again"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("keep", [0, 1, 7])
def test_shorter_than_the_length_field(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(bytes(keep))
    with pytest.raises(CheckpointError, match=rf"cut\.safetensors: expected at least 8 bytes .* found {keep}"):
        read_header(path)


def test_things_that_are_no_files(tmp_path: Path) -> None:
    pointer = tmp_path / "lfs.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_header(pointer)
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "none.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"folder\.safetensors"):
        read_header(tmp_path / "folder.safetensors")


def test_cut_data_is_found_in_the_header_and_a_later_cut_when_reading(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(100)}, path)
    whole = path.read_bytes()
    info = read_header(path).tensors["w"]
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=rf"{len(whole)} bytes expected, {len(whole) - 100} bytes found.*again"):
        read_header(path)
    with pytest.raises(CheckpointError, match=r"'w': 400 bytes expected, 300 bytes found"):
        read_tensor(info)
    path.unlink()
    with pytest.raises(CheckpointError, match="'w' cannot be read"):
        read_tensor(info)


sizes = st.one_of(st.integers(-2, 5), st.sampled_from([2**31, 2**63, 2**200, 1.5, True, None, "1", [], {}]))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from([*DTYPES, "F4", ""]), values),
        "shape": st.one_of(st.lists(sizes, max_size=3), values),
        "data_offsets": st.one_of(st.lists(sizes, min_size=2, max_size=2), st.just([0, 8]), st.just([8, 16]), values),
    }
)
headers = st.one_of(
    st.dictionaries(
        st.one_of(st.just("__metadata__"), st.text(max_size=4)), st.one_of(entries, st.just(SOME), values), max_size=3
    ).map(lambda header: json.dumps(header).encode()),
    st.binary(max_size=40),
    st.binary(max_size=40).map(lambda tail: b"{" + tail),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=headers, data=st.binary(max_size=24), length=st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_any_bytes_are_read_or_refused(tmp_path: Path, header: bytes, data: bytes, length: int | None) -> None:
    path = write_raw(tmp_path / "fuzz.safetensors", header, data, length)
    try:
        ours = read_header(path).tensors
    except CheckpointError as error:
        assert str(path) in str(error)
        return
    with safe_open(path, "pt") as theirs:  # what passes here, the library can read too
        assert set(theirs.keys()) == set(ours)
        for name, info in ours.items():
            assert tuple(theirs.get_slice(name).get_shape()) == info.shape


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 300))
def test_flipped_bytes_and_cuts(tmp_path: Path, position: int, byte: int, cut: int) -> None:
    path = tmp_path / "flip.safetensors"
    save_file({"a": torch.ones(4), "b": torch.zeros(2, 3, dtype=torch.bfloat16)}, path, metadata={"format": "pt"})
    raw = bytearray(path.read_bytes())
    raw[position % len(raw)] = byte
    path.write_bytes(raw[: len(raw) - cut if cut < 50 else None])
    try:
        header = read_header(path)
    except CheckpointError:
        return
    try:
        load_file(path)
    except SafetensorError as error:
        pytest.fail(f"accepted what the library refuses: {error}")
    for info in header.tensors.values():
        read_tensor(info)
