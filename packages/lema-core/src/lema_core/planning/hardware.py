"""What a machine can do, as the few rates that a step's time follows from. Three machines are known by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import ceil, isfinite
from typing import Any

from lema_core.budgets import parse_amount
from lema_core.errors import ConfigError
from lema_core.suggest import did_you_mean, unknown_name

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
#: bytes of RAM by field in a mapping; rates of bytes may be written "12GB/s"
_BYTES = ("ram_bytes", "device_bytes")
_BYTE_RATES = ("disk_bytes_per_s", "link_bytes_per_s", "memory_bytes_per_s")
_OPTIONAL = ("device_bytes", "link_bytes_per_s", "op_overhead_s", "name", "source", "pace", "read_drag_s_per_byte")


@dataclass(frozen=True)
class Hardware:
    """A machine in figures.

    ``device_bytes`` and ``link_bytes_per_s`` (RAM -> device) are None where the device computes from RAM.
    ``memory_bytes_per_s``: bytes read and written per second in the memory that is computed in. ``gemm``: FLOP/s of
    products by their number of tokens, as (tokens, FLOP/s) in rising order of tokens. ``op_overhead_s``: what an
    operation costs beside its work. ``source``: where the figures come from. ``pace``: how many times longer than these
    rates say a model's steps compute, where that was found out. ``read_drag_s_per_byte``: what computing loses to each
    byte that is read from disk beside it.
    """

    name: str
    ram_bytes: int
    device_bytes: int | None
    disk_bytes_per_s: float
    link_bytes_per_s: float | None
    memory_bytes_per_s: float
    gemm: tuple[tuple[int, float], ...]
    compute_dtype: str
    op_overhead_s: float
    source: str
    pace: float = 1.0
    read_drag_s_per_byte: float = 0.0

    @property
    def device_shares_ram(self) -> bool:
        return self.device_bytes is None

    def flops_per_s(self, tokens: int) -> float:
        """Rate of a product with so many columns.

        The time of a product is taken to be linear in its columns between two measured ones, constant below the first
        (the weight is read all the same), and proportional above the last.
        """
        (first, rate), (last, last_rate) = self.gemm[0], self.gemm[-1]
        if tokens <= first:
            return rate * tokens / first
        if tokens >= last:
            return last_rate
        above = next(i for i, (n, _) in enumerate(self.gemm) if n >= tokens)
        (low, low_rate), (high, high_rate) = self.gemm[above - 1], self.gemm[above]
        low_s, high_s = low / low_rate, high / high_rate
        return tokens / (low_s + (high_s - low_s) * (tokens - low) / (high - low))

    def product_s(self, flops: float, tokens: int) -> float:
        """Seconds for ``flops`` of products with ``tokens`` columns."""
        return flops / self.flops_per_s(tokens) if flops else 0.0


def _roofline(flops_per_s: float, memory_bytes_per_s: float) -> tuple[tuple[int, float], ...]:
    """Rates where a product either reads its weights or computes: one FLOP per token and byte of a 2-byte weight."""
    return (1, memory_bytes_per_s), (ceil(flops_per_s / memory_bytes_per_s), flops_per_s)


def t4() -> Hardware:
    """NVIDIA T4 (Turing, sm_75, 70 W): 16 GB of GDDR6 at 320 GB/s, PCIe 3.0 x16, 65 TFLOP/s peak in fp16, no bf16.

    NVIDIA T4 Tensor Core GPU data sheet, 2019. Sustained: 24 TFLOP/s, since 70 W hold no higher clock for long, and
    12 GB/s of the link's 15.75. The host is that of common cloud offers: 30 GB of RAM and a disk of 1 GB/s.
    """
    return Hardware(
        name="t4",
        ram_bytes=30_000_000_000,
        device_bytes=16_000_000_000,
        disk_bytes_per_s=1.0e9,
        link_bytes_per_s=12.0e9,
        memory_bytes_per_s=320.0e9 * 0.8,
        gemm=_roofline(24.0e12, 320.0e9 * 0.8),
        compute_dtype="float16",
        op_overhead_s=10e-6,
        source="NVIDIA T4 data sheet (320 GB/s, of which 80 %), 24 TFLOP/s and 12 GB/s sustained",
    )


def rtx4090() -> Hardware:
    """NVIDIA GeForce RTX 4090 (Ada, sm_89): 24 GB of GDDR6X at 1008 GB/s, PCIe 4.0 x16 (31.5 GB/s), 165.2 TFLOP/s
    dense in bf16 with fp32 accumulation.

    NVIDIA Ada GPU Architecture white paper, 2022, appendix A. 80 % of each rate is taken to be sustained; the host is a
    desktop with 64 GB of RAM and an NVMe disk of 5 GB/s.
    """
    return Hardware(
        name="rtx4090",
        ram_bytes=64_000_000_000,
        device_bytes=24_000_000_000,
        disk_bytes_per_s=5.0e9,
        link_bytes_per_s=31.5e9 * 0.8,
        memory_bytes_per_s=1008.0e9 * 0.8,
        gemm=_roofline(165.2e12 * 0.8, 1008.0e9 * 0.8),
        compute_dtype="bfloat16",
        op_overhead_s=6e-6,
        source="NVIDIA Ada white paper (165 TFLOP/s, 1008 GB/s, PCIe 4.0), of which 80 %",
    )


def h200() -> Hardware:
    """NVIDIA H200 SXM (Hopper, sm_90): 141 GB of HBM3e at 4.8 TB/s, PCIe 5.0 x16 (63 GB/s), 989.5 TFLOP/s dense in
    bf16.

    NVIDIA H200 Tensor Core GPU data sheet, 2024 (it gives 1,979 TFLOP/s with sparsity). 80 % of each rate is taken to
    be sustained; the host is a share of a server: 256 GB of RAM and NVMe disks of 10 GB/s.
    """
    return Hardware(
        name="h200",
        ram_bytes=256_000_000_000,
        device_bytes=141_000_000_000,
        disk_bytes_per_s=10.0e9,
        link_bytes_per_s=63.0e9 * 0.8,
        memory_bytes_per_s=4800.0e9 * 0.8,
        gemm=_roofline(989.5e12 * 0.8, 4800.0e9 * 0.8),
        compute_dtype="bfloat16",
        op_overhead_s=5e-6,
        source="NVIDIA H200 data sheet (989 TFLOP/s, 4.8 TB/s, PCIe 5.0), of which 80 %",
    )


_PROFILES = {"t4": t4, "rtx4090": rtx4090, "h200": h200}


def profile_names() -> tuple[str, ...]:
    return tuple(_PROFILES)


def named_hardware(name: str) -> Hardware:
    """A machine by name. Raises ConfigError that lists what is known, with a near match."""
    if name.lower() not in _PROFILES:
        known = unknown_name("name", name, _PROFILES)
        raise ConfigError(f"hardware: {known}; or give a FILE.yaml")
    return _PROFILES[name.lower()]()


def from_mapping(values: Any, source: str) -> Hardware:
    """A machine from what a YAML file holds: the fields of :class:`Hardware`, ``source`` is the file's name.

    Memory may be given as ``"16GB"``, rates of bytes as ``"12GB/s"``; ``gemm`` is one number, or a mapping of tokens ->
    FLOP/s. ``like`` takes what is not given from a machine known by name. Raises ConfigError naming file and field.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{source}: holds {type(values).__name__}, expected the fields of a machine, such as ram_bytes"
        )
    known = {field.name for field in fields(Hardware)} | {"like"}
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{source}: unknown field {name!r}; known: {', '.join(sorted(known))}{did_you_mean(str(name), known)}"
            )
    found: dict[str, Any] = {"name": source, "source": source, "op_overhead_s": 10e-6}
    found |= {"device_bytes": None, "link_bytes_per_s": None, "pace": 1.0, "read_drag_s_per_byte": 0.0}
    if "like" in values:
        base = named_hardware(str(values["like"]))
        found = {field.name: getattr(base, field.name) for field in fields(Hardware)} | {"name": source}
        found["source"] = f"{source}, like {base.name}"
    for name, value in values.items():
        if name != "like":
            found[name] = _read(source, name, value)
    missing = [field.name for field in fields(Hardware) if field.name not in found]
    if missing:
        raise ConfigError(f"{source}: {missing[0]} is missing; all of {', '.join(_required())} are needed, or like: t4")
    if (found["device_bytes"] is None) != (found["link_bytes_per_s"] is None):
        raise ConfigError(
            f"{source}: device_bytes and link_bytes_per_s belong together; give both, or none for a device that "
            "computes from RAM"
        )
    return Hardware(**found)


def _required() -> list[str]:
    return [field.name for field in fields(Hardware) if field.name not in _OPTIONAL]


def _read(source: str, name: str, value: Any) -> Any:
    where = f"{source}: {name}"
    if name in ("name", "source"):
        return str(value)
    if name == "compute_dtype":
        if value not in COMPUTE_DTYPES:
            raise ConfigError(f"{where}: {value!r} is no dtype to compute in; allowed: {', '.join(COMPUTE_DTYPES)}")
        return value
    if name == "gemm":
        return _read_gemm(where, value)
    if value is None and name in ("device_bytes", "link_bytes_per_s"):
        return None
    if isinstance(value, str) and name in (*_BYTES, *_BYTE_RATES):
        amount = re.sub(r"\s*/\s*s$", "", value.strip()) if name in _BYTE_RATES else value
        if re.search(r"[a-zA-Z]$", amount.strip()):
            value = parse_amount(amount, 1, where)
    number = _number(where, value)
    return int(number) if name in _BYTES else number


def _read_gemm(where: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        return ((1, _number(where, value)),)
    table = {}
    for tokens, rate in value.items():
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise ConfigError(f"{where}: {tokens!r} is no number of tokens; give a mapping such as {{256: 2.0e13}}")
        table[tokens] = _number(f"{where} at {tokens} tokens", rate)
    if not table:
        raise ConfigError(f"{where}: is empty; give FLOP/s as one number, or a mapping such as {{256: 2.0e13}}")
    return tuple(sorted(table.items()))


def _number(where: str, value: Any) -> float:
    # YAML 1.1 reads 24e12, without a point, as text.
    try:
        number = float(value) if not isinstance(value, bool) else float("nan")
    except (TypeError, ValueError):
        number = float("nan")
    if not isfinite(number) or number <= 0:
        raise ConfigError(f"{where}: {value!r} is no number greater than 0")
    return number
