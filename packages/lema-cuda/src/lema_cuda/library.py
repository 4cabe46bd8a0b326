"""Finds and opens the native libraries, or says in a short clause why they cannot serve."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from lema_core.errors import ConfigError, PluginError

LIBRARY = Path(__file__).parent / "liblema.so"
CUDA_LIBRARY = Path(__file__).parent / "liblema_cuda.so"
#: written when the package is built: of each library {"compiler": "g++ ...", "reason": why there is none, or null}
BUILD_RECORD = Path(__file__).parent / "build.json"
DISABLE_VARIABLE = "LEMA_DISABLE_NATIVE"
#: the newest of INSTRUCTIONS that kernels may use
INSTRUCTIONS_VARIABLE = "LEMA_INSTRUCTIONS"
#: enum lema_instructions
INSTRUCTIONS = ("avx2", "avx512", "avx512_vnni", "amx")
#: LEMA_ABI_VERSION of the header that this file was written for
ABI_VERSION = 5

_address, _int32, _int64, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
    "lema_cpu_missing": (ctypes.c_char_p, ()),
    "lema_cpu_instructions": (_int32, ()),
    "lema_cpu_limit": (_int32, (_int32,)),
    "lema_linear_scratch_bytes": (_int64, (_address,)),
    "lema_linear": (_int32, (_address,)),
    "lema_linear_packed_bytes": (_int64, (_int64, _int64, _int32)),
    "lema_linear_pack": (_int32, (_address, _int64, _int64, _int64, _address, _int32, _int32)),
    "lema_rms_norm": (_int32, (_address, _address, _int64, _int64, _float, _address, _address, _int32)),
    "lema_rms_norm_gradient": (_int32, (*[_address] * 4, _int64, _int64, _address, _int32)),
    "lema_silu_product": (_int32, (_address, _address, _int64, _address, _int32)),
    "lema_silu_product_gradient": (_int32, (*[_address] * 3, _int64, _address, _address, _int32)),
    "lema_rotate": (_int32, (*[_address] * 3, *[_int64] * 3, _int32, _address, _int32)),
    "lema_adamw": (_int32, (*[_address] * 4, _int64, _address, _int32)),
    "lema_attention_scratch_bytes": (_int64, (_address,)),
    "lema_attend": (_int32, (_address,)),
    "lema_read": (_int32, (_address, _int64, _int64, _int32)),
    "lema_widen": (_int32, (_address, _int32, _int64, _address)),
    "lema_quantize": (_int32, (_address, _int32, _int64, _int64, _int32, _address, _address)),
    "lema_quantize_errors": (_int32, (_address, _int32, _int64, _int64, _int32, *[_address] * 4)),
}
_CUDA_SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
    "lema_cuda_missing": (ctypes.c_char_p, ()),
    "lema_cuda_error": (ctypes.c_char_p, (_int32,)),
    "lema_copier_open": (_int32, (_int32, _address)),
    "lema_copier_close": (_int32, (_address,)),
    "lema_copier_drain": (_int32, (_address,)),
    "lema_copier_register": (_int32, (_address, _address, _int64)),
    "lema_copier_unregister": (_int32, (_address, _address)),
    "lema_copier_new_event": (_int32, (_address, _address)),
    "lema_copier_free_event": (_int32, (_address, _address)),
    "lema_copier_copy": (_int32, (_address, _address, _address, _int64, _address, _address)),
    "lema_copier_record": (_int32, (_address, _address, _address)),
    "lema_copier_stream_wait": (_int32, (_address, _address, _address)),
    "lema_copier_wait": (_int32, (_address, _address)),
    "lema_copier_query": (_int32, (_address, _address)),
    "lema_device_missing": (ctypes.c_char_p, (_int32,)),
    "lema_device_decode": (_int32, (_address, _address, _int32, _int32, _address)),
    "lema_device_gemv": (_int32, (*[_address] * 3, _int32, _int32, _address)),
    "lema_device_padded": (_int64, (_int64,)),
    "lema_device_quantize": (_int32, (_address, *[_int64] * 3, _int32, _address, _address, _int32, _address)),
    "lema_device_product": (_int32, (*[_address] * 3, _int64, _address, _int64, _int32, _int32, _address)),
}

#: enum lema_error
_ERRORS = {
    1: "a bad argument",
    2: "too little scratch",
    3: "a CPU feature that is missing",
    4: "a number that is not finite",
}


@cache
def open_library() -> ctypes.CDLL:
    """liblema with its signatures set, held to what INSTRUCTIONS_VARIABLE says. Raises PluginError with the reason
    where there is none that fits, ConfigError for a variable that names no instructions."""
    library = _open(LIBRARY, "lema_abi_version", _SIGNATURES)
    if most := os.environ.get(INSTRUCTIONS_VARIABLE):
        if most not in INSTRUCTIONS:
            raise ConfigError(f"{INSTRUCTIONS_VARIABLE}={most} is unknown; there are {', '.join(INSTRUCTIONS)}")
        raise_for(library.lema_cpu_limit(INSTRUCTIONS.index(most)))
    return library


@cache
def open_cuda_library() -> ctypes.CDLL:
    """liblema_cuda with its signatures set, whether there is a driver or not. Raises PluginError as open_library."""
    return _open(CUDA_LIBRARY, "lema_cuda_abi_version", _CUDA_SIGNATURES)


def _open(path: Path, version: str, signatures: dict[str, tuple[type, tuple[type, ...]]]) -> ctypes.CDLL:
    if not path.exists():
        raise PluginError(_why_not_built(path))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise PluginError(f"{path} does not load: {error}") from error
    try:
        found = getattr(library, version)()
        if found != ABI_VERSION:
            raise PluginError(f"{path} has ABI {found}, expected {ABI_VERSION}; install lema-cuda again")
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise PluginError(f"{path} lacks a function: {error}; install lema-cuda again") from error
    return library


def raise_for(error: int) -> None:
    """Raises PluginError for what a function of the library returned, but for 0."""
    if error:
        raise PluginError(f"cpp kernel: liblema refused a call: {_ERRORS.get(error, error)}")


def raise_for_cuda(error: int, doing: str) -> None:
    """Raises RuntimeError with CUDA's text for what a function of liblema_cuda returned, but for 0."""
    if error:
        raise RuntimeError(f"{doing} failed: {cuda_text(error)} (CUDA error {error})")


def cuda_text(error: int) -> str:
    return open_cuda_library().lema_cuda_error(error).decode()


def library_refusals() -> list[str]:
    """Why liblema cannot serve in this process, whatever the CPU; empty when it can."""
    return _switched_off() or _opening(open_library)


def cuda_refusals() -> list[str]:
    """Why liblema_cuda cannot serve in this process; empty when it can. Opens the driver where there is one."""
    reasons = _switched_off() or _opening(open_cuda_library)
    if not reasons and (missing := open_cuda_library().lema_cuda_missing()):
        reasons = [missing.decode()]
    return reasons


def device_refusals(device: int) -> list[str]:
    """Why liblema_cuda cannot compute on this CUDA device; empty when it can. Loads the kernels there."""
    reasons = cuda_refusals()
    if not reasons and (missing := open_cuda_library().lema_device_missing(device)):
        reasons = [missing.decode()]
    return reasons


def refusals() -> list[str]:
    """Why kernels that need the CPU's features cannot serve in this process; empty when they can."""
    reasons = library_refusals()
    if not reasons and (missing := cpu_missing()):
        reasons = [f"needs AVX2, FMA and F16C, this CPU has no {missing}"]
    return reasons


def cpu_missing() -> str:
    """Instruction sets that the kernels need and this CPU lacks, such as "AVX2, FMA"; empty where they run."""
    return open_library().lema_cpu_missing().decode()


def instructions() -> str:
    """Of INSTRUCTIONS: what kernels with several variants compute with in this process."""
    return INSTRUCTIONS[open_library().lema_cpu_instructions()]


def _switched_off() -> list[str]:
    return [f"switched off by {DISABLE_VARIABLE}"] if os.environ.get(DISABLE_VARIABLE, "") not in ("", "0") else []


def _opening(open_it: Callable[[], ctypes.CDLL]) -> list[str]:
    try:
        open_it()
    except PluginError as error:
        return [str(error)]
    return []


def _why_not_built(path: Path) -> str:
    record = json.loads(BUILD_RECORD.read_text(encoding="utf-8")) if BUILD_RECORD.exists() else {}
    reason = record.get(path.stem, {}).get("reason")
    if reason is None:
        return f"{path} is missing, install lema-cuda again"
    return f"{path.stem} was not built: {reason}; mend that and install lema-cuda again"
