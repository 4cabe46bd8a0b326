"""What newer instructions change: the time, and of dot products the order of a sum."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lema_core.ops.context import Segment
from lema_core.quantization.block import QuantizedBlock
from lema_core.testing.quantized_weights import block_of, decoded, inputs_for
from lema_cuda import plugin
from lema_cuda.library import INSTRUCTIONS, INSTRUCTIONS_VARIABLE, instructions, open_library

#: beyond a tile of either width, a block, a piece, and sizes that divide nothing
SHAPES = ((1, 1, 5), (13, 70, 17), (193, 258, 33), (230, 513, 48), (12, 256, 64))
FORMATS = ("fp32", "fp16", "bf16", "int8", "int4-32", "int4-64", "int4-128", "nf4")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Called = Callable[..., list[list[Tensor]]]


def weight_of(name: str, rows: int, k: int) -> Tensor | QuantizedBlock:
    if name not in DTYPES:
        return block_of(name, rows, k)
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(0)).to(DTYPES[name])


def products(name: str, rows: int, k: int, n: int, compute: str = "auto") -> list[Tensor]:
    """out with a low-rank term, dx with one, and dx added to x."""
    from lema_cuda.linear import NativeLinear

    kernel, weight, of = NativeLinear(compute), weight_of(name, rows, k), inputs_for(rows, k, n, r=20)
    kernel.forward(weight, of.x, out := torch.empty_like(of.dy), (of.lora_B, of.inner, 0.5))
    kernel.input_gradient(weight, of.dy, dx := torch.empty_like(of.x), True, (of.lora_A, of.d_inner))
    kernel.input_gradient(weight, of.dy, both := of.x.clone(), False)
    return [out, dx, both]


def attention(rows: int, tokens: int, d: int) -> list[Tensor]:
    """out, dq, dk, dv of four heads that share two of keys and values"""
    from lema_cuda.attention import NativeAttention

    generator, n = torch.Generator().manual_seed(1), rows * tokens
    inputs = [torch.randn(h, d, n, generator=generator).transpose(1, 2)[None].requires_grad_() for h in (4, 2, 2)]
    out = NativeAttention().attend(*inputs, (Segment(0, n, rows, tokens),), d**-0.5)
    dy = torch.randn(out.shape, generator=generator)
    return [out.detach(), *torch.autograd.grad(out, inputs, dy)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_sum_in_the_same_order(old_and_new: Called, name: str, shape: tuple[int, int, int]) -> None:
    rows, k, n = shape
    old, new = old_and_new(products, name, rows, 64 * -(-k // 64) if name == "nf4" else k, n)
    assert all(map(torch.equal, old, new))


def exact(name: str, rows: int, k: int, n: int) -> list[Tensor]:
    """Of :func:`products` the numbers in fp64, then the sums of the magnitudes that they are made of."""
    weight, of = weight_of(name, rows, k), inputs_for(rows, k, n, r=20)
    wide = decoded(weight) if isinstance(weight, QuantizedBlock) else weight
    given = [each.double() for each in (wide, of.x, of.dy, of.lora_B, of.inner, of.lora_A, of.d_inner)]

    def of_all(W: Tensor, x: Tensor, dy: Tensor, B: Tensor, inner: Tensor, A: Tensor, d_inner: Tensor) -> list[Tensor]:
        return [W @ x + 0.5 * B @ inner, W.T @ dy + A.T @ d_inner, x + W.T @ dy]

    return of_all(*given) + of_all(*map(torch.abs, given))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [*SHAPES, (70, 640, 3), (640, 1100, 64)])
def test_sums_of_terms_are_as_exact_as_those_of_numbers(
    old_and_amx: Called, name: str, shape: tuple[int, int, int]
) -> None:
    rows, k, n = shape
    k = 64 * -(-k // 64) if name == "nf4" else k
    expected = exact(name, rows, k, n)
    old, new = (
        [(a - b).abs() / m for a, b, m in zip(found, expected, expected[3:], strict=False)]
        for found in old_and_amx(products, name, rows, k, n)
    )
    for of_numbers, of_terms in zip(old, new, strict=True):
        assert of_terms.max() <= 2.0**-22
        if of_terms.numel() > 1000:  # enough to compare
            assert of_terms.mean() <= 1.1 * of_numbers.mean()


def test_what_amx_loses_is_less_than_any_normal_number(old_and_amx: Called) -> None:
    """Numbers from 2^-126 on come through whole, what terms of them are below is lost."""

    def multiplied(x: Tensor) -> Tensor:
        from lema_cuda.linear import NativeLinear

        NativeLinear().forward(torch.ones(1, 1), x, out := torch.empty_like(x))
        return out

    tiny = torch.randn(1, 64, generator=torch.Generator().manual_seed(2)) * 2.0 ** torch.arange(-149, -85, 1.0)
    old, new = old_and_amx(multiplied, tiny)
    assert torch.equal(old, tiny) and (new - tiny).abs().max() < 2.0**-126


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_dot_products_agree_to_rounding_and_input_gradients_to_the_bit(old_and_new: Called, name: str, n: int) -> None:
    old, new = old_and_new(products, name, 70, 640, n)
    torch.testing.assert_close(new[0], old[0], rtol=1e-5, atol=1e-4)
    assert torch.equal(new[1], old[1]) and torch.equal(new[2], old[2])


@pytest.mark.parametrize("n", [1, 4, 5, 33, 64])
@pytest.mark.parametrize(("rows", "k"), [(13, 70), (230, 1100), (5, 31)])
def test_products_of_codes_are_exact(old_and_new: Called, rows: int, k: int, n: int) -> None:
    old, new = old_and_new(products, "int8", rows, k, n, "w8a8")
    assert torch.equal(new[0], old[0])


@pytest.mark.parametrize("n", [1, 4, 5, 33, 64])
@pytest.mark.parametrize("rank", [0, 20, 300])
@pytest.mark.parametrize("packed", [False, True])
def test_products_of_codes_are_exact_with_amx(old_and_amx: Called, n: int, rank: int, packed: bool) -> None:
    """Inputs that are packed in terms of bf16 round to the same codes."""

    def product(rows: int, k: int) -> Tensor:
        from lema_cuda.linear import NativeLinear

        kernel, of = NativeLinear("w8a8"), inputs_for(rows, k, n, r=max(rank, 1))
        update = (of.lora_B, of.inner, 0.5) if rank else None
        x = kernel.packed(of.x) if packed else of.x
        kernel.forward(block_of("int8", rows, k), x, out := torch.empty_like(of.dy), update)
        return out

    for rows, k in ((13, 70), (230, 1100), (5, 31), (64, 512)):
        old, new = old_and_amx(product, rows, k)
        assert torch.equal(new, old)


@pytest.mark.parametrize(("rows", "tokens", "d"), [(1, 1, 16), (2, 65, 64), (1, 200, 48), (3, 17, 128)])
def test_attention_is_the_same(old_and_new: Called, rows: int, tokens: int, d: int) -> None:
    old, new = old_and_new(attention, rows, tokens, d)
    assert all(map(torch.equal, old, new))


def test_kernels_say_what_they_compute_with(level: str) -> None:
    variants = {kernel.op: kernel.variant() for kernel in plugin.lema_kernels() if kernel.variant}
    assert variants == {"linear": level, "attention": level} and instructions() == level


def test_nothing_beyond_the_enum_is_taken(level: str) -> None:
    assert [open_library().lema_cpu_limit(most) for most in (-1, len(INSTRUCTIONS))] == [1, 1]
    assert instructions() == level


def told_with(asked: str) -> str:
    """The last line that a process with this variable prints of its instructions."""
    code = "from lema_cuda.library import instructions; print(instructions())"
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, INSTRUCTIONS_VARIABLE: asked},
        capture_output=True,
        text=True,
        check=False,
    )
    return (told.stdout or told.stderr).strip().splitlines()[-1]


def test_a_variable_holds_a_process_back(native: object) -> None:
    assert told_with("avx2") == "avx2" and told_with("") in INSTRUCTIONS
    assert told_with("sse9").endswith("LEMA_INSTRUCTIONS=sse9 is unknown; there are avx2, avx512, avx512_vnni, amx")
