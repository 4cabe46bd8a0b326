"""The device's kernels against plain torch: compiled for the host everywhere, and on a CUDA device if there is one."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lema_core.errors import PluginError
from lema_core.ops.linear import LinearKernel
from lema_core.ops.w8a8 import multiply_codes, round_inputs
from lema_core.quantization.block import QuantizedBlock
from lema_core.quantization.formats import Int8Rows, wire_formats
from lema_cuda import device_linear, library
from lema_cuda.device_linear import DeviceLinear
from lema_cuda.linear import DTYPES as DTYPE_CODES

PACKAGE = Path(__file__).parents[1]
DTYPES = tuple(DTYPE_CODES)
#: [R, K]: one number, odd ones, one beyond a chunk, a tile and a group, whole ones
SHAPES = ((1, 1), (3, 5), (5, 33), (66, 79), (7, 200), (65, 64), (4, 1152))
#: every format with the shapes it can have
CASES = [(name, shape) for name, each in wire_formats().items() for shape in SHAPES if each.refuses(shape) is None]
GUARD = 0x5A
#: relative, by norm, of sums in fp32
TOLERANCE = 1e-6
#: of what is rounded to a dtype once
ROUNDING = {torch.float32: TOLERANCE, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class Machine:
    """Where kernels run: a CUDA device, or this host."""

    def __init__(self, opened: ctypes.CDLL, device: torch.device) -> None:
        self.library = opened
        self.device = device

    def linear(self, weights_compute: str = "dequant") -> DeviceLinear:
        return DeviceLinear(weights_compute, None if self.device.type == "cuda" else lambda: 0)

    def where(self) -> tuple[int, int]:
        return (0, 0) if self.device.type == "cpu" else (0, torch.cuda.current_stream().cuda_stream)

    def to(self, block: QuantizedBlock, offset: int = 0) -> QuantizedBlock:
        """``offset``: of the payload, in bytes from a multiple of 16."""
        payload, *scales = (part.to(self.device) for part in block.parts)
        memory = torch.empty(payload.nbytes + offset + 16, dtype=torch.uint8, device=self.device)
        start = -memory.data_ptr() % 16 + offset
        place = memory[start : start + payload.nbytes].view(payload.dtype).view(payload.shape)
        return QuantizedBlock(block.format, block.shape, (place.copy_(payload), *scales))

    def decode(self, block: QuantizedBlock, out: Tensor) -> int:
        weight = ctypes.byref(device_linear._described(block))
        return self.library.lema_device_decode(weight, out.data_ptr(), DTYPE_CODES[out.dtype], *self.where())

    def gemv(self, block: QuantizedBlock, x_K: Tensor, out: Tensor) -> int:
        weight, x, dtype = ctypes.byref(device_linear._described(block)), x_K.data_ptr(), DTYPE_CODES[out.dtype]
        return self.library.lema_device_gemv(weight, x, out.data_ptr(), dtype, *self.where())


@pytest.fixture(scope="module")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The device code and what launches it, built for the host."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    built = tmp_path_factory.mktemp("device") / "libdevice_on_host.so"
    shim = PACKAGE / "tests/cuda_on_host"
    sources = [str(PACKAGE / "csrc/cuda/products.cpp"), str(shim / "kernels.cpp")]
    flags = [
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
    ]
    flags += ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-pthread"]
    command = [compiler, *flags, f"-I{shim}", "-include", str(shim / "runtime.h"), *sources, "-o", str(built)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0 and not child.stderr, child.stderr
    named = {name: each for name, each in library._CUDA_SIGNATURES.items() if not name.startswith("lema_copier")}
    return library._open(built, "lema_cuda_abi_version", named)


@pytest.fixture(
    params=[
        "host",
        "host, backwards",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ]
)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    if request.param == "cuda":
        assert library.device_refusals(torch.cuda.current_device()) == []
        return Machine(library.open_cuda_library(), torch.device("cuda:0"))
    opened = request.getfixturevalue("host_library")
    opened.host_backwards(request.param != "host")
    for module in (device_linear, library):
        monkeypatch.setattr(module, "open_cuda_library", lambda: opened)
    return Machine(opened, torch.device("cpu"))


# ------------------------------------------------------------------------------------------------------------ the twins


def random_block(name: str, shape: tuple[int, int], seed: int = 0) -> QuantizedBlock:
    """Random codes and scales."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for part in wire_formats()[name].parts(shape):
        if part.dtype == torch.int8:
            values = torch.randint(-127, 128, part.shape, dtype=torch.int8, generator=generator)
        elif part.dtype == torch.uint8:
            values = torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=generator)
            if shape[1] % 2:
                values[:, -1] &= 15
        else:
            values = torch.randn(part.shape, generator=generator).to(part.dtype)
        parts.append(values)
    return QuantizedBlock(wire_formats()[name], shape, tuple(parts))


def decoded(block: QuantizedBlock) -> Tensor:
    """fp32 [R, K] on the CPU, by the format's plain torch."""
    out = torch.empty(block.shape)
    QuantizedBlock(block.format, block.shape, tuple(part.cpu() for part in block.parts)).decode(out)
    return out


def w8a8_product(block: QuantizedBlock, x_KN: Tensor) -> Tensor:
    """fp32 [R, N]"""
    return multiply_codes(block, *round_inputs(x_KN))


def guarded(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Callable[[], bool]]:
    """Memory for ``count`` numbers between two of 64 bytes, and whether those are as they were."""
    nbytes = count * dtype.itemsize
    memory = torch.full((nbytes + 128,), GUARD, dtype=torch.uint8, device=device)
    inside = memory[64 : 64 + nbytes].view(dtype)
    return inside, lambda: bool((memory[:64] == GUARD).all() and (memory[64 + nbytes :] == GUARD).all())


def difference(out: Tensor, expected: Tensor) -> float:
    """Relative, by norm."""
    out, expected = out.double().cpu(), expected.double()
    return ((out - expected).norm() / expected.norm()).item()


# -------------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_decoding_is_the_formats_bit_for_bit(machine: Machine, name: str, shape: tuple[int, int]) -> None:
    for offset in (0, 1, 4):
        block = machine.to(random_block(name, shape), offset)
        for dtype in DTYPES:
            out, untouched = guarded(shape[0] * shape[1], dtype, machine.device)
            assert machine.decode(block, out) == 0
            assert torch.equal(out.view(shape).cpu(), decoded(block).to(dtype)) and untouched()


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_a_product_with_one_token(machine: Machine, name: str, shape: tuple[int, int]) -> None:
    (rows, k), block = shape, random_block(name, shape)
    last = machine.to(QuantizedBlock(block.format, (1, k), tuple(part[-1:].clone() for part in block.parts)))
    for offset, dtype in ((0, torch.float32), (1, torch.float16), (4, torch.bfloat16)):
        x_K = torch.randn(k, generator=torch.Generator().manual_seed(1)).to(dtype)
        out, untouched = guarded(rows, dtype, machine.device)
        assert machine.gemv(machine.to(block, offset), x_K.to(machine.device), out) == 0
        assert difference(out, decoded(block).double() @ x_K.double()) <= ROUNDING[dtype] and untouched()
        alone = torch.empty(1, dtype=dtype, device=machine.device)
        assert machine.gemv(last, x_K.to(machine.device), alone) == 0
        assert torch.equal(alone, out[-1:]), "a row's bits depend on its neighbours"


@pytest.mark.parametrize(("k", "n"), [(1, 1), (5, 2), (33, 3), (200, 7), (64, 66), (79, 17)])
def test_tokens_are_quantized_as_plain_torch_does(machine: Machine, k: int, n: int) -> None:
    padded = machine.library.lema_device_padded(k)
    assert padded % 16 == 0 and k <= padded < k + 16
    for dtype in DTYPES:
        x_KN = torch.randn(k, n, generator=torch.Generator().manual_seed(2)).to(dtype)
        x_KN[0, 0] = 1000.0
        wide = torch.zeros(k, n + 3, dtype=dtype, device=machine.device)
        wide[:, :n] = x_KN.to(machine.device)
        codes, untouched = guarded(n * padded, torch.int8, machine.device)
        scales, scales_untouched = guarded(n, torch.float32, machine.device)
        given = wide.data_ptr(), n + 3, k, n, DTYPE_CODES[dtype], codes.data_ptr(), scales.data_ptr()
        assert machine.library.lema_device_quantize(*given, *machine.where()) == 0
        codes_KN, scale_N = round_inputs(x_KN)
        codes_NP = codes.view(n, padded).cpu()
        assert torch.equal(codes_NP[:, :k].float(), codes_KN.t()) and not codes_NP[:, k:].any()
        assert torch.equal(scales.cpu(), scale_N) and untouched() and scales_untouched()


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (66, 79), (65, 64), (70, 1152)])
@pytest.mark.parametrize("n", [1, 3, 67])
def test_w8a8_sums_are_exact(machine: Machine, shape: tuple[int, int], n: int) -> None:
    block, kernel = random_block("int8", shape), machine.linear("w8a8")
    for offset, dtype in ((0, torch.float32), (0, torch.float16), (3, torch.bfloat16)):
        x_KN = torch.randn(shape[1], n, generator=torch.Generator().manual_seed(3)).to(dtype)
        wide = torch.full((shape[0], n + 2), 7.0, dtype=dtype, device=machine.device)
        kernel.forward(machine.to(block, offset), x_KN.to(machine.device), wide[:, 1:-1])
        assert torch.equal(wide[:, 1:-1].cpu(), w8a8_product(block, x_KN).to(dtype))
        assert (wide[:, 0] == 7).all() and (wide[:, -1] == 7).all()


def test_w8a8_of_extreme_numbers(machine: Machine) -> None:
    block = random_block("int8", (2, 4096))
    block.parts[0].fill_(127)
    x_KN = torch.full((4096, 6), 3.0)
    x_KN[:, 1] = 0
    x_KN[:, 2] = torch.finfo(torch.float32).max
    x_KN[:, 3] = 190 * 2.0**-149  # its scale is rounded to 2^-149
    x_KN[5, 4], x_KN[6, 5] = float("inf"), float("nan")
    out = torch.empty(2, 6, device=machine.device)
    machine.linear("w8a8").forward(machine.to(block), x_KN.to(machine.device), out)
    expected = w8a8_product(block, x_KN)
    assert torch.equal(out[:, :4].cpu(), expected[:, :4]) and not out[:, 1].any()
    assert out[:, 4:].isnan().all()


def test_nothing_outside_a_weight_is_read(machine: Machine) -> None:
    """Payload and scales end where a page ends, and the next one cannot be read."""
    if machine.device.type == "cuda":
        pytest.skip("of the host's memory")
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def at_a_page_end(values: Tensor) -> Tensor:
        pages = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = torch.frombuffer(mmap.mmap(-1, pages + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
        assert protect(memory.data_ptr() + pages, mmap.PAGESIZE, 0) == 0
        return memory[pages - values.nbytes : pages].view(values.dtype).view(values.shape).copy_(values)

    for name, shape in CASES:
        block = random_block(name, shape)
        block = QuantizedBlock(block.format, shape, tuple(map(at_a_page_end, block.parts)))
        for n in (1, 2):
            x_KN, out = at_a_page_end(torch.randn(shape[1], n)), torch.empty(shape[0], n)
            for compute in ("dequant", "w8a8") if name == "int8" else ("dequant",):
                machine.linear(compute).forward(block, x_KN, out)
                assert out.isfinite().all()


# ------------------------------------------------------------------------------------------------------ the whole class


@pytest.mark.parametrize("name", list(wire_formats()))
@pytest.mark.parametrize("n", [1, 6])
def test_products_are_those_of_the_decoded_weight(
    machine: Machine, name: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_linear, "_SCRATCH_ELEMENTS", 20 * 192)  # several pieces
    (rows, k), rank = (70, 192), 3
    block, generator = random_block(name, (rows, k)), torch.Generator().manual_seed(4)
    x, dy, low_rank, a = (torch.randn(s, generator=generator) for s in ((k, n), (rows, n), (rows, rank), (rank, n)))
    low_rank_A, da = torch.randn(rank, k, generator=generator), torch.randn(rank, n, generator=generator)
    twin, weight = LinearKernel(), decoded(block)
    expected, expected_dx = torch.empty(rows, n), torch.ones(k, n)
    twin.forward(weight, x, expected, (low_rank, a, 0.5))
    twin.input_gradient(weight, dy, expected_dx, False, (low_rank_A, da))

    kernel, put = machine.linear(), lambda each: each.to(machine.device)
    out, dx = torch.empty(rows, n, device=machine.device), torch.ones(k, n, device=machine.device)
    kernel.forward(machine.to(block), kernel.packed(put(x)), out, (put(low_rank), put(a), 0.5))
    kernel.input_gradient(machine.to(block), put(dy), dx, False, (put(low_rank_A), put(da)))
    assert difference(out, expected) <= TOLERANCE and difference(dx, expected_dx) <= TOLERANCE


@pytest.mark.parametrize(("name", "compute"), [("int4-32", "dequant"), ("int8", "w8a8")])
def test_a_segments_bits_are_its_own(machine: Machine, name: str, compute: str) -> None:
    rows, k, columns = 40, 96, ((0, 1), (1, 6), (6, 17))
    block, generator = machine.to(random_block(name, (rows, k))), torch.Generator().manual_seed(5)
    x, low_rank, a = (torch.randn(s, generator=generator).to(machine.device) for s in ((k, 17), (rows, 2), (2, 17)))
    kernel = machine.linear(compute)
    together = torch.empty(rows, 17, device=machine.device)
    kernel.forward(block, kernel.packed(x, columns), together, (low_rank, a, 2.0), columns)
    for start, stop in columns:
        alone = torch.empty(rows, stop - start, device=machine.device)
        whole = ((0, stop - start),)
        kernel.forward(
            block, x[:, start:stop].contiguous(), alone, (low_rank, a[:, start:stop].contiguous(), 2.0), whole
        )
        assert torch.equal(together[:, start:stop], alone)


def test_one_input_is_quantized_once_for_several_products(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, calls = machine.linear("w8a8"), []
    quantize = kernel._quantized
    monkeypatch.setattr(kernel, "_quantized", lambda x: calls.append(1) or quantize(x))
    inputs = kernel.packed(torch.randn(64, 5).to(machine.device))
    for seed in range(3):
        out = torch.empty(4, 5, device=machine.device)
        kernel.forward(machine.to(random_block("int8", (4, 64), seed)), inputs, out)
    weight, out = torch.randn(4, 64).to(machine.device), torch.empty(4, 5, device=machine.device)
    kernel.forward(weight, inputs, out)
    assert len(calls) == 1 and difference(out, weight.cpu() @ inputs.x_KN.cpu()) <= TOLERANCE


def test_what_is_computed_in_another_way_is_told_once(machine: Machine) -> None:
    class Foreign(Int8Rows):
        name = "foreign"

    int8 = random_block("int8", (4, 64))
    foreign = machine.to(QuantizedBlock(Foreign(), int8.shape, int8.parts))
    kernel, x = machine.linear("w8a8"), torch.randn(64, 5, device=machine.device)
    out = torch.empty(4, 5, device=machine.device)
    for block, told in (
        (
            machine.to(random_block("nf4", (4, 64))),
            "weights_compute=w8a8: weights in nf4 are dequantized, int8 ones alone",
        ),
        (foreign, "weights in foreign are decoded by torch, liblema_cuda reads int8, int4-32, int4-64, int4-128, nf4"),
    ):
        with pytest.warns(UserWarning, match=told):
            kernel.forward(block, x, out)
        assert difference(out, decoded(block) @ x.cpu()) <= TOLERANCE
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel.forward(block, x, out)


def test_what_does_not_fit_is_refused(machine: Machine) -> None:
    kernel, block = machine.linear("w8a8"), machine.to(random_block("int8", (4, 64)))
    x, out = torch.randn(64, 5, device=machine.device), torch.empty(4, 5, device=machine.device)
    with pytest.raises(PluginError, match=r"an activation is torch.float32 \[63, 5\]"):
        kernel.forward(block, x[1:], out)
    with pytest.raises(PluginError, match=r"an activation is torch\.float16"):
        kernel.forward(block, x.half(), out)
    cut = QuantizedBlock(block.format, (4, 64), (block.parts[0], block.parts[1][:3]))
    with pytest.raises(PluginError, match=r"part .scale of a weight in int8 is torch.float32 \[3\].*expected .* \[4\]"):
        kernel.forward(cut, x, out)
    many = random_block("int8", (1, (1 << 17) + 1))
    with pytest.raises(PluginError, match=r"'w8a8' sums 131072 products at most, and a weight has 131073 inputs; use"):
        kernel.forward(machine.to(many), torch.zeros(many.shape[1], 1, device=machine.device), out[:1, :1])
    weight = device_linear._described(block)
    for field, value in (("format", 2), ("format", 8), ("rows", -1), ("k", 0)):
        wrong = device_linear._Weight.from_buffer_copy(weight)
        setattr(wrong, field, value)
        given = ctypes.byref(wrong), out.data_ptr()
        assert machine.library.lema_device_decode(*given, 0, *machine.where()) == 1
        assert machine.library.lema_device_gemv(*given, out.data_ptr(), 0, *machine.where()) == 1
        assert (
            machine.library.lema_device_product(*given, out.data_ptr(), 1, out.data_ptr(), 1, 0, *machine.where()) == 1
        )
    assert machine.library.lema_device_decode(ctypes.byref(weight), out.data_ptr(), 3, *machine.where()) == 1


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
