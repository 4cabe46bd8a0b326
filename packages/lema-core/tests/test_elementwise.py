"""RMS norm, SiLU product and rotary embedding against fp64 autograd; a token alone and among others, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lema_core.ops.elementwise import TorchElementwise, rms_norm, rotary, silu_product

KERNEL = TorchElementwise()
EPS = 1e-5


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def feature_major(b: int, t: int, c: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, T, C] with [C, B * T] behind it."""
    storage = torch.randn(c, b * t, generator=torch.Generator().manual_seed(seed)) * 3
    return storage.to(dtype).t().view(b, t, c)


def is_feature_major(x: Tensor) -> bool:
    return x.reshape(-1, x.shape[-1]).t().is_contiguous()


def angles(b: int, t: int, d: int) -> Tensor:
    return torch.arange(b * t).view(b, 1, t, 1) * (0.7 ** torch.arange(d // 2))


def heads(x_BTC: Tensor, d: int) -> Tensor:
    return x_BTC.unflatten(-1, (-1, d)).transpose(1, 2)


def norm_by_definition(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotate_by_definition(x_BHTD: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = tables
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found.double() - expected).norm() <= 3e-7 * expected.norm())


SHAPES = [(1, 1, 1), (1, 1, 64), (2, 3, 5), (1, 7, 36), (1, 33, 192), (3, 16, 70)]


@pytest.mark.parametrize(("b", "t", "c"), SHAPES)
def test_rms_norm(b: int, t: int, c: int) -> None:
    x, dy = feature_major(b, t, c, 0).requires_grad_(), feature_major(b, t, c, 1)
    weight = torch.rand(c) + 0.5
    y = rms_norm(KERNEL, x, weight, EPS)
    y.backward(dy)
    wide = x.detach().double().requires_grad_()
    expected = norm_by_definition(wide, weight.double())
    expected.backward(dy.double())
    assert close(y, expected) and is_feature_major(y)
    # the gradient of a single feature is a difference of equals
    assert c == 1 or close(x.grad, wide.grad)
    assert is_feature_major(x.grad)


@pytest.mark.parametrize(("b", "t", "c"), SHAPES)
def test_silu_product(b: int, t: int, c: int) -> None:
    gate, up, dy = (feature_major(b, t, c, seed) for seed in range(3))
    gate.requires_grad_()
    up.requires_grad_()
    y = silu_product(KERNEL, gate, up)
    y.backward(dy)
    wide_gate, wide_up = (each.detach().double().requires_grad_() for each in (gate, up))
    expected = F.silu(wide_gate) * wide_up
    expected.backward(dy.double())
    for found, right in ((y, expected), (gate.grad, wide_gate.grad), (up.grad, wide_up.grad)):
        assert close(found, right) and is_feature_major(found)


@pytest.mark.parametrize(("b", "t", "h", "d"), [(1, 1, 1, 2), (2, 5, 3, 8), (1, 33, 2, 64)])
def test_rotary(b: int, t: int, h: int, d: int) -> None:
    x = feature_major(b, t, h * d, 0).requires_grad_()
    tables = angles(b, t, d).cos(), angles(b, t, d).sin()
    y = rotary(KERNEL, heads(x, d), tables)
    assert torch.equal(y, rotate_by_definition(heads(x, d), tables))
    assert is_feature_major(y.transpose(1, 2).flatten(2))
    dy = heads(feature_major(b, t, h * d, 1), d)
    (dx,) = torch.autograd.grad(y, x, dy)
    (expected,) = torch.autograd.grad(rotate_by_definition(heads(x, d), tables), x, dy)
    assert torch.equal(dx, expected)


def test_rotation_of_all_rows_by_one_row_of_tables() -> None:
    x = heads(feature_major(3, 4, 16, 0), 8)
    tables = angles(1, 4, 8).cos(), angles(1, 4, 8).sin()
    assert torch.equal(rotary(KERNEL, x, tables), rotate_by_definition(x, tables))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_keep_their_dtype(dtype: torch.dtype) -> None:
    x, up = feature_major(1, 5, 64, 0, dtype).requires_grad_(), feature_major(1, 5, 64, 1, dtype)
    weight, tables = torch.rand(64), (angles(1, 5, 16).cos(), angles(1, 5, 16).sin())
    for y, expected in (
        (rms_norm(KERNEL, x, weight, EPS), norm_by_definition(x.float(), weight)),
        (silu_product(KERNEL, x, up), F.silu(x.float()) * up.float()),
        (rotary(KERNEL, heads(x, 16), tables), rotate_by_definition(heads(x.float(), 16), tables)),
    ):
        (dx,) = torch.autograd.grad(y.float().square().sum(), x)
        assert y.dtype == dx.dtype == dtype
        torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)


def test_token_major_activations() -> None:
    """Not lema's layout, but a plugin's adapter may hand it in."""
    x = feature_major(2, 5, 48, 0)
    for y, expected in (
        (rms_norm(KERNEL, x.contiguous(), torch.ones(48), EPS), rms_norm(KERNEL, x, torch.ones(48), EPS)),
        (silu_product(KERNEL, x.contiguous(), x), silu_product(KERNEL, x, x)),
    ):
        assert torch.equal(y, expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_token_does_not_depend_on_the_others(threads: int) -> None:
    """On any number of threads; 40 x 1100 are more elements than one thread takes, and no multiple of a register."""
    torch.set_num_threads(threads)
    c, d = 40, 8
    x, up, dy = (feature_major(1, 1100, c, seed) for seed in range(3))
    weight = torch.rand(c)
    tables = angles(1, 1100, d).cos(), angles(1, 1100, d).sin()

    def results(start: int, stop: int) -> list[Tensor]:
        part, part_up, part_dy = (
            each[:, start:stop].transpose(1, 2).contiguous().transpose(1, 2) for each in (x, up, dy)
        )
        part.requires_grad_()
        part_up.requires_grad_()
        outputs = (
            rms_norm(KERNEL, part, weight, EPS),
            silu_product(KERNEL, part, part_up),
            rotary(KERNEL, heads(part, d), tuple(table[:, :, start:stop] for table in tables))
            .transpose(1, 2)
            .flatten(2),
        )
        d_norm, d_rotary = (torch.autograd.grad(outputs[i], part, part_dy)[0] for i in (0, 2))
        return [*outputs, d_norm, d_rotary, *torch.autograd.grad(outputs[1], (part, part_up), part_dy)]

    whole = results(0, 1100)
    for start, stop in ((0, 1), (1, 8), (3, 20), (517, 550), (1099, 1100), (200, 1100)):
        for alone, among in zip(results(start, stop), whole, strict=True):
            assert torch.equal(alone, among[:, start:stop])


def test_extreme_gates() -> None:
    gate = torch.tensor([[-200.0, -100.0, -88.0, 0.0, 88.0, 100.0, 1e30]]).t()[None]
    up = torch.ones_like(gate)
    y = silu_product(KERNEL, gate.requires_grad_(), up)
    (d_gate,) = torch.autograd.grad(y.sum(), gate)
    torch.testing.assert_close(y, F.silu(gate))
    assert d_gate.flatten().tolist() == pytest.approx([0, 0, 0, 0.5, 1, 1, 1])


def test_saves_its_inputs_and_one_number_a_token() -> None:
    """``x`` as it was given (no copy), and nothing as large beside it."""
    x, up = feature_major(1, 9, 64, 0).requires_grad_(), feature_major(1, 9, 64, 1).requires_grad_()
    tables = angles(1, 9, 16).cos(), angles(1, 9, 16).sin()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rms_norm(KERNEL, x, torch.ones(64), EPS)
        silu_product(KERNEL, x, up)
        rotary(KERNEL, heads(x, 16), tables)
    known = {x.data_ptr(), up.data_ptr(), *(table.data_ptr() for table in tables)}
    assert sum(each.nbytes for each in saved if each.data_ptr() not in known) == 4 * (64 + 9)
