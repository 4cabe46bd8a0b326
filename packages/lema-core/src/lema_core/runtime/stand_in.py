"""What stands in for weights, products and gradients where a piece of a step is run only to see what it does.

Weights are zeros without memory behind them, products are counted instead of computed, gradients of weights are added
to nothing, and a dispatch mode counts the bytes of everything that torch allocates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lema_core.ops.context import ForwardContext
from lema_core.ops.gradients import Gradients
from lema_core.ops.linear import Columns, LinearKernel
from lema_core.ops.streamed import StreamedOps
from lema_core.quantization.block import WeightBlock
from lema_core.store.granules import Part
from lema_core.store.model import StreamedModel


@dataclass
class Step:
    """What followed one access; ``pair_flops`` for each token that a token may look at."""

    flops: float = 0.0
    pair_flops: float = 0.0
    touched_bytes: float = 0.0
    operations: int = 0


class StandInWeights:
    """A weight source of zeros that takes no memory and writes down what is borrowed."""

    def __init__(self, model: StreamedModel) -> None:
        self._model = model
        self.start()

    def start(self) -> None:
        """Write down from here on."""
        self.borrowed: list[Part] = []
        #: what comes before the first access counts with it
        self.step = Step()
        self.steps = [self.step]

    def parts(self, name: str) -> tuple[Part, ...]:
        return self._model.parts(name)

    def routed(self, parts: Sequence[Part]) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def borrow(self, part: Part) -> Iterator[WeightBlock]:
        block = part.block(lambda offset, dtype, shape: zeros_without_memory(shape, dtype))
        if part.on_demand:
            yield block
            return
        if self.borrowed:
            self.step = Step()
            self.steps.append(self.step)
        self.borrowed.append(part)
        yield block

    def rows(self, name: str, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(ids.numel(), self._model.embeddings[name].shape[1], dtype=dtype)


class StandInKernel(LinearKernel):
    """Counts products instead of computing them. ``copies``: it stands for torch's kernel, which copies the columns of
    a micro-batch among others; else for one that packs its input."""

    def __init__(self, weights: StandInWeights, copies: bool) -> None:
        super().__init__()
        self._weights = weights
        self._copies = copies

    def packed(self, x_KN: Tensor, segments: Sequence[Columns] = ()) -> Any:
        return super().packed(x_KN, segments) if self._copies else torch.empty_like(x_KN)

    def forward(
        self, weight_RK: WeightBlock, x: Any, out_RN: Tensor, update: Any = None, segments: Sequence[Columns] = ()
    ) -> None:
        inner = weight_RK.shape[1] + (0 if update is None else update[0].shape[1])
        self._count(2 * inner * out_RN.numel())
        if self._copies:
            super().packed(self._block(weight_RK, out_RN), segments[:1])
        out_RN.zero_()

    def input_gradient(
        self,
        weight_RK: WeightBlock,
        dy_RN: Tensor,
        dx_KN: Tensor,
        first: bool,
        update: Any = None,
        segments: Sequence[Columns] = (),
    ) -> None:
        inner = weight_RK.shape[0] + (0 if update is None else len(update[0]))
        self._count(2 * inner * dx_KN.numel())
        if self._copies:
            _held = super().packed(dx_KN, segments), super().packed(self._block(weight_RK, dy_RN), segments)
        if first:
            dx_KN.zero_()

    def _block(self, weight_RK: WeightBlock, y_RN: Tensor) -> Tensor:
        return y_RN[: self._rows_at_once(weight_RK, y_RN)]

    def _count(self, flops: float) -> None:
        self._weights.step.flops += flops
        self._weights.step.operations += 1


class StandInGradients(Gradients):
    """Counts what is added to the gradients of ``trained`` tensors, which are not there."""

    def __init__(self, weights: StandInWeights, model: StreamedModel, trained: frozenset[str]) -> None:
        self._weights = weights
        self._model = model
        self._trained = trained

    def trains(self, tensor: str) -> bool:
        return tensor in self._trained

    def borrow(self, part: Part) -> AbstractContextManager[Tensor]:
        return nullcontext(zeros_without_memory(part.shape, torch.float32))

    def row_parts(self, tensor: str) -> tuple[Part, ...]:
        rows, columns = self._model.embeddings[tensor].shape
        # from -1 on: the one id of a dry run may be that of padding, which is nowhere
        return (Part(tensor, 0, -1, rows, (rows, columns), torch.float32, 0),)

    def complete(self, layer: int | None) -> None:
        """Nothing waits for it."""

    def _add_product(self, total_RK: Tensor, left_Rn: Tensor, right_Kn: Tensor) -> None:
        self._weights.step.flops += 2 * left_Rn.numel() * len(right_Kn)
        self._add(total_RK, total_RK)

    def _add(self, total: Tensor, value: Tensor) -> None:
        self._weights.step.operations += 1
        self._weights.step.touched_bytes += 2 * nbytes_of(total)

    def _add_rows(self, total_RC: Tensor, ids_n: Tensor, rows_nC: Tensor) -> None:
        self._add(rows_nC, rows_nC)


class CountingOps(StreamedOps):
    def attention(
        self, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, ctx: ForwardContext, scale: float, *how: Any, **more: Any
    ) -> Tensor:
        # Two products of T x T / 2 numbers; the gradient's five are counted with the forward pass's two where the
        # pass records a graph.
        times = 7 if torch.is_grad_enabled() else 2
        self.weights.step.pair_flops += times * q_BHTD.shape[1] * q_BHTD.shape[3]
        return super().attention(q_BHTD, k_BHSD, v_BHSD, ctx, scale, *how, **more)


class ByteCounter(TorchDispatchMode):
    """Bytes of the storages that operations make while it is entered: alive after each that makes one, beyond those
    alive when a piece starts, alive at the end, and touched."""

    def __init__(self, weights: StandInWeights) -> None:
        super().__init__()
        self._weights = weights
        self._alive: dict[int, tuple[Any, int]] = {}
        self._bytes_before = 0
        self.alive_bytes = [0]
        self.left_bytes = 0

    def start(self) -> None:
        self._drop_dead()
        self._bytes_before, self.alive_bytes = self._bytes_alive(), [0]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Said so that torch does not import its compiler (60 MB, seconds) to keep it from looking in here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list(tensors_in((args, kwargs)))
        known = {tensor.untyped_storage()._cdata for tensor in given}
        result = func(*args, **(kwargs or {}))
        made = list(tensors_in(result))
        fresh = [storage for storage in (t.untyped_storage() for t in made) if storage._cdata not in known]
        if fresh:
            self._drop_dead()
            before = len(self._alive)
            for storage in fresh:
                if storage._cdata not in self._alive:
                    self._alive[storage._cdata] = storage._weak_ref(), storage.nbytes()
            if len(self._alive) > before:
                self.alive_bytes.append(self._bytes_alive() - self._bytes_before)
        self._weights.step.operations += 1
        if not func.is_view:
            self._weights.step.touched_bytes += sum(map(nbytes_of, (*given, *made)))
        return result

    def finish(self) -> None:
        self._drop_dead()
        self.left_bytes = self._bytes_alive()
        for reference, _ in self._alive.values():
            torch.UntypedStorage._free_weak_ref(reference)
        self._alive.clear()

    def _bytes_alive(self) -> int:
        return sum(nbytes for _, nbytes in self._alive.values())

    def _drop_dead(self) -> None:
        for key, (reference, _) in list(self._alive.items()):
            if torch.UntypedStorage._expired(reference):
                torch.UntypedStorage._free_weak_ref(reference)
                del self._alive[key]


def zeros_without_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory."""
    return torch.zeros((), dtype=dtype).expand(shape)


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(tuple(tree.values()))
