"""Budgets as people write them: ``"auto"``, a fraction of what there is (``"0.3"``), or an amount (``"4.0GB"``)."""

from __future__ import annotations

import re

from lema_core.errors import ConfigError

#: bytes per unit, keyed in upper case; KB MB GB TB are powers of ten, KiB MiB GiB TiB of two
UNITS_BYTES: dict[str, int] = {"B": 1} | {
    f"{letter}{infix}B": base**power
    for power, letter in enumerate("KMGT", start=1)
    for infix, base in (("", 1000), ("I", 1024))
}
ALLOWED_AMOUNTS = (
    '"auto", a fraction of what there is such as "0.3", or an amount with a unit such as "4.0GB" '
    "(B, KB, MB, GB, TB, KiB, MiB, GiB)"
)
_AMOUNT = re.compile(r"(\d+\.?\d*|\.\d+)(?:e([+-]?\d{1,3}))?\s*([a-z]*)", re.IGNORECASE)


def parse_amount(value: str | int | float, total_bytes: int, option: str = "budget") -> int | None:
    """Bytes of a budget, None for "auto".

    A number without a unit is a fraction in (0, 1] of ``total_bytes``; units are read in any case, a space may precede.
    Raises ConfigError naming ``option``, the value and the allowed forms.
    """
    text = str(value).strip()
    if text.lower() == "auto":
        return None
    match = _AMOUNT.fullmatch(text)
    unit = match[3].upper() if match else ""
    if isinstance(value, bool) or not match or (unit and unit not in UNITS_BYTES):
        raise ConfigError(f"{option}: {value!r} is not an amount of memory; allowed: {ALLOWED_AMOUNTS}")
    number = float(f"{match[1]}e{match[2] or 0}")
    if not unit:
        if number > 1:
            raise ConfigError(
                f"{option}: {value!r} has no unit, and as a fraction it is greater than 1; "
                f'write "{text}GB" or "{text}MB" for an amount; allowed: {ALLOWED_AMOUNTS}'
            )
        number, unit = number * total_bytes, "B"
    if not 0 < number * UNITS_BYTES[unit] < float("inf"):
        raise ConfigError(f"{option}: {value!r} must be greater than 0; allowed: {ALLOWED_AMOUNTS}")
    return max(1, round(number * UNITS_BYTES[unit]))
