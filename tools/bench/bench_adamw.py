"""AdamW over many parameters: the native kernel beside a copy, torch's fused optimizer and the plain-torch kernel.

All take turns. AdamW moves 28 bytes a parameter: it reads four numbers and writes three. Copies move as many bytes,
half of them read and half written. GB/s, the best of the repetitions / their median.

    python tools/bench/bench_adamw.py [--parameters 16777216] [--repeat 9] [--threads 1 2]
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

from lema_core.ops.adamw import AdamWRates, TorchAdamW
from lema_cuda.elementwise import NativeAdamW

#: bytes of a parameter that an update reads and writes
UPDATE_BYTES = 28
RATES = AdamWRates(1e-4, 0.9, 0.999, 1e-8, 0.01, 3, grad_scale=0.5)


def copies(nbytes: int, threads: int) -> dict[str, Callable[[], object]]:
    """torch's copy, and C's by ``threads`` threads, that read and write ``nbytes`` together."""
    count = nbytes // 8
    source, target = torch.rand(count), torch.zeros(count)
    pool, share = ThreadPoolExecutor(threads), -(-count // threads)

    def move(start: int) -> None:
        size = min(share, count - start) * 4
        ctypes.memmove(target.data_ptr() + 4 * start, source.data_ptr() + 4 * start, size)

    return {
        "copy_": lambda: target.copy_(source),
        "memmove": lambda: list(pool.map(move, range(0, count, share))),
    }


def updates(count: int, threads: int) -> dict[str, Callable[[], object]]:
    native, plain = NativeAdamW(), TorchAdamW()
    states = [torch.rand(count) + 1e-3 for _ in range(4)]
    param = torch.nn.Parameter(states[0])
    param.grad = states[1]
    fused = torch.optim.AdamW([param], RATES.lr, (RATES.beta1, RATES.beta2), RATES.eps, RATES.weight_decay, fused=True)
    return {
        "cpp": lambda: native.update(*states, RATES, threads),
        "torch fused": fused.step,
        "plain torch": lambda: plain.update(*states, RATES, threads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1 << 24)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    moved = UPDATE_BYTES * given.parameters
    print(f"{given.parameters:,} parameters, {moved / 1e6:.0f} MB; GB/s, best / median; ms")
    for threads in given.threads:
        torch.set_num_threads(threads)
        calls = {**copies(moved, threads), **updates(given.parameters, threads)}
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(given.repeat + 1):
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                if turn:
                    spent[name].append(time.perf_counter() - started)
        for name, seconds in spent.items():
            rates = f"{moved / min(seconds) / 1e9:6.2f} /{moved / median(seconds) / 1e9:6.2f}"
            print(f"{threads} threads  {name:<12} {rates}   {min(seconds) * 1e3:7.1f} ms", flush=True)
        copy_s = min(min(spent["copy_"]), min(spent["memmove"]))
        print(
            f"{threads} threads  cpp : copy {copy_s / min(spent['cpp']):.2f}, "
            f"cpp : torch fused {min(spent['torch fused']) / min(spent['cpp']):.2f}"
        )


if __name__ == "__main__":
    main()
