"""The native product against plain torch's, at the 1.1 B shapes: forward and input gradient from bf16 weights, in turn.

``torch`` is lema's plain-torch kernel, which widens the weight a few rows at a time and calls ``torch.mm``; ``mm`` is
``torch.mm`` alone on a weight that is fp32 already, so without the widening that a bf16 weight needs. With LoRA, each
computes the update too, ``B A x`` or ``A^T B^T dy``: ``cpp`` as part of its product, the others by ``mm`` and
``addmm``; figures count the update's operations. They are GFLOP/s, the best of the repetitions / their median: on a
machine that others use, the best says what the code can do, the median what it did.

    python tools/bench/bench_linear.py [--tokens 256] [--threads N] [--repeat 15] [--dtype bfloat16] [--rank 16]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from lema_core.ops.linear import LinearKernel
from lema_cuda.linear import NativeLinear

#: rows and inputs: q and o, k and v, gate and up, down, head
SHAPES = ((2048, 2048), (256, 2048), (5632, 2048), (2048, 5632), (32000, 2048))
#: rows of a block, as the tensor store cuts a large matrix
BLOCK_ROWS = 8000
SCALE = 2.0


@dataclass(frozen=True)
class Layer:
    """One linear and what goes through it: weight [R, K] as stored and ``wide`` in fp32, x [K, N], dy [R, N], LoRA's A
    [r, K] and B [R, r], None without."""

    weight: Tensor
    wide: Tensor
    x: Tensor
    dy: Tensor
    lora_A: Tensor | None
    lora_B: Tensor | None

    @classmethod
    def random(cls, rows: int, k: int, tokens: int, rank: int, dtype: torch.dtype) -> Layer:
        wide = torch.randn(rows, k)
        factors = (torch.randn(rank, k), torch.randn(rows, rank)) if rank else (None, None)
        return cls(wide.to(dtype), wide, torch.randn(k, tokens), torch.randn(rows, tokens), *factors)

    def operations(self) -> float:
        rank = 0 if self.lora_A is None else len(self.lora_A)
        return 2.0 * self.x.shape[1] * (self.weight.numel() + rank * sum(self.weight.shape))

    def blocks(self) -> list[tuple[Tensor, slice]]:
        starts = range(0, len(self.weight), BLOCK_ROWS)
        return [(self.weight[start : start + BLOCK_ROWS], slice(start, start + BLOCK_ROWS)) for start in starts]


def forward(kernel: LinearKernel | NativeLinear, layer: Layer, out: Tensor) -> None:
    x, inner = kernel.packed(layer.x), None
    if layer.lora_A is not None:
        inner = layer.x.new_empty(len(layer.lora_A), layer.x.shape[1])
        kernel.forward(layer.lora_A, x, inner)
    for block, rows in layer.blocks():
        kernel.forward(block, x, out[rows], None if inner is None else (layer.lora_B[rows], inner, SCALE))


def backward(kernel: LinearKernel | NativeLinear, layer: Layer, dx: Tensor) -> None:
    update = None
    if layer.lora_A is not None:
        d_inner = layer.dy.new_empty(len(layer.lora_A), layer.dy.shape[1])
        kernel.input_gradient(layer.lora_B, layer.dy, d_inner, True)
        update = layer.lora_A, d_inner.mul_(SCALE)
    for block, rows in layer.blocks():
        kernel.input_gradient(block, layer.dy[rows], dx, rows.start == 0, update)
        update = None


def mm_forward(layer: Layer, out: Tensor) -> None:
    torch.mm(layer.wide, layer.x, out=out)
    if layer.lora_A is not None:
        out.addmm_(layer.lora_B, layer.lora_A @ layer.x, alpha=SCALE)


def mm_backward(layer: Layer, dx: Tensor) -> None:
    torch.mm(layer.wide.t(), layer.dy, out=dx)
    if layer.lora_A is not None:
        dx.addmm_(layer.lora_A.t(), layer.lora_B.t() @ layer.dy, alpha=SCALE)


def products(layer: Layer) -> dict[str, dict[str, Callable[[], None]]]:
    """What is timed: direction -> kernel -> call."""
    out, dx = torch.empty_like(layer.dy), torch.empty_like(layer.x)
    kernels = {"cpp": NativeLinear(), "torch": LinearKernel()}
    return {
        "forward": {name: lambda k=kernel: forward(k, layer, out) for name, kernel in kernels.items()}
        | {"mm": lambda: mm_forward(layer, out)},
        "dX": {name: lambda k=kernel: backward(k, layer, dx) for name, kernel in kernels.items()}
        | {"mm": lambda: mm_backward(layer, dx)},
    }


def measure(calls: dict[str, Callable[[], None]], repeat: int) -> dict[str, list[float]]:
    """Seconds of each call, in turn, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeat + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA update, beside the product without one")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"{given.dtype} weights, {given.tokens} tokens, {given.threads} threads; GFLOP/s, best / median")
    print(f"{'shape':<12} {'':<8} {'r':>3} {'cpp':>15} {'torch':>15} {'mm':>15}   cpp : torch   cpp : mm")
    for rows, k in SHAPES:
        for rank in sorted({0, given.rank}):
            layer = Layer.random(rows, k, given.tokens, rank, getattr(torch, given.dtype))
            giga = 1e-9 * layer.operations()
            for direction, calls in products(layer).items():
                seconds = measure(calls, given.repeat)
                columns = "".join(f"{giga / min(s):8.1f} /{giga / median(s):6.1f}" for s in seconds.values())
                ratios = "".join(f"   {ratio(seconds[other], seconds['cpp'])}" for other in ("torch", "mm"))
                print(f"{rows}x{k:<6} {direction:<8} {rank:>3}{columns}{ratios}", flush=True)


def ratio(slow: list[float], fast: list[float]) -> str:
    return f"{min(slow) / min(fast):.2f} / {median(slow) / median(fast):.2f}"


if __name__ == "__main__":
    main()
