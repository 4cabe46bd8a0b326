"""What every codec of optimizer states and gradients must do; inherit it to test one.

    class TestMyCodec(StateCodecSuite):
        def make_codec(self, kind):
            return MyCodec(kind)

pytest collects the subclass. The bounds are those of 8 bits; a codec of other bits sets its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lema_core.ops.adamw import AdamWRates, TorchAdamW
from lema_core.store.codec import StateCodecClass
from lema_core.testing.allocations import peak_allocated
from lema_core.testing.comparing import relative

KINDS = ("exp_avg", "exp_avg_sq", "grads")
_SIZES = (0, 1, 2, 63, 64, 65, 255, 256, 257, 1000, 4096, 70_001)
_BETA1, _BETA2 = 0.9, 0.999
_GARBAGE = 0xA5


class Moments:
    """AdamW of weights that begin at zero, at lr 1, with its moments encoded between steps (None: fp32)."""

    def __init__(self, n: int, make_codec: Callable[[str], StateCodecClass] | None = None) -> None:
        self.weights = torch.zeros(n)
        self.moments = {kind: torch.zeros(n) for kind in ("exp_avg", "exp_avg_sq")}
        self.step = 0
        self._codecs = {} if make_codec is None else {kind: make_codec(kind) for kind in self.moments}
        self._encoded = {kind: _bytes(codec, n, 0) for kind, codec in self._codecs.items()}

    def update(self, grad: Tensor, beta2: float = _BETA2) -> Tensor:
        """One step; returns how far each weight went."""
        self.step += 1
        before = self.weights.clone()
        rates = AdamWRates(1.0, _BETA1, beta2, 1e-30, 0.0, self.step)
        TorchAdamW().update(self.weights, grad, *self.moments.values(), rates, threads=1)
        for kind, codec in self._codecs.items():
            codec.encode(self.moments[kind], self._encoded[kind])
            codec.decode(self._encoded[kind], self.moments[kind])
        return self.weights - before


class StateCodecSuite:
    """Tests of what :class:`lema_core.store.codec.StateCodecClass` promises, and of what AdamW makes of it."""

    #: bytes of a record of a million numbers, per number
    most_bytes = 1.05
    #: error of what comes back, relative by norm, for numbers whose sizes are spread over a factor of 1000 and more
    most_error = 0.06
    #: nothing of exp_avg_sq that is not zero comes back smaller than this share of it
    least_share = 0.7
    #: how far one AdamW step moves a weight at most, over lr; in these tests exact moments move it by up to 1.5
    most_moved = 4.0
    #: distance of the weights from those of fp32 moments after 100 steps, over the way they went
    most_drift = 0.05
    #: error of 16 gradients added up one by one, relative by norm, over the root of the sum of their squares
    most_added_error = 0.08
    #: torch's own memory, whatever the record's size
    most_scratch_bytes = 1_000_000

    def make_codec(self, kind: str) -> StateCodecClass:
        """A codec. Override it."""
        raise NotImplementedError

    # -- bytes

    def test_a_record_has_the_size_it_says(self) -> None:
        for kind in KINDS:
            codec = self.make_codec(kind)
            sizes = [codec.nbytes(n) for n in range(1, 2000)]
            assert sizes == sorted(sizes) and codec.nbytes(0) >= 0, f"{kind}: sizes fall"
            assert codec.nbytes(1_000_000) <= self.most_bytes * 1_000_000, f"{kind}: {codec.nbytes(1_000_000)} bytes"

    def test_any_number_of_numbers(self) -> None:
        for kind in KINDS:
            for n in _SIZES:
                values = _spread(kind, n)
                back = self._back(kind, values)
                assert relative(back, values) <= 2 * self.most_error, f"{kind}: {n} numbers come back wrong"

    def test_the_error_is_bounded(self) -> None:
        for kind in KINDS:
            values = _spread(kind, 100_000)
            error = relative(self._back(kind, values), values)
            assert error <= self.most_error, f"{kind}: relative error {error:.1e} by norm"

    def test_the_same_numbers_give_the_same_bytes(self) -> None:
        """Padding included, and whatever lay there."""
        for kind in KINDS:
            codec = self.make_codec(kind)
            for n in _SIZES:
                values = _spread(kind, n)
                kept, found = values.clone(), []
                for fill in (0, _GARBAGE):
                    encoded = _bytes(codec, n, fill)
                    codec.encode(values, encoded)
                    found.append(encoded)
                assert found[0].equal(found[1]), f"{kind}: the bytes of {n} numbers depend on what lay there"
                assert values.equal(kept), f"{kind}: encode changes its input"
                codec.decode(encoded, torch.empty(n))
                assert encoded.equal(found[0]), f"{kind}: decode changes its input"

    def test_it_needs_little_memory(self) -> None:
        n = 1 << 18  # more bytes in fp32 than may be allocated
        codecs = [self.make_codec(kind) for kind in KINDS]
        values, back, encoded = torch.rand(n), torch.empty(n), [_bytes(codec, n, 0) for codec in codecs]

        def work() -> None:
            for codec, bytes_ in zip(codecs, encoded, strict=True):
                codec.encode(values, bytes_)
                codec.decode(bytes_, back)

        used = peak_allocated(work)
        assert used <= self.most_scratch_bytes, f"{used} bytes allocated for {n} numbers"

    # -- zeros, and what is not finite

    def test_zero_bytes_are_zeros_and_zeros_stay_zeros(self) -> None:
        for kind in KINDS:
            codec = self.make_codec(kind)
            for n in _SIZES:
                back = torch.ones(n)
                codec.decode(_bytes(codec, n, 0), back)
                assert not back.any(), f"{kind}: zero bytes are not {n} zeros"
                assert not self._back(kind, torch.zeros(n)).any(), f"{kind}: {n} zeros do not come back"
            values = _spread(kind, 5000)
            values[::3] = 0
            assert not self._back(kind, values)[::3].any(), f"{kind}: zeros among others do not come back"

    def test_what_is_not_finite_is_seen(self) -> None:
        """It raises, or comes back as not finite."""
        for kind in KINDS:
            for bad in (torch.nan, torch.inf, -torch.inf):
                for place in (0, 300, 599):
                    values = _spread(kind, 600)
                    values[place] = bad
                    try:
                        back = self._back(kind, values)
                    except (ValueError, ArithmeticError):
                        continue
                    assert not back.isfinite().all(), f"{kind}: {bad} at {place} comes back as {back[place]}"

    # -- what AdamW makes of it

    def test_weights_without_gradient_do_not_move(self) -> None:
        random = torch.Generator().manual_seed(1)
        run = Moments(3000, self.make_codec)
        for _ in range(50):
            grad = torch.randn(3000, generator=random)
            grad[1::4] = 0
            run.update(grad)
        assert not run.weights[1::4].any(), "weights whose gradient is always zero have moved"

    def test_nothing_of_exp_avg_sq_is_lost(self) -> None:
        """Whatever else is near it, so far as fp32 roots of it matter to a moment beside it."""
        random = torch.Generator().manual_seed(2)
        for range_ in (1, 10, 20, 36):
            values = torch.pow(2.0, -range_ * torch.rand(5000, generator=random))
            values[::256] = 1.0
            share = (self._back("exp_avg_sq", values) / values).min().item()
            assert share >= self.least_share, f"over {range_} powers of two {share:.1e} of a number is left"
        outlier = torch.full((600,), 1e-30)
        outlier[17] = 1e6
        assert (self._back("exp_avg_sq", outlier) >= self.least_share * outlier).all(), "lost beside an outlier"

    def test_no_update_explodes(self) -> None:
        """Gradients of sizes from 1e-9 to 1e3 beside each other, some of them rare."""
        random = torch.Generator().manual_seed(3)
        sizes = torch.pow(10.0, torch.randint(-9, 4, (2048,), generator=random).float())
        rare = torch.rand(2048, generator=random) < 0.3
        run = Moments(2048, self.make_codec)
        for _ in range(120):
            grad = sizes * torch.randn(2048, generator=random)
            grad[rare & (torch.rand(2048, generator=random) < 0.9)] = 0
            moved = run.update(grad).abs().max().item()
            assert moved <= self.most_moved, f"step {run.step} moves a weight by {moved:.1f} lr"

    def test_one_huge_gradient_does_not_stop_its_neighbours_for_good(self) -> None:
        run = Moments(256, self.make_codec)
        for step in range(60):
            grad = torch.full((256,), 1e-4)
            grad[100] = 1e3 if step == 20 else 0.0
            moved = run.update(grad)
            assert moved.isfinite().all() and moved.abs().max() <= self.most_moved
        others = torch.arange(256) != 100
        assert (moved[others] < 0).float().mean() > 0.9, "neighbours of an outlier do not train"

    def test_a_gradient_that_stops_stops_its_weight(self) -> None:
        """exp_avg must go on falling where it has become small."""
        random = torch.Generator().manual_seed(4)
        run = Moments(2048, self.make_codec)
        stops = torch.rand(2048, generator=random) < 0.5
        for step in range(250):
            grad = torch.randn(2048, generator=random)
            if step >= 50:
                grad[stops] = 0
            moved = run.update(grad)
        last = moved[stops].abs().max().item()
        assert last < 0.01, f"200 steps after its last gradient a weight moves by {last:.2g} lr"

    def test_exp_avg_sq_follows_small_changes(self) -> None:
        """Each step changes it by less than two codes are apart: rounding must not undo that."""
        random = torch.Generator().manual_seed(5)
        run, exact = Moments(1024, self.make_codec), Moments(1024)
        for step in range(400):
            grad = torch.randn(1024, generator=random) * (1.0 if step < 200 else 0.1)
            run.update(grad, beta2=0.995)
            exact.update(grad, beta2=0.995)
        roots = (run.moments["exp_avg_sq"] / exact.moments["exp_avg_sq"]).sqrt()
        assert abs(roots.mean().item() - 1) < 0.05, f"roots are {roots.mean():.3f} of what they should be, on average"

    def test_a_hundred_steps_drift_little(self) -> None:
        """A least-squares problem, from minibatches of 16."""
        random = torch.Generator().manual_seed(6)
        scales = torch.exp(torch.randn(64, generator=random))
        target = torch.randn(64, 40, generator=random)
        runs = Moments(64 * 40, self.make_codec), Moments(64 * 40)
        for _ in range(100):
            x = torch.randn(16, 64, generator=random) * scales
            for run in runs:
                residual = x @ (run.weights.view(64, 40) * 0.01 - target)
                run.update((x.T @ residual).view(-1))
        drift = relative(runs[0].weights, runs[1].weights)
        assert drift <= self.most_drift, f"{drift:.1e} of the way"

    # -- gradients

    def test_gradients_add_up(self) -> None:
        random = torch.Generator().manual_seed(7)
        sizes = torch.exp(torch.randn(20_000, generator=random))
        codec = self.make_codec("grads")
        encoded, found, exact, squares = _bytes(codec, 20_000, 0), torch.empty(20_000), torch.zeros(20_000), 0.0
        for _ in range(16):
            grad = sizes * torch.randn(20_000, generator=random)
            codec.decode(encoded, found)
            codec.encode(found.add_(grad), encoded)
            exact += grad
            squares += grad.square().sum().item()
        codec.decode(encoded, found)
        error = (found - exact).norm().item() / squares**0.5
        assert error <= self.most_added_error, f"16 gradients are added up to {error:.1e}"

    def test_decoded_gradients_encode_as_they_were(self) -> None:
        """A step that adds nothing to an accumulator changes nothing of it."""
        codec = self.make_codec("grads")
        for n in _SIZES:
            encoded, values = _bytes(codec, n, 0), _spread("grads", n)
            codec.encode(values, encoded)
            codec.decode(encoded, values)
            again = _bytes(codec, n, _GARBAGE)
            codec.encode(values, again)
            assert again.equal(encoded), f"{n} decoded numbers encode otherwise"

    # -- tools

    def _back(self, kind: str, values: Tensor) -> Tensor:
        codec = self.make_codec(kind)
        encoded, back = _bytes(codec, len(values), _GARBAGE), torch.empty_like(values)
        codec.encode(values, encoded)
        codec.decode(encoded, back)
        return back


def _bytes(codec: StateCodecClass, n: int, fill: int) -> Tensor:
    return torch.full((codec.nbytes(n),), fill, dtype=torch.uint8)


def _spread(kind: str, n: int) -> Tensor:
    """Numbers as a state has them, their sizes log-normal; of exp_avg_sq squares."""
    random = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=random) * torch.exp(1.5 * torch.randn(n, generator=random))
    return values.square() if kind == "exp_avg_sq" else values
