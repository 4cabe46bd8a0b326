"""Machines by name and from a file, and how a product's rate follows from its tokens."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from lema_core.errors import ConfigError
from lema_core.planning.hardware import Hardware, from_mapping, named_hardware, profile_names

COMPLETE = {
    "ram_bytes": "8GB",
    "disk_bytes_per_s": "1.5GB/s",
    "memory_bytes_per_s": 2.0e10,
    "gemm": {16: 1.0e10, 64: "4e10", 256: 6.0e10},
    "compute_dtype": "float32",
}


def test_the_t4_is_the_one_that_the_published_runs_used() -> None:
    machine = named_hardware("T4")
    assert (machine.device_bytes, machine.link_bytes_per_s, machine.compute_dtype) == (16 * 10**9, 12e9, "float16")
    assert machine.flops_per_s(128) == machine.flops_per_s(10_000) == 24e12
    assert not machine.device_shares_ram


@pytest.mark.parametrize("name", profile_names())
def test_every_named_machine_is_complete_and_says_where_its_figures_are_from(name: str) -> None:
    machine = named_hardware(name)
    assert machine.name == name and machine.source
    for field in fields(Hardware):
        value = getattr(machine, field.name)
        # Reads do not disturb a device with memory of its own.
        least = 0 if field.name == "read_drag_s_per_byte" else 1e-9
        assert value is not None and (isinstance(value, (str, tuple)) or value >= least), field.name
    tokens = [n for n, _ in machine.gemm]
    assert tokens == sorted(set(tokens))
    # few tokens cannot hide that the weights are read: 2 bytes and 2 FLOPs per parameter and token
    assert machine.flops_per_s(1) == pytest.approx(machine.memory_bytes_per_s)


def test_an_unknown_name_lists_what_is_known() -> None:
    with pytest.raises(ConfigError) as failed:
        named_hardware("rtx4080")
    assert str(failed.value) == (
        "hardware: unknown name 'rtx4080'; known: h200, rtx4090, t4; did you mean 'rtx4090'?; or give a FILE.yaml"
    )


def test_a_file_gives_a_machine_that_computes_from_ram() -> None:
    machine = from_mapping(COMPLETE, "box.yaml")
    assert machine == Hardware(
        "box.yaml",
        8 * 10**9,
        None,
        1.5e9,
        None,
        2e10,
        ((16, 1e10), (64, 4e10), (256, 6e10)),
        "float32",
        10e-6,
        "box.yaml",
    )
    assert machine.device_shares_ram


def test_the_time_of_a_product_is_linear_between_measured_tokens() -> None:
    machine = from_mapping(COMPLETE, "box.yaml")
    per_token = 1e6
    # by hand: 16 tokens at 1e10 take 1.6 ms, 64 at 4e10 as long, 256 at 6e10 take 4.267 ms
    assert machine.product_s(16 * per_token, 16) == pytest.approx(1.6e-3)
    assert machine.product_s(1 * per_token, 1) == pytest.approx(1.6e-3), "a single token reads the weight all the same"
    assert machine.product_s(40 * per_token, 40) == pytest.approx(1.6e-3)
    assert machine.product_s(160 * per_token, 160) == pytest.approx((1.6e-3 + 256e6 / 6e10) / 2)
    assert machine.product_s(512 * per_token, 512) == pytest.approx(512e6 / 6e10)
    assert machine.product_s(0, 0) == 0


def test_like_takes_the_rest_from_a_named_machine() -> None:
    machine = from_mapping({"like": "t4", "ram_bytes": "12.7GB"}, "colab.yaml")
    assert machine.ram_bytes == 12_700_000_000
    assert machine.gemm == named_hardware("t4").gemm
    assert machine.name == "colab.yaml" and "t4" in machine.source


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1], "box.yaml: holds list, expected the fields of a machine, such as ram_bytes"),
        ({**COMPLETE, "ram_byte": 1}, "unknown field 'ram_byte'; known: .*; did you mean 'ram_bytes'?"),
        ({k: v for k, v in COMPLETE.items() if k != "gemm"}, "box.yaml: gemm is missing; all of ram_bytes, "),
        ({**COMPLETE, "gemm": {}}, "box.yaml: gemm: is empty"),
        ({**COMPLETE, "gemm": {"many": 1e9}}, "box.yaml: gemm: 'many' is no number of tokens"),
        ({**COMPLETE, "gemm": {16: -1}}, "box.yaml: gemm at 16 tokens: -1 is no number greater than 0"),
        ({**COMPLETE, "gemm": "fast"}, "box.yaml: gemm: 'fast' is no number greater than 0"),
        ({**COMPLETE, "ram_bytes": "8 apples"}, "box.yaml: ram_bytes: '8 apples' is not an amount of memory"),
        ({**COMPLETE, "ram_bytes": True}, "box.yaml: ram_bytes: True is no number greater than 0"),
        ({**COMPLETE, "disk_bytes_per_s": 0}, "box.yaml: disk_bytes_per_s: 0 is no number"),
        ({**COMPLETE, "disk_bytes_per_s": None}, "box.yaml: disk_bytes_per_s: None is no number"),
        ({**COMPLETE, "compute_dtype": "int8"}, "box.yaml: compute_dtype: 'int8' is no dtype to compute in; allowed"),
        ({**COMPLETE, "device_bytes": "16GB"}, "box.yaml: device_bytes and link_bytes_per_s belong together"),
        ({"like": "t5"}, "hardware: unknown name 't5'; known: h200, rtx4090, t4; or give a FILE"),
    ],
)
def test_what_a_file_gives_wrong_is_named(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as failed:
        from_mapping(values, "box.yaml")
    assert "\n" not in str(failed.value)
