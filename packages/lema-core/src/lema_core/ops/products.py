"""Products with borrowed weights, and what low-rank updates add to them, forward and backward.

Feature-major: activations are [features, tokens]. Shapes: N tokens, K inputs, O outputs, r rank of a low-rank update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lema_core.ops.low_rank import LowRankUpdate
from lema_core.ops.tape import Products
from lema_core.store.granules import Part

if TYPE_CHECKING:
    from lema_core.ops.streamed import Pass, StreamedOps


def products(ops: StreamedOps, now: Pass, modules: Sequence[str], x_KN: Tensor, values: bool) -> Products:
    """Of all modules with one input; without ``values`` only what their gradients need."""
    updates = {module: ops.updates[module] for module in modules if module in ops.updates}
    x = ops.kernels.linear.packed(x_KN, now.columns) if values or updates else x_KN
    projected_rN = through_A(ops, now, updates, x_KN, x) if updates else None
    outputs, first_row = [], 0
    for module in modules:
        update = updates.get(module)
        term = None
        if update is not None:
            a_rN = projected_rN[first_row : first_row + update.rank]
            term = update.lora_B.detach().to(x_KN.dtype), a_rN, update.scale
            first_row += update.rank
        outputs.append(product(ops, now, module, x, x_KN, term) if values else _no_values(ops, module, x_KN))
    return Products(outputs, projected_rN)


def product(
    ops: StreamedOps, now: Pass, module: str, x: Any, x_KN: Tensor, term: tuple[Tensor, Tensor, float] | None
) -> Tensor:
    """W x + b + scale * B a, [O, N]. ``x``: what the kernel packed ``x_KN`` into."""
    parts = ops.weights.parts(f"{module}.weight")
    y_ON = torch.empty(ops.outputs(module), x_KN.shape[1], dtype=x_KN.dtype, device=x_KN.device)
    if module in ops.transposed:
        # What lies transposed is multiplied as the gradient of what does not.
        update = None if term is None else (term[0].t().contiguous(), term[1] * term[2])
        for part in parts:
            with ops.weights.borrow(part) as weight:
                given_KN = x_KN[part.start : part.stop]
                ops.kernels.linear.input_gradient(weight, given_KN, y_ON, part.start == 0, update, now.columns)
            update = None
        return _with_bias(ops, module, y_ON)
    for part in parts:
        rows = slice(part.start, part.stop)
        update = None if term is None else (term[0][rows], *term[1:])
        with ops.weights.borrow(part) as weight:
            ops.kernels.linear.forward(weight, x, y_ON[rows], update, now.columns)
    return _with_bias(ops, module, y_ON)


def _with_bias(ops: StreamedOps, module: str, y_ON: Tensor) -> Tensor:
    if ops.has_bias(module):
        y_ON += ops.held(f"{module}.bias").to(y_ON.dtype).unsqueeze(1)
    return y_ON


def _no_values(ops: StreamedOps, module: str, x_KN: Tensor) -> Tensor:
    """The shape of a product, [O, N], without memory behind it."""
    return x_KN.new_zeros(()).expand(ops.outputs(module), x_KN.shape[1])


def through_A(ops: StreamedOps, now: Pass, updates: Mapping[str, LowRankUpdate], x_KN: Tensor, x: Any) -> Tensor:
    """``A x`` of all modules, one below the other: one product where all see the same input."""
    if any(_drops(now, update) for update in updates.values()):
        rows = []
        for module, update in updates.items():
            dropped = ops.kernels.linear.packed(_dropped(now, module, update, x_KN), now.columns)
            rows.append(small_product(ops, now, update.lora_A.detach().to(x_KN.dtype), dropped, x_KN))
        return torch.cat(rows)
    a_rK = [update.lora_A.detach().to(x_KN.dtype) for update in updates.values()]
    return small_product(ops, now, a_rK[0] if len(a_rK) == 1 else torch.cat(a_rK), x, x_KN)


def small_product(ops: StreamedOps, now: Pass, a_rK: Tensor, x: Any, like_KN: Tensor) -> Tensor:
    out_rN = torch.empty(len(a_rK), like_KN.shape[1], dtype=like_KN.dtype, device=like_KN.device)
    ops.kernels.linear.forward(a_rK, x, out_rN, None, now.columns)
    return out_rN


def through_B(ops: StreamedOps, now: Pass, update: LowRankUpdate, dy_ON: Tensor) -> Tensor:
    """The gradient of ``A x``: scale * B^T dy, [r, N]."""
    da_rN = torch.empty(update.rank, dy_ON.shape[1], dtype=dy_ON.dtype, device=dy_ON.device)
    ops.kernels.linear.input_gradient(update.lora_B.detach().to(dy_ON.dtype), dy_ON, da_rN, True, None, now.columns)
    return da_rN.mul_(update.scale)


def input_gradient(
    ops: StreamedOps,
    now: Pass,
    modules: Sequence[str],
    dy: Mapping[str, Tensor],
    da: Mapping[str, Tensor],
    x_KN: Tensor | None = None,
) -> Tensor:
    """The sum over modules of W^T dy + A^T da, [K, N]; borrows in the reverse order of the forward pass.

    With what the modules were given, ``x_KN``, each block of a weight that trains gets its gradient too, right after it
    was borrowed.
    """
    dx_KN: Tensor | None = None
    masked: list[str] = []
    for module in reversed(modules):
        dy_ON, update = dy[module], ops.updates.get(module)
        term = None
        if update is not None and _drops(now, update):
            masked.append(module)
        elif update is not None:
            term = update.lora_A.detach().to(dy_ON.dtype), da[module]
        if module in ops.transposed:
            through_KN = _transposed_input_gradient(ops, now, module, dy_ON, term, x_KN)
            dx_KN = through_KN if dx_KN is None else dx_KN.add_(through_KN)
            continue
        for part in reversed(ops.weights.parts(f"{module}.weight")):
            with ops.weights.borrow(part) as weight:
                first = dx_KN is None
                if dx_KN is None:
                    dx_KN = torch.empty(weight.shape[1], dy_ON.shape[1], dtype=dy_ON.dtype, device=dy_ON.device)
                ops.kernels.linear.input_gradient(
                    weight, dy_ON[part.start : part.stop], dx_KN, first, term, now.columns
                )
            term = None
            _add_weight_gradient(ops, now, module, part, dy_ON, x_KN)
    for module in masked:
        update = ops.updates[module]
        branch_KN = torch.empty_like(dx_KN)
        a_rK = update.lora_A.detach().to(dx_KN.dtype)
        ops.kernels.linear.input_gradient(a_rK, da[module], branch_KN, True, None, now.columns)
        dx_KN += branch_KN.mul_(now.dropout.mask(f"{module}.lora", branch_KN, update.dropout))
    return dx_KN


def _transposed_input_gradient(
    ops: StreamedOps,
    now: Pass,
    module: str,
    dy_ON: Tensor,
    term: tuple[Tensor, Tensor] | None,
    x_KN: Tensor | None,
) -> Tensor:
    """Of one module whose weight lies as [in, out]: W dy + A^T da, [K, N]."""
    parts = ops.weights.parts(f"{module}.weight")
    dx_KN = torch.empty(parts[-1].stop, dy_ON.shape[1], dtype=dy_ON.dtype, device=dy_ON.device)
    a_Kr = None if term is None else term[0].t().contiguous()
    dy = ops.kernels.linear.packed(dy_ON, now.columns)
    for part in reversed(parts):
        rows = slice(part.start, part.stop)
        with ops.weights.borrow(part) as weight:
            update = None if a_Kr is None else (a_Kr[rows], term[1], 1.0)
            ops.kernels.linear.forward(weight, dy, dx_KN[rows], update, now.columns)
        _add_weight_gradient(ops, now, module, part, dy_ON, x_KN)
    return dx_KN


def add_weight_gradients(
    ops: StreamedOps, now: Pass, modules: Sequence[str], dy: Mapping[str, Tensor], x_KN: Tensor | None
) -> None:
    """Those of weights that train, where nobody needs that of their input: the weights are not borrowed."""
    for module in reversed(modules):
        for part in reversed(ops.weights.parts(f"{module}.weight")):
            _add_weight_gradient(ops, now, module, part, dy[module], x_KN)


def _add_weight_gradient(
    ops: StreamedOps, now: Pass, module: str, part: Part, dy_ON: Tensor, x_KN: Tensor | None
) -> None:
    """dy x^T of a block of rows, or x dy^T of one that lies as [in, out], where it trains."""
    if x_KN is None or not ops.trains(part.tensor):
        return
    rows = slice(part.start, part.stop)
    if module in ops.transposed:
        ops.gradients.add_product(part, x_KN[rows], dy_ON, now.columns)
    else:
        ops.gradients.add_product(part, dy_ON[rows], x_KN, now.columns)


def add_bias_gradients(ops: StreamedOps, now: Pass, modules: Sequence[str], dy: Mapping[str, Tensor]) -> None:
    """Of the biases that train."""
    for module in modules:
        sink = ops.sink(f"{module}.bias", now) if ops.has_bias(module) else None
        if sink is not None:
            sink.add_sums(dy[module])


def add_low_rank_gradients(
    ops: StreamedOps,
    now: Pass,
    dy: Mapping[str, Tensor],
    da: Mapping[str, Tensor],
    x_KN: Tensor,
    projected_rN: Tensor,
) -> None:
    """Add dB = scale * dy a^T and dA = da x^T to the ``.grad`` of each module's lora_B and lora_A."""
    columns = now.columns or ((0, x_KN.shape[1]),)
    first_row = 0
    for module, da_rN in da.items():
        update = ops.updates[module]
        a_rN = projected_rN[first_row : first_row + update.rank]
        first_row += update.rank
        seen_KN = _dropped(now, module, update, x_KN)
        dA_rK, dB_Or = map(update.gradient, update.parameters())
        for start, stop in columns:
            add_product(dB_Or, dy[module][:, start:stop], a_rN[:, start:stop], update.scale)
            add_product(dA_rK, da_rN[:, start:stop], seen_KN[:, start:stop], 1.0)


def add_product(total_MK: Tensor, left_Mn: Tensor, right_Kn: Tensor, scale: float) -> None:
    """``total += scale * left right^T``. The copies make a micro-batch look as it does alone."""
    product_MK = left_Mn.contiguous() @ right_Kn.contiguous().t()
    total_MK.add_(product_MK.to(total_MK.dtype), alpha=scale)


def _drops(now: Pass, update: LowRankUpdate) -> bool:
    return now.dropout is not None and update.dropout > 0


def _dropped(now: Pass, module: str, update: LowRankUpdate, x_KN: Tensor) -> Tensor:
    """What goes into a module's A."""
    return x_KN * now.dropout.mask(f"{module}.lora", x_KN, update.dropout) if _drops(now, update) else x_KN
