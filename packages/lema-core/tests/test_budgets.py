"""Budgets are read as written or refused with the option, the value and the allowed forms."""

from __future__ import annotations

import pytest

from lema_core.budgets import parse_amount
from lema_core.errors import ConfigError

TOTAL_BYTES = 10_000_000_000


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", None),
        ("AUTO", None),
        ("0.3", 3_000_000_000),
        (0.3, 3_000_000_000),
        ("1", TOTAL_BYTES),
        (1, TOTAL_BYTES),
        (".5", 5_000_000_000),
        ("4.0GB", 4_000_000_000),
        ("4gb", 4_000_000_000),
        ("4 GiB", 4 * 2**30),
        ("1.5 mib", 3 * 2**19),
        ("120MB", 120_000_000),
        ("7KB", 7_000),
        ("7kib", 7 * 1024),
        ("512B", 512),
        ("2TB", 2 * 10**12),
        ("1e9B", 10**9),
        (" 3 MB ", 3_000_000),
    ],
)
def test_reads_every_allowed_form(value: str | float, expected: int | None) -> None:
    assert parse_amount(value, TOTAL_BYTES) == expected


@pytest.mark.parametrize(
    "value",
    [
        "",
        "4",
        "4000000000",
        2,
        1.5,
        "0",
        0,
        "0GB",
        "-1GB",
        "-0.5",
        "4XB",
        "GB",
        "nan",
        "inf",
        "1e999GB",
        True,
        "4G",
        "4 G B",
    ],
)
def test_refuses_everything_else_by_name(value: str | float) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_amount(value, TOTAL_BYTES, "weights_ram")
    message = str(caught.value)
    assert (
        message.startswith(f"weights_ram: {value!r}")
        and '"4.0GB"' in message
        and "auto" in message
        and "\n" not in message
    )


def test_a_number_without_a_unit_says_so() -> None:
    with pytest.raises(ConfigError, match=r'no unit.*write "4GB"'):
        parse_amount("4", TOTAL_BYTES)
