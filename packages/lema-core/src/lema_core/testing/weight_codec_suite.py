"""What every codec of weights must do; inherit it to test one.

    class TestMyCodec(WeightCodecSuite):
        most_error = 0.01

        def make_codec(self):
            return MyCodec()

pytest collects the subclass. What a codec refuses, with a reason, is not asked of it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lema_core.quantization.block import QuantizedBlock
from lema_core.quantization.codec import NotFiniteWeight, WeightCodec
from lema_core.quantization.formats import wire_formats
from lema_core.testing.allocations import peak_allocated
from lema_core.testing.comparing import relative

WIDTHS = (1, 2, 31, 33, 63, 64, 65, 127, 128, 130, 192)
_GARBAGE = 0xA5


class WeightCodecSuite:
    """Tests of what :class:`lema_core.quantization.codec.WeightCodec` and its format promise."""

    #: relative by norm, of normally distributed numbers
    most_error = 0.1
    #: of one number, over the largest size in its row
    most_row_error = 0.13
    #: rows whose largest number is below it may come back as zeros
    least_number = 1e-37
    #: bytes of a weight in whole groups, per number
    most_bytes = 1.1
    #: torch's own memory, whatever the weight's size
    most_scratch_bytes = 16_000_000

    def make_codec(self) -> WeightCodec:
        """A codec. Override it; skip where its library is not installed."""
        raise NotImplementedError

    # -- the format

    def test_the_format_says_what_lies_where(self) -> None:
        codec = self.make_codec()
        for rows, columns in ((1, 64), (5, 33), (7, 192)):
            if codec.refuses((rows, columns)) is not None:
                continue
            parts = codec.format.parts((rows, columns))
            assert parts[0].suffix == "" and len({part.suffix for part in parts}) == len(parts)
            assert all(part.shape[0] == rows for part in parts), "a part has other rows than the weight"
            assert codec.format.nbytes((rows, columns)) == sum(part.nbytes for part in parts)
            one, many = codec.format.nbytes((1, columns)), codec.format.nbytes((rows, columns))
            assert many == rows * one, "rows have different bytes"
        assert codec.format.nbytes((64, 4096)) <= self.most_bytes * 64 * 4096
        assert codec.format.bits in (1, 2, 3, 4, 5, 6, 7, 8) and codec.version
        known = wire_formats().get(codec.format.name)
        assert known is None or type(known) is type(codec.format), f"{codec.format.name} is another format's name"

    def test_what_is_no_matrix_is_refused_with_a_reason(self) -> None:
        codec = self.make_codec()
        for shape in ((64,), (2, 3, 64), (0, 64), (64, 0)):
            assert codec.refuses(shape), f"{shape} is not refused"
        assert codec.refuses((64, 512)) is None

    # -- numbers

    def test_the_error_is_bounded(self) -> None:
        weight = _normal(64, 512)
        error = relative(self._back(weight), weight)
        assert error <= self.most_error, f"relative error {error:.4f} by norm"

    def test_any_width(self) -> None:
        """Its last columns come back as well as the others."""
        codec, served = self.make_codec(), 0
        for columns in WIDTHS:
            if codec.refuses((40, columns)) is not None:
                continue
            served += 1
            weight = _normal(40, columns)
            back = self._back(weight)
            assert relative(back, weight) <= 1.5 * self.most_error, f"{columns} columns come back wrong"
            last = relative(back[:, -1], weight[:, -1])
            assert last <= 2.5 * self.most_error, f"the last of {columns} columns has a relative error of {last:.3f}"
        assert served, "no width is served"

    def test_one_row(self) -> None:
        weight = _normal(1, 128)
        assert relative(self._back(weight), weight) <= 1.5 * self.most_error

    def test_rows_of_zeros_are_exact(self) -> None:
        weight = _normal(9, 128)
        weight[::2] = 0
        back = self._back(weight)
        assert not back[::2].any(), "zeros come back as something else"
        assert relative(back[1::2], weight[1::2]) <= 1.5 * self.most_error
        assert not self._back(torch.zeros(3, 64)).any()

    def test_tiny_and_huge_rows(self) -> None:
        sizes = [10.0**-exponent for exponent in (45, 42, 40, 38, 37, 36, 30, 20, 5)] + [1e20, 1e30, 1e37, 3e38, 3.4e38]
        row = _normal(1, 128).double()
        weight = torch.cat([row / row.abs().max() * size for size in sizes]).float()
        back = self._back(weight)
        assert back.isfinite().all(), "a finite number comes back as infinite"
        for size, row, row_back in zip(sizes, weight.double(), back.double(), strict=True):
            error = (row_back - row).abs().max().item()
            most = row.abs().max().item() * (self.most_row_error if size >= self.least_number else 1.0)
            assert error <= most, f"a row of {size:.0e} is off by {error:.1e}"

    def test_one_large_number_spoils_its_own_row_at_most(self) -> None:
        weight = _normal(8, 128)
        exact = self._back(weight)
        weight[3, 5] = 1e4
        back = self._back(weight)
        others = [row for row in range(8) if row != 3]
        assert back[others].equal(exact[others]), "rows depend on each other"
        assert abs(back[3, 5].item() - 1e4) <= self.most_row_error * 1e4

    def test_the_numbers_count_and_not_their_dtype(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            weight = _normal(16, 192).to(dtype)
            assert _same(self._encode(weight), self._encode(weight.float())), f"{dtype} gives other bytes than fp32"

    def test_what_is_not_finite_is_refused(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for bad in (torch.nan, torch.inf, -torch.inf):
                for row, column in ((0, 0), (2, 77), (4, 191)):
                    weight = _normal(5, 192).to(dtype)
                    weight[row, column] = bad
                    refused = self._refusal(weight)
                    assert (refused.row, refused.column) == (row, column)
                    assert str(bad) in str(refused)

    def _refusal(self, weight: Tensor) -> NotFiniteWeight:
        try:
            self._encode(weight)
        except NotFiniteWeight as error:
            return error
        raise AssertionError("a number that is not finite was encoded")

    # -- bytes

    def test_the_same_numbers_give_the_same_bytes(self) -> None:
        """Whatever lay there, and whatever stride the rows have."""
        codec = self.make_codec()
        for columns in WIDTHS:
            if codec.refuses((6, columns)) is not None:
                continue
            wide = _normal(6, columns + 3)
            kept, weight = wide.clone(), wide[:, :columns]
            first = self._encode(weight)
            assert _same(first, self._encode(weight.contiguous(), 0)), f"{columns} columns: bytes are left as they were"
            assert wide.equal(kept), "encode changes its input"
            self._decoded(codec, first, columns)
            assert _same(first, self._encode(weight)), "decode changes its input"

    def test_any_cut_gives_the_same_bytes(self) -> None:
        codec = self.make_codec()
        for columns in (33, 130, 192, 4096):
            if codec.refuses((70, columns)) is not None:
                continue
            weight = _normal(70, columns)
            whole = self._encode(weight)
            for cut in (1, 3, 32, 69):
                parts = _empty(codec, (70, columns), _GARBAGE)
                for start in range(0, 70, cut):
                    codec.encode(weight[start : start + cut], tuple(part[start : start + cut] for part in parts))
                assert _same(whole, parts), f"{columns} columns in blocks of {cut} rows give other bytes"

    def test_any_rows_are_read_alone(self) -> None:
        codec = self.make_codec()
        for columns in (33, 192):
            if codec.refuses((12, columns)) is not None:
                continue
            block = QuantizedBlock(codec.format, (12, columns), self._encode(_normal(12, columns)))
            whole = self._decoded(codec, block.parts, columns)
            for start, count in ((0, 1), (5, 4), (11, 1)):
                out = torch.full((count, columns), torch.nan)
                block.decode(out, start)
                assert out.equal(whole[start : start + count]), f"rows from {start} come back otherwise"

    def test_several_threads_at_once(self) -> None:
        codec, weight = self.make_codec(), _normal(48, 192)
        whole, parts = self._encode(weight), _empty(codec, (48, 192), 0)

        def work(row: int) -> None:
            codec.encode(weight[row : row + 1], tuple(part[row : row + 1] for part in parts))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(48)))
        assert _same(whole, parts)

    def test_it_needs_little_memory(self) -> None:
        codec, weight = self.make_codec(), torch.ones(2048, 4096)  # 34 MB
        parts = _empty(codec, (2048, 4096), 0)
        used = peak_allocated(lambda: codec.encode(weight, parts))
        assert used <= self.most_scratch_bytes, f"{used} bytes allocated for a weight of {weight.nbytes}"

    # -- tools

    def _encode(self, weight_rK: Tensor, fill: int = _GARBAGE) -> tuple[Tensor, ...]:
        codec = self.make_codec()
        parts = _empty(codec, tuple(weight_rK.shape), fill)
        codec.encode(weight_rK, parts)
        return parts

    def _decoded(self, codec: WeightCodec, parts: tuple[Tensor, ...], columns: int) -> Tensor:
        out = torch.full((len(parts[0]), columns), torch.nan)
        codec.format.decode(parts, out)
        return out

    def _back(self, weight_rK: Tensor) -> Tensor:
        return self._decoded(self.make_codec(), self._encode(weight_rK), weight_rK.shape[1])


def _empty(codec: WeightCodec, shape: tuple[int, int], fill: int) -> tuple[Tensor, ...]:
    return tuple(
        torch.full((part.nbytes,), fill, dtype=torch.uint8).view(part.dtype).view(part.shape)
        for part in codec.format.parts(shape)
    )


def _same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(left, right, strict=True))


def _normal(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 * rows + columns))
