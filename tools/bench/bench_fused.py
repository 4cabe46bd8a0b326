"""What a block computes beside its products, and AdamW: the native kernels against plain torch's, in turn.

The shapes are a block's of the 1.1 B Llama (256 tokens) and of SmolLM2-135M (512 tokens in rows of 128). Figures are
milliseconds of one thread's CPU time, the best of the repetitions / their median: CPU time does not count the turns
that other programs take.

    python tools/bench/bench_fused.py [--repeat 15]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from lema_core.ops.adamw import AdamWRates, TorchAdamW
from lema_core.ops.attention import TorchAttention
from lema_core.ops.context import Segment
from lema_core.ops.elementwise import TorchElementwise
from lema_cuda.attention import NativeAttention
from lema_cuda.elementwise import NativeAdamW, NativeElementwise

#: name, hidden, feed-forward, heads, key/value heads, rows, tokens of a row; heads have 64 features
SHAPES = (("1.1 B", 2048, 5632, 32, 4, 1, 256), ("SmolLM2", 576, 1536, 9, 3, 4, 128))
HEAD = 64
RANK = 16

Calls = dict[str, Callable[[], object]]


def elementwise_calls(hidden: int, feed_forward: int, heads: int, n: int) -> dict[str, Calls]:
    """What is timed: operation -> kernel -> call."""
    x, dy, weight, rstd = torch.randn(hidden, n), torch.randn(hidden, n), torch.randn(hidden), torch.rand(n)
    gate, up, d_out = (torch.randn(feed_forward, n) for _ in range(3))
    q, cos, sin = torch.randn(heads, HEAD, n), torch.randn(HEAD // 2, n), torch.randn(HEAD // 2, n)
    kernels = {"cpp": NativeElementwise(), "torch": TorchElementwise()}
    return {
        "RMS norm": {name: lambda k=k: k.rms_norm(x, weight, 1e-5) for name, k in kernels.items()},
        "its gradient": {name: lambda k=k: k.rms_norm_gradient(dy, x, weight, rstd) for name, k in kernels.items()},
        "SiLU product": {name: lambda k=k: k.silu_product(gate, up) for name, k in kernels.items()},
        "its gradients": {name: lambda k=k: k.silu_product_gradient(d_out, gate, up) for name, k in kernels.items()},
        "rotary": {name: lambda k=k: k.rotate(q, cos, sin, False) for name, k in kernels.items()},
    }


def attention_calls(heads: int, groups: int, rows: int, tokens: int) -> dict[str, Calls]:
    n = rows * tokens
    q, k, v = (torch.randn(h, HEAD, n).transpose(1, 2)[None].requires_grad_() for h in (heads, groups, groups))
    dy, segments = torch.randn(heads * HEAD, n).t()[None], (Segment(0, n, rows, tokens),)
    kernels = {"cpp": NativeAttention(), "torch": TorchAttention()}
    outs: dict[str, Tensor] = {}

    def forward(name: str) -> None:
        outs[name] = kernels[name].attend(q, k, v, segments, HEAD**-0.5)

    def backward(name: str) -> None:
        torch.autograd.grad(outs[name], (q, k, v), dy)

    return {
        "attention": {name: lambda name=name: forward(name) for name in kernels},
        "with gradients": {name: lambda name=name: (forward(name), backward(name)) for name in kernels},
    }


def adamw_calls(feed_forward: int) -> dict[str, Calls]:
    states = [torch.rand(RANK * feed_forward) + 1e-3 for _ in range(4)]
    rates = AdamWRates(1e-4, 0.9, 0.999, 1e-8, 0.01, 3)
    kernels = {"cpp": NativeAdamW(), "torch": TorchAdamW()}
    return {"AdamW": {name: lambda k=k: k.update(*states, rates) for name, k in kernels.items()}}


def measure(calls: Calls, repeat: int) -> dict[str, list[float]]:
    """Milliseconds of each call, in turn, after one that is not counted."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeat + 1):
        for name, call in calls.items():
            started = time.thread_time()
            call()
            if turn:
                spent[name].append((time.thread_time() - started) * 1e3)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':<24} {'cpp':>16} {'torch':>16}   torch : cpp   (ms, best / median)")
    for shape, hidden, feed_forward, heads, groups, rows, tokens in SHAPES:
        operations = [
            *elementwise_calls(hidden, feed_forward, heads, rows * tokens).items(),
            *attention_calls(heads, groups, rows, tokens).items(),
            *adamw_calls(feed_forward).items(),
        ]
        for operation, calls in operations:
            spent = measure(calls, given.repeat)
            columns = "".join(f"{min(ms):9.2f} /{median(ms):6.2f}" for ms in spent.values())
            ratio = min(spent["torch"]) / min(spent["cpp"])
            typical = median(spent["torch"]) / median(spent["cpp"])
            print(f"{shape:<8} {operation:<14} {columns}   {ratio:.2f} / {typical:.2f}", flush=True)


if __name__ == "__main__":
    main()
