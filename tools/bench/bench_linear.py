"""The native product against plain torch's, at the 1.1 B shapes: forward and input gradient from bf16 weights, in turn.

``torch`` is lema's plain-torch kernel, which widens the weight a few rows at a time and calls ``torch.mm``; ``mm`` is
``torch.mm`` alone on a weight that is fp32 already, so without the widening that a bf16 weight needs. Figures are
GFLOP/s, the best of the repetitions / their median: on a machine that others use, the best says what the code can do,
the median what it did.

    python tools/bench/bench_linear.py [--tokens 256] [--threads N] [--repeat 15] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from lema_core.ops.linear import LinearKernel
from lema_cuda.linear import NativeLinear

#: rows and inputs: q and o, gate and up, down, head
SHAPES = ((2048, 2048), (5632, 2048), (2048, 5632), (32000, 2048))
#: rows of a block, as the tensor store cuts a large matrix
BLOCK_ROWS = 8000


def blocks(weight: Tensor) -> list[tuple[Tensor, slice]]:
    starts = range(0, len(weight), BLOCK_ROWS)
    return [(weight[start : start + BLOCK_ROWS], slice(start, start + BLOCK_ROWS)) for start in starts]


def products(weight: Tensor, x: Tensor, dy: Tensor) -> dict[str, dict[str, Callable[[], None]]]:
    """What is timed: direction -> kernel -> call."""
    out, dx = torch.empty_like(dy), torch.empty_like(x)

    def forward(kernel: LinearKernel | NativeLinear) -> None:
        for block, rows in blocks(weight):
            kernel.forward(block, x, out[rows])

    def backward(kernel: LinearKernel | NativeLinear) -> None:
        for block, rows in blocks(weight):
            kernel.input_gradient(block, dy[rows], dx, rows.start == 0)

    wide = weight.float()
    kernels = {"cpp": NativeLinear(), "torch": LinearKernel()}
    return {
        "forward": {name: lambda k=kernel: forward(k) for name, kernel in kernels.items()}
        | {"mm": lambda: torch.mm(wide, x, out=out)},
        "dX": {name: lambda k=kernel: backward(k) for name, kernel in kernels.items()}
        | {"mm": lambda: torch.mm(wide.t(), dy, out=dx)},
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
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"{given.dtype} weights, {given.tokens} tokens, {given.threads} threads; GFLOP/s, best / median")
    print(f"{'shape':<12} {'':<8} {'cpp':>15} {'torch':>15} {'mm':>15}   cpp : torch")
    for rows, k in SHAPES:
        weight = torch.randn(rows, k).to(getattr(torch, given.dtype))
        x, dy = torch.randn(k, given.tokens), torch.randn(rows, given.tokens)
        giga = 2e-9 * rows * k * given.tokens
        for direction, calls in products(weight, x, dy).items():
            seconds = measure(calls, given.repeat)
            columns = "".join(f"{giga / min(s):8.1f} /{giga / median(s):6.1f}" for s in seconds.values())
            ratio = min(seconds["torch"]) / min(seconds["cpp"])
            typical = median(seconds["torch"]) / median(seconds["cpp"])
            print(f"{rows}x{k:<6} {direction:<8}{columns}   {ratio:.2f} / {typical:.2f}", flush=True)


if __name__ == "__main__":
    main()
