"""Products with quantized weights against torch's fp32 ``F.linear``, in turn: forward, and the input gradient.

``cpp`` is liblema, with activations feature-major and weights in huge pages as lema keeps them: ``bf16`` and the wire
formats with fp32 activations, and ``int8 W8A8`` with activations that are rounded token by token, whose input gradient
is int8's. Beside it what is installed of torchao (dynamic int8), quanto (int8 weights) and bitsandbytes (NF4), as their
linear layers compute; those are taken fewer times, because some need seconds. Milliseconds are medians; ``x torch`` is
the median of the ratios to the torch product of the same turn, so what else runs on the machine counts for both.

    python tools/bench/bench_quantized_linear.py [--rows 4096] [--inputs 4096] [--tokens 1 256] [--threads 2]
        [--repeat 15] [--without-libraries]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

# torch's idle threads sleep, as lema has them: spinning they would share a core with the product that comes next
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor
from torch.nn import functional as F

from lema_core.device import map_ram
from lema_core.quantization.block import QuantizedBlock, WeightBlock
from lema_core.quantization.formats import wire_formats
from lema_cuda.linear import NativeLinear
from lema_cuda.quantize import NativeQuantize

FORMATS = ("int8", "int4-32", "int4-64", "int4-128", "nf4")
#: of what others compute, at most
LIBRARY_REPEAT = 3

Call = Callable[[], object]


@dataclass(frozen=True)
class Contestant:
    """``backward`` is the input gradient; None where a layer has none."""

    name: str
    forward: Call
    backward: Call | None
    repeat: int


@dataclass(frozen=True)
class Problem:
    """weight [R, K] and, of N tokens, x [N, K] and dy [N, R], row-major and feature-major."""

    weight: Tensor
    x: Tensor
    dy: Tensor
    x_KN: Tensor
    dy_RN: Tensor

    @classmethod
    def random(cls, rows: int, k: int, tokens: int) -> Problem:
        x, dy = torch.randn(tokens, k), torch.randn(tokens, rows)
        return cls(torch.randn(rows, k) / k**0.5, x, dy, x.t().contiguous(), dy.t().contiguous())


def quantized(weight: Tensor, name: str) -> QuantizedBlock:
    form = wire_formats()[name]
    parts = tuple(
        map_ram(part.nbytes).view(part.dtype).view(part.shape)
        for part in form.parts((weight.shape[0], weight.shape[1]))
    )
    if not NativeQuantize()(name, weight, parts):
        raise SystemExit("the weight has numbers that are not finite")
    return QuantizedBlock(form, tuple(weight.shape), parts)


def ours(problem: Problem, repeat: int) -> Iterator[Contestant]:
    out, dx = torch.empty_like(problem.dy_RN), torch.empty_like(problem.x_KN)

    def contestant(name: str, kernel: NativeLinear, weight: WeightBlock) -> Contestant:
        def backward() -> None:
            kernel.input_gradient(weight, problem.dy_RN, dx, True)

        return Contestant(name, lambda: kernel.forward(weight, kernel.packed(problem.x_KN), out), backward, repeat)

    kernel = NativeLinear()
    narrow = map_ram(problem.weight.nbytes // 2).view(torch.bfloat16).view(problem.weight.shape)
    yield contestant("cpp bf16", kernel, narrow.copy_(problem.weight))
    for name in FORMATS:
        yield contestant(f"cpp {name}", kernel, quantized(problem.weight, name))
    yield contestant("cpp int8 W8A8", NativeLinear(weights_compute="w8a8"), quantized(problem.weight, "int8"))


def layer(name: str, module: torch.nn.Module, problem: Problem, repeat: int) -> Contestant:
    """A library's own linear layer, its gradient by autograd."""
    x = problem.x.clone().requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            module(problem.x)

    y = module(x)
    backward = None
    if y.requires_grad:
        backward = lambda: torch.autograd.grad(y, x, problem.dy, retain_graph=True)  # noqa: E731
    return Contestant(name, forward, backward, min(repeat, LIBRARY_REPEAT))


def linear_of(problem: Problem) -> torch.nn.Linear:
    rows, k = problem.weight.shape
    linear = torch.nn.Linear(k, rows, bias=False)
    linear.weight = torch.nn.Parameter(problem.weight.clone(), requires_grad=False)
    return linear


def torchao_dynamic_int8(problem: Problem) -> torch.nn.Module:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    module = torch.nn.Sequential(linear_of(problem))
    quantize_(module, Int8DynamicActivationInt8WeightConfig())
    return module


def quanto_int8(problem: Problem) -> torch.nn.Module:
    from optimum.quanto import freeze, qint8, quantize

    module = torch.nn.Sequential(linear_of(problem))
    quantize(module, weights=qint8)
    freeze(module)
    return module


def bitsandbytes_nf4(problem: Problem) -> torch.nn.Module:
    import bitsandbytes

    rows, k = problem.weight.shape
    module = bitsandbytes.nn.Linear4bit(k, rows, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    module.weight = bitsandbytes.nn.Params4bit(problem.weight.clone(), requires_grad=False, quant_type="nf4")
    return module.to("cpu")


LIBRARIES: dict[str, Callable[[Problem], torch.nn.Module]] = {
    "torchao dynamic int8": torchao_dynamic_int8,
    "quanto int8": quanto_int8,
    "bitsandbytes nf4": bitsandbytes_nf4,
}


def theirs(problem: Problem, repeat: int) -> Iterator[Contestant]:
    for name, make in LIBRARIES.items():
        try:
            module = make(problem)
        except ImportError as error:
            print(f"{name}: left out, {error}")
            continue
        yield layer(name, module, problem, repeat)


def seconds_of(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def in_turn(reference: Call, call: Call, repeat: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median of the ratios call : reference, after one turn that is not counted."""
    turns = [(seconds_of(reference), seconds_of(call)) for _ in range(repeat + 1)][1:]
    return median(t for t, _ in turns), median(c for _, c in turns), median(c / t for t, c in turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--without-libraries", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for tokens in given.tokens:
        problem = Problem.random(given.rows, given.inputs, tokens)
        contestants = list(ours(problem, given.repeat))
        if not given.without_libraries:
            contestants += theirs(problem, given.repeat)
        compare(problem, contestants, f"{given.rows}x{given.inputs}, {tokens} tokens, {given.threads} threads")


def compare(problem: Problem, contestants: list[Contestant], title: str) -> None:
    directions = {
        "forward": (lambda: F.linear(problem.x, problem.weight), lambda each: each.forward),
        "dX": (lambda: problem.dy @ problem.weight, lambda each: each.backward),
        "both": (
            lambda: (F.linear(problem.x, problem.weight), problem.dy @ problem.weight),
            lambda each: None if each.backward is None else lambda: (each.forward(), each.backward()),
        ),
    }
    print(f"\n{title}; ms (torch fp32 in the same turns), x torch")
    print(f"{'':<22}" + "".join(f"{name:>26}" for name in directions), flush=True)
    for each in contestants:
        row = f"{each.name:<22}"
        for reference, pick in directions.values():
            call = pick(each)
            if call is None:
                row += f"{'-':>26}"
                continue
            theirs_s, own_s, ratio = in_turn(reference, call, each.repeat)
            row += f"{1e3 * own_s:9.2f} ({1e3 * theirs_s:6.2f}) {ratio:6.2f}x"
        print(row, flush=True)


if __name__ == "__main__":
    main()
