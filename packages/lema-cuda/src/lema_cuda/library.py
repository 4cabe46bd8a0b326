"""Finds and opens ``liblema.so``, or says in a short clause why it cannot serve."""

from __future__ import annotations

import ctypes
import json
import os
from functools import cache
from pathlib import Path

from lema_core.errors import PluginError

LIBRARY = Path(__file__).parent / "liblema.so"
#: written when the package is built: {"compiler": "g++ ...", "reason": why there is no library, or null}
BUILD_RECORD = Path(__file__).parent / "build.json"
DISABLE_VARIABLE = "LEMA_DISABLE_NATIVE"
#: LEMA_ABI_VERSION of the header that this file was written for
ABI_VERSION = 2

_address, _int32, _int64, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
    "lema_cpu_missing": (ctypes.c_char_p, ()),
    "lema_linear_scratch_bytes": (_int64, (_address,)),
    "lema_linear": (_int32, (_address,)),
    "lema_linear_packed_bytes": (_int64, (_int64, _int64)),
    "lema_linear_pack": (_int32, (_address, _int64, _int64, _int64, _address, _int32, _int32)),
    "lema_rms_norm": (_int32, (_address, _address, _int64, _int64, _float, _address, _address, _int32)),
    "lema_rms_norm_gradient": (_int32, (*[_address] * 4, _int64, _int64, _address, _int32)),
    "lema_silu_product": (_int32, (_address, _address, _int64, _address, _int32)),
    "lema_silu_product_gradient": (_int32, (*[_address] * 3, _int64, _address, _address, _int32)),
    "lema_rotate": (_int32, (*[_address] * 3, *[_int64] * 3, _int32, _address, _int32)),
    "lema_adamw_moments": (_int32, (*[_address] * 3, _int64, *[_float] * 3, _int32)),
    "lema_adamw_descend": (_int32, (*[_address] * 3, _int64, *[_float] * 4, _int32)),
    "lema_attention_scratch_bytes": (_int64, (_address,)),
    "lema_attend": (_int32, (_address,)),
    "lema_read": (_int32, (_address, _int64, _int64, _int32)),
    "lema_widen": (_int32, (_address, _int32, _int64, _address)),
}

#: enum lema_error
_ERRORS = {1: "a bad argument", 2: "too little scratch", 3: "a CPU feature that is missing"}


@cache
def open_library() -> ctypes.CDLL:
    """The library with its signatures set. Raises PluginError with the reason where there is none that fits."""
    if not LIBRARY.exists():
        raise PluginError(_why_not_built())
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise PluginError(f"{LIBRARY} does not load: {error}") from error
    library.lema_abi_version.restype = _int32
    found = library.lema_abi_version()
    if found != ABI_VERSION:
        raise PluginError(f"{LIBRARY} has ABI {found}, expected {ABI_VERSION}; install lema-cuda again")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def raise_for(error: int) -> None:
    """Raises PluginError for what a function of the library returned, but for 0."""
    if error:
        raise PluginError(f"cpp kernel: liblema refused a call: {_ERRORS.get(error, error)}")


def library_refusals() -> list[str]:
    """Why liblema cannot serve in this process, whatever the CPU; empty when it can."""
    if os.environ.get(DISABLE_VARIABLE, "") not in ("", "0"):
        return [f"switched off by {DISABLE_VARIABLE}"]
    try:
        open_library()
    except PluginError as error:
        return [str(error)]
    return []


def refusals() -> list[str]:
    """Why kernels that need the CPU's features cannot serve in this process; empty when they can."""
    reasons = library_refusals()
    if not reasons and (missing := cpu_missing()):
        reasons = [f"needs AVX2, FMA and F16C, this CPU has no {missing}"]
    return reasons


def cpu_missing() -> str:
    """Instruction sets that the kernels need and this CPU lacks, such as "AVX2, FMA"; empty where they run."""
    return open_library().lema_cpu_missing().decode()


def _why_not_built() -> str:
    if not BUILD_RECORD.exists():
        return f"{LIBRARY} is missing, install lema-cuda again"
    reason = json.loads(BUILD_RECORD.read_text(encoding="utf-8"))["reason"]
    return f"liblema was not built: {reason}; mend that and install lema-cuda again"
