"""How far training drifts when its moments, its accumulated gradients or both are kept in 8 bits.

A small transformer (2 blocks of 128 features, 0.5 M parameters) learns Python's own documentation, byte by byte, with
AdamW at a rate of 1e-3, weight decay 0.1, clipping at 1.0, and four micro-batches of 2 x 64 bytes a step; it trains
once for each row of the table, from the same weights and with the same batches. Only how states are kept differs:

    fp32, moved      fp32, from weights moved by 1e-6 of themselves: what any rounding at all leads to
    moments          exp_avg and exp_avg_sq encoded between steps
    gradients        the accumulator encoded after each micro-batch
    both             both
    tree, nearest    moments by dynamic tree quantization, rounded to the nearest code (Dettmers et al. 2022,
                     arXiv:2110.02861), in blocks of 256 too

Drift is |w - w32| / |w32 - w0|, with w32 the weights of fp32 training and w0 those before; losses are of the same
held-out bytes, in nats. Then what encoding and decoding cost, of one thread.

    python tools/bench/bench_state_bits.py [--steps 500] [--seeds 3]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from lema_core.ops.adamw import AdamWRates, TorchAdamW
from lema_core.plugins import get_plugin_manager
from lema_core.records import load_object
from lema_core.store.codec import StateCodecClass

WIDTH, HEADS, BLOCKS, BYTES = 128, 4, 2, 256
ROWS, TOKENS, MICRO_BATCHES = 2, 64, 4
LR, DECAY, CLIP = 1e-3, 0.1, 1.0
REPORTED = (100, 500)

Weights = dict[str, Tensor]
Codecs = dict[str, StateCodecClass]


def new_weights(seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (BYTES, WIDTH), "positions": (TOKENS, WIDTH), "norm": (WIDTH,)}
    for i in range(BLOCKS):
        shapes |= {f"{i}.attention_norm": (WIDTH,), f"{i}.qkv": (3 * WIDTH, WIDTH), f"{i}.out": (WIDTH, WIDTH)}
        shapes |= {f"{i}.mlp_norm": (WIDTH,), f"{i}.up": (4 * WIDTH, WIDTH), f"{i}.down": (WIDTH, 4 * WIDTH)}
    return {
        name: torch.ones(shape) if name.endswith("norm") else 0.05 * torch.randn(shape, generator=random)
        for name, shape in shapes.items()
    }


def loss_of(w: Weights, ids_BT: Tensor) -> Tensor:
    """Mean over the targets of rows [B, T + 1]."""
    x_BTC = w["embedding"][ids_BT[:, :-1]] + w["positions"]
    for i in range(BLOCKS):
        h_BTC = F.rms_norm(x_BTC, (WIDTH,), w[f"{i}.attention_norm"])
        q, k, v = (h_BTC @ w[f"{i}.qkv"].T).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o_BTC = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BTC = x_BTC + o_BTC @ w[f"{i}.out"].T
        h_BTC = F.rms_norm(x_BTC, (WIDTH,), w[f"{i}.mlp_norm"])
        x_BTC = x_BTC + F.gelu(h_BTC @ w[f"{i}.up"].T) @ w[f"{i}.down"].T
    logits = F.rms_norm(x_BTC, (WIDTH,), w["norm"]) @ w["embedding"].T
    return F.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten())


class Kept:
    """A state between two uses: as it is, or encoded."""

    def __init__(self, codec: StateCodecClass | None, n: int) -> None:
        self._codec = codec
        self._n = n
        self._held = torch.zeros(n) if codec is None else torch.zeros(codec.nbytes(n), dtype=torch.uint8)

    def read(self) -> Tensor:
        if self._codec is None:
            return self._held
        values = torch.empty(self._n)
        self._codec.decode(self._held, values)
        return values

    def write(self, values: Tensor) -> None:
        if self._codec is None:
            self._held.copy_(values)
        else:
            self._codec.encode(values, self._held)


def train(weights: Weights, batches: Tensor, codecs: Codecs) -> dict[int, Tensor]:
    """Weights as one vector after each of the reported steps. ``batches``: [steps, micro-batches, B, T + 1]."""
    w = {name: value.clone().requires_grad_() for name, value in weights.items()}
    states = {
        name: {kind: Kept(codecs.get(kind), value.numel()) for kind in ("exp_avg", "exp_avg_sq", "grads")}
        for name, value in w.items()
    }
    found = {}
    for step, micro_batches in enumerate(batches, 1):
        for kept in states.values():
            kept["grads"].write(torch.zeros(kept["grads"].read().shape))
        for ids_BT in micro_batches:
            grads = torch.autograd.grad(loss_of(w, ids_BT) / len(micro_batches), list(w.values()))
            for kept, grad in zip(states.values(), grads, strict=True):
                kept["grads"].write(kept["grads"].read() + grad.flatten())
        summed = {name: kept["grads"].read() for name, kept in states.items()}
        norm = torch.cat(list(summed.values())).norm().item()
        for name, value in w.items():
            kept = states[name]
            moments = kept["exp_avg"].read(), kept["exp_avg_sq"].read()
            decay = DECAY if value.ndim > 1 else 0.0
            rates = AdamWRates(LR, 0.9, 0.999, 1e-8, decay, step, min(1.0, CLIP / (norm + 1e-6)))
            TorchAdamW().update(value.detach().view(-1), summed[name], *moments, rates)
            kept["exp_avg"].write(moments[0])
            kept["exp_avg_sq"].write(moments[1])
        if step in REPORTED or step == len(batches):
            found[step] = torch.cat([value.detach().flatten() for value in w.values()])
    return found


class NearestTree:
    """Dynamic tree quantization, rounded to the nearest code; for comparison alone, so not small."""

    def __init__(self, kind: str) -> None:
        signed = kind != "exp_avg_sq"
        sizes = [0.0, 1.0]
        for decade in range(7):
            edges = torch.linspace(0.1, 1, (2**decade if signed else 2 ** (decade + 1)) + 1, dtype=torch.float64)
            sizes += (10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2).tolist()
        table = sizes + [-size for size in sizes[2:]] if signed else sizes
        self._table = torch.tensor(sorted(table), dtype=torch.float32)

    def nbytes(self, n: int) -> int:
        return 4 * -(-n // 256) * 256

    def encode(self, values: Tensor, encoded: Tensor) -> None:
        blocks = F.pad(values, (0, -len(values) % 256)).view(-1, 256)
        absmax = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
        codes = torch.bucketize(blocks / absmax, (self._table[1:] + self._table[:-1]) / 2)
        encoded.view(torch.float32).copy_((self._table[codes] * absmax).flatten())

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        values.copy_(encoded.view(torch.float32)[: len(values)])


def draw(text: Tensor, steps: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - TOKENS - 1, (steps, MICRO_BATCHES, ROWS), generator=random)
    return text[starts[..., None] + torch.arange(TOKENS + 1)].long()


def contest(text: Tensor, steps: int, seed: int, make: Callable[[str], StateCodecClass]) -> dict[str, list[float]]:
    """Row -> [drift after each reported step ..., held-out loss after the last]."""
    held_out, learned = text[: len(text) // 10], text[len(text) // 10 :]
    batches, judged = draw(learned, steps, seed), draw(held_out, 32, 0).view(-1, TOKENS + 1)
    weights = new_weights(seed)
    random = torch.Generator().manual_seed(seed)
    moved = {name: w * (1 + 1e-6 * torch.randn(w.shape, generator=random)) for name, w in weights.items()}
    first, second, third = (make(kind) for kind in ("exp_avg", "exp_avg_sq", "grads"))
    moments: Codecs = {"exp_avg": first, "exp_avg_sq": second}
    runs: dict[str, tuple[Weights, Codecs]] = {
        "fp32": (weights, {}),
        "fp32, moved": (moved, {}),
        "moments": (weights, moments),
        "gradients": (weights, {"grads": third}),
        "both": (weights, {**moments, "grads": third}),
        "tree, nearest": (weights, {kind: NearestTree(kind) for kind in moments}),
    }
    start = torch.cat([value.flatten() for value in weights.values()])
    rows: dict[str, list[float]] = {}
    exact: dict[int, Tensor] = {}
    for name, (from_weights, codecs) in runs.items():
        found = train(from_weights, batches, codecs)
        exact = exact or found
        drifts = [((found[at] - exact[at]).norm() / (exact[at] - start).norm()).item() for at in found]
        sizes = [value.numel() for value in weights.values()]
        parts = zip(weights.items(), found[steps].split(sizes), strict=True)
        last = {key: part.view(value.shape) for (key, value), part in parts}
        rows[name] = [*drifts, loss_of(last, judged).item()]
        print(f"seed {seed}, {name}: {' '.join(f'{value:.4f}' for value in rows[name])}", file=sys.stderr, flush=True)
    return rows


def time_codec(codec: StateCodecClass, repeat: int) -> tuple[float, float]:
    """Milliseconds of CPU time per million numbers, encoding and decoding: the best of some."""
    n = 1 << 20
    values, encoded = torch.rand(n), torch.zeros(codec.nbytes(n), dtype=torch.uint8)
    best = []
    for work in (lambda: codec.encode(values, encoded), lambda: codec.decode(encoded, values)):
        spent = []
        for _ in range(repeat):
            started = time.thread_time()
            work()
            spent.append((time.thread_time() - started) * 1e9 / n)
        best.append(min(spent))
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="five steps, one seed: does it run?")
    given = parser.parse_args()
    if given.quick:
        given.steps, given.seeds = 5, 1
    torch.set_num_threads(1)
    codec = load_object(get_plugin_manager().state_codec(8).codec)
    text = torch.frombuffer(bytearray("".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    print(f"{len(text) / 1e3:.0f} KB of text; medians over seeds, and the largest drift at the end", flush=True)
    seeds = [contest(text, given.steps, seed, codec) for seed in range(given.seeds)]
    reported = [at for at in REPORTED if at < given.steps] + [given.steps]
    print("| |" + "".join(f" drift, step {at} |" for at in reported) + " at worst | held-out loss | against fp32 |")
    print("|---" * (len(reported) + 4) + "|")
    for name in seeds[0]:
        columns = list(zip(*(rows[name] for rows in seeds), strict=True))
        apart = max((rows[name][-1] - rows["fp32"][-1] for rows in seeds), key=abs)
        drifts = "".join(f" {median(column):.4f} |" for column in columns[:-1])
        print(f"| {name} |{drifts} {max(columns[-2]):.4f} | {median(columns[-1]):.4f} | {apart:+.4f} |", flush=True)
    for kind in ("exp_avg", "exp_avg_sq", "grads"):
        encode, decode = time_codec(codec(kind), 15)
        print(f"{kind:<12} encode {encode:.2f}, decode {decode:.2f} ms per million numbers", flush=True)


if __name__ == "__main__":
    main()
