"""What a plugin's training method reads of ``method_options``."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lema_core.errors import ConfigError
from lema_core.method_options import read_options


@dataclass(frozen=True)
class Given:
    every: int = 10
    share: float = 0.5
    mode: str = "random"
    whole: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"every: a whole number from 1 up expected, {self.every} found")


@pytest.mark.parametrize(
    "given, expected",
    [
        (None, Given()),
        ({}, Given()),
        ({"every": 1e3, "share": 1}, Given(1000, 1.0)),
        ({"mode": "all", "whole": True}, Given(mode="all", whole=True)),
    ],
)
def test_values(given, expected) -> None:
    assert read_options(Given, given) == expected


@pytest.mark.parametrize(
    "given, said",
    [
        (
            {"evry": 3},
            "method_options: unknown option 'evry'; did you mean 'every'? (there are: every, share, mode, whole)",
        ),
        ({"every": True}, "method_options: every: a whole number expected, True found"),
        ({"every": 1.5}, "method_options: every: a whole number expected, 1.5 found"),
        ({"share": "much"}, "method_options: share: a number expected, 'much' found"),
        ({"mode": 1}, "method_options: mode: text expected, 1 found"),
        ({"whole": 1}, "method_options: whole: true or false expected, 1 found"),
        ({"every": 0}, "method_options: every: a whole number from 1 up expected, 0 found"),
    ],
)
def test_what_is_refused(given, said) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(Given, given)
    assert str(caught.value) == said


def test_defaults_are_asked_for() -> None:
    @dataclass
    class Without:
        every: int

    with pytest.raises(TypeError, match="a default expected for every"):
        read_options(Without, None)
