"""Who quantizes, who takes the place of whom, and what is said about it, with backends made up for the purpose."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lema_core.errors import ConfigError, PluginError
from lema_core.hookspecs import hookimpl
from lema_core.plugins import PluginManager
from lema_core.quantization.backends import WeightQuantizer
from lema_core.quantization.codec import NotFiniteWeight, WeightCodec, check_finite
from lema_core.quantization.formats import NF4, Int4Groups, Int8Rows, WireFormat, WirePart
from lema_core.records import QuantBackend

NOT_HERE = "No module named 'fast' (pip install fast)"


class Filling(WeightCodec):
    """Writes its mark into every byte of the payload."""

    mark = 1

    def __init__(self, format: WireFormat) -> None:
        self.format = format

    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        check_finite(weight_rK.abs().amax(1), weight_rK)
        parts[0].fill_(self.mark)


class Failing(Filling):
    def encode(self, weight_rK: Tensor, parts: tuple[Tensor, ...]) -> None:
        raise RuntimeError("kernel\nlaunch failed")


class Picky(Filling):
    mark = 2

    def refuses(self, shape: tuple[int, ...]) -> str | None:
        return "its rows are few" if shape[0] < 4 else super().refuses(shape)


class Own(WireFormat):
    name, bits = "own8", 8

    def refuses(self, shape: tuple[int, ...]) -> str | None:
        return None

    def parts(self, shape: tuple[int, int]) -> tuple[WirePart, ...]:
        return (WirePart("", torch.uint8, shape),)

    def decode(self, parts: tuple[Tensor, ...], out_rK: Tensor) -> None:
        out_rK.copy_(parts[0])


@pytest.fixture(autouse=True)
def codecs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("made_up_codecs")
    module.Int8 = lambda: Filling(Int8Rows())  # type: ignore[attr-defined]
    module.Int4 = lambda: Filling(Int4Groups(32))  # type: ignore[attr-defined]
    module.Nf4 = lambda: Filling(NF4())  # type: ignore[attr-defined]
    module.Picky = lambda: Picky(Int8Rows())  # type: ignore[attr-defined]
    module.PickyNf4 = lambda: Picky(NF4())  # type: ignore[attr-defined]
    module.Failing = lambda: Failing(Int8Rows())  # type: ignore[attr-defined]
    module.Own = lambda: Filling(Own())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


CUSTOM = (
    QuantBackend("custom", 8, "int8", "made_up_codecs:Int8"),
    QuantBackend("custom", 4, "int4-32", "made_up_codecs:Int4"),
    QuantBackend("custom", 4, "nf4", "made_up_codecs:Nf4"),
)
FAST = QuantBackend("fast", 8, "int8", "made_up_codecs:Picky", 10)
FAST4 = QuantBackend("fast", 4, "nf4", "made_up_codecs:PickyNf4", 10)
GONE = QuantBackend("gone", 8, "int8", "made_up_codecs:Int8", 20, lambda device_type: NOT_HERE)
GONE4 = QuantBackend("gone", 4, "nf4", "made_up_codecs:Nf4", 20, lambda device_type: NOT_HERE)
BROKEN = QuantBackend("broken", 8, "int8", "made_up_codecs:Failing", 5)
OWN = QuantBackend("mine", 8, "own8", "made_up_codecs:Own", -1)


def manager_of(*records: QuantBackend, answer: object = None) -> PluginManager:
    class Plugin:
        @hookimpl
        def lema_quant_backends(self):
            return records

    class Chooser:
        @hookimpl
        def lema_choose_quant_backend(self, bits, device, available):
            return answer(bits, device, available)

    manager = PluginManager()
    assert manager.admit("test", "test", Plugin), manager.problems
    if answer is not None:
        assert manager.admit("test", "chooser", Chooser), manager.problems
    return manager


def encoded(quantizer: WeightQuantizer, shape: tuple[int, int], bits: int, value: float = 1.0) -> int:
    codec = quantizer.codec(shape, bits=bits)
    parts = tuple(torch.zeros(part.shape, dtype=part.dtype) for part in codec.format.parts(shape))
    codec.encode(torch.full(shape, value), parts)
    return int(parts[0].flatten()[0])


# -- the choice


def test_auto_takes_the_first_that_can_serve() -> None:
    manager = manager_of(*CUSTOM, FAST, GONE)
    choice = manager.choose_quant_backend("auto", 8)
    assert [each.name for each in choice.backends] == ["fast", "custom"]
    assert choice.sentences == (f"gone: {NOT_HERE}", "fast (int8): chosen") and choice.missed is None


def test_auto_asks_no_further_than_it_must() -> None:
    def never(device_type: str) -> str | None:
        raise AssertionError("asked, and a library imported, for nothing")

    slow = QuantBackend("slow", 8, "int8", "made_up_codecs:Int8", 1, never)
    assert manager_of(*CUSTOM, FAST, slow).choose_quant_backend("auto", 8).backend == FAST


def test_auto_with_nothing_installed_is_custom_and_says_why() -> None:
    choice = manager_of(*CUSTOM, GONE).choose_quant_backend("auto", 8)
    assert choice.backends == CUSTOM[:1] and str(choice) == f"gone: {NOT_HERE}; custom (int8): chosen"


def test_a_plugin_chooses_among_those_that_can_serve() -> None:
    asked = []

    def answer(*arguments: object) -> str | None:
        asked.append(arguments)
        return "custom"

    manager = manager_of(*CUSTOM, FAST, GONE, BROKEN, answer=answer)
    assert manager.choose_quant_backend("auto", 8, device_type="cuda").backend.name == "custom"
    assert asked == [(8, "cuda", ("fast", "broken", "custom"))]
    assert manager.choose_quant_backend("fast", 8).backend == FAST, "the user's word counts more"
    assert manager_of(*CUSTOM, FAST, answer=lambda *_: None).choose_quant_backend("auto", 8).backend == FAST
    with pytest.raises(PluginError, match=r"unknown quant_backend 'gone'; known: custom, fast"):
        manager_of(*CUSTOM, FAST, GONE, answer=lambda *_: "gone").choose_quant_backend("auto", 8)


def test_one_that_cannot_serve_is_replaced_by_custom_with_its_reason() -> None:
    manager = manager_of(*CUSTOM, GONE, GONE4)
    choice = manager.choose_quant_backend("gone", 8)
    assert choice.backends == CUSTOM[:1]
    assert choice.missed == f"quant_backend=gone: {NOT_HERE}; custom (int8) takes its place"
    # In its own format, so that the numbers are those that were asked for; int4 takes odd widths.
    assert [each.format for each in manager.choose_quant_backend("gone", 4).backends] == ["nf4", "int4-32"]


def test_bits_that_a_backend_has_not() -> None:
    choice = manager_of(*CUSTOM, FAST).choose_quant_backend("fast", 4)
    assert choice.backend.format == "int4-32"
    assert (
        choice.missed == "quant_backend=fast: has no 4 bits, only 8 bits: fast (int8); custom (int4-32) takes its place"
    )


def test_a_format_by_name() -> None:
    manager = manager_of(*CUSTOM, FAST, OWN)
    assert manager.choose_quant_backend("custom", format="nf4").backends == (CUSTOM[2], CUSTOM[1])
    assert manager.choose_quant_backend("custom", 4, "nf4").backend == CUSTOM[2]
    assert manager.choose_quant_backend("auto", format="own8").backends == (OWN, CUSTOM[0])
    assert manager.choose_quant_backend("mine", 8).backend == OWN
    with pytest.raises(ConfigError, match=r"unknown weights_format 'int4_32'; known: .*; did you mean 'int4-32'\?"):
        manager.choose_quant_backend("custom", format="int4_32")
    with pytest.raises(ConfigError, match="no backend quantizes to nf4 of 8 bits; installed: 8 bits: fast"):
        manager.choose_quant_backend("custom", 8, "nf4")


def test_unknown_names_and_bits_list_what_there_is() -> None:
    manager = manager_of(*CUSTOM, FAST)
    with pytest.raises(
        ConfigError, match=r"unknown quant_backend 'custon'; known: auto, custom, fast; did you mean 'custom'\?"
    ):
        manager.choose_quant_backend("custon", 8)
    with pytest.raises(ConfigError, match=r"no backend quantizes to 3 bits; installed: 8 bits: fast \(int8\), custom"):
        manager.choose_quant_backend("auto", 3)
    with pytest.raises(ConfigError, match="installed: none; packages/lema-quant brings some"):
        PluginManager().choose_quant_backend("auto", 8)


def test_nobody_can_serve() -> None:
    with pytest.raises(PluginError, match=r"no backend can quantize to 8 bits: gone: No module named 'fast'"):
        manager_of(GONE).choose_quant_backend("gone", 8)


def test_what_a_backend_raises_is_its_reason() -> None:
    def fails(device_type: str) -> str | None:
        raise RuntimeError("driver\nlost")

    choice = manager_of(*CUSTOM, QuantBackend("ill", 8, "int8", "made_up_codecs:Int8", 5, fails)).choose_quant_backend(
        "ill", 8
    )
    assert choice.missed == "quant_backend=ill: RuntimeError: driver lost; custom (int8) takes its place"


def test_formats_by_name() -> None:
    manager = manager_of(*CUSTOM, OWN, QuantBackend("liar", 8, "liar8", "made_up_codecs:Own"))
    assert type(manager.wire_format("own8")) is Own and manager.wire_format("nf4").name == "nf4"
    with pytest.raises(ConfigError, match=r"unknown weights_format 'own'; known: .*own8.*; did you mean 'own8'\?"):
        manager.wire_format("own")
    with pytest.raises(PluginError, match="quant backend liar: made_up_codecs:Own gives own8, not liar8"):
        manager.wire_format("liar8")
    gone = manager_of(QuantBackend("lost", 8, "lost8", "no_such_module:Codec"))
    with pytest.raises(PluginError, match="quant backend lost: no_such_module:Codec: ModuleNotFoundError"):
        gone.wire_format("lost8")


def test_one_record_for_a_name_and_a_format() -> None:
    class Twice:
        @hookimpl
        def lema_quant_backends(self):
            return [FAST, FAST]

    manager = PluginManager()
    assert not manager.admit("test", "test", Twice)
    assert "yields backend 'fast' for int8, which test has already" in manager.problems[0].error


# -- what a run does with it


def test_the_reason_is_said_once() -> None:
    lines: list[str] = []
    quantizer = WeightQuantizer(manager_of(*CUSTOM, GONE), "gone", warn=lines.append)
    for _ in range(3):
        assert encoded(quantizer, (8, 64), 8) == Filling.mark
    assert lines == [f"quant_backend=gone: {NOT_HERE}; custom (int8) takes its place"]


def test_a_shape_that_a_backend_refuses_goes_to_the_next_and_is_said_once() -> None:
    lines: list[str] = []
    quantizer = WeightQuantizer(manager_of(*CUSTOM, FAST), "fast", warn=lines.append)
    assert encoded(quantizer, (8, 64), 8) == Picky.mark and not lines
    assert encoded(quantizer, (2, 64), 8) == encoded(quantizer, (3, 64), 8) == Filling.mark
    assert lines == ["fast (int8) does not take a weight of [2, 64]: its rows are few; custom (int8) takes such ones"]
    assert quantizer.codec((8, 64), 8).backend == "fast" and quantizer.codec((2, 64), 8).backend == "custom"


def test_a_width_that_the_format_has_not_goes_to_one_that_has() -> None:
    lines: list[str] = []
    quantizer = WeightQuantizer(manager_of(*CUSTOM, FAST4), "fast", warn=lines.append)
    assert quantizer.codec((8, 64), 4).format.name == "nf4" and not lines
    assert quantizer.codec((8, 33), 4).format.name == "int4-32"
    assert quantizer.codec((8, 130), 4).format.name == "int4-32"
    assert lines == [
        "fast (nf4) does not take a weight of [8, 33]: its 33 columns are no multiple of 64; custom (int4-32) takes "
        "such ones"
    ]


def test_a_shape_that_nobody_takes_is_an_error_with_every_reason() -> None:
    quantizer = WeightQuantizer(manager_of(*CUSTOM, FAST), "fast")
    with pytest.raises(ConfigError, match=r"a weight of \[4, 0\] cannot be quantized: fast \(int8\): .*empty; custom"):
        quantizer.codec((4, 0), 8)


def test_an_unexpected_error_is_said_with_its_text_and_custom_encodes() -> None:
    lines: list[str] = []
    quantizer = WeightQuantizer(manager_of(*CUSTOM, BROKEN), "broken", warn=lines.append)
    assert encoded(quantizer, (8, 64), 8) == encoded(quantizer, (9, 64), 8) == Filling.mark
    assert lines == [
        "broken (int8) fails on [8, 64] torch.float32: RuntimeError: kernel launch failed; "
        "custom (int8) takes its place"
    ]


def test_a_codec_that_cannot_be_imported_is_said_too() -> None:
    lines: list[str] = []
    lost = QuantBackend("lost", 8, "int8", "no_such_module:Codec", 5)
    quantizer = WeightQuantizer(manager_of(*CUSTOM, lost), warn=lines.append)
    assert encoded(quantizer, (8, 64), 8) == Filling.mark
    assert lines == ["lost (int8) cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"]


def test_what_is_wrong_with_a_weight_is_no_failure_of_its_backend() -> None:
    lines: list[str] = []
    quantizer = WeightQuantizer(manager_of(*CUSTOM, FAST), "fast", warn=lines.append)
    with pytest.raises(NotFiniteWeight, match="row 0, column 0 is nan"):
        encoded(quantizer, (8, 64), 8, torch.nan)
    assert not lines
