"""What a first and a second signal do where, without a model."""

from __future__ import annotations

import signal
import threading

import pytest

from lema.interrupts import Interrupted, StopRequest

BOTH = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


@BOTH
def test_a_signal_stops_at_once(number: signal.Signals, code: int) -> None:
    with pytest.raises(Interrupted, match=f"stopped by {number.name}; nothing is kept") as caught:
        with StopRequest("nothing is kept"):
            signal.raise_signal(number)
            pytest.fail("the block went on")
    assert caught.value.exit_code == code


@BOTH
def test_while_finishing_steps_the_first_is_noted(
    number: signal.Signals, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with StopRequest() as stop:
        with stop.finishing_steps():
            assert not stop.requested()
            stop.raise_if_requested("not yet")
            signal.raise_signal(number)
            assert stop.requested()
        with pytest.raises(Interrupted, match=f"stopped by {number.name}; all is kept") as caught:
            stop.raise_if_requested("all is kept")
    assert caught.value.exit_code == code
    assert capfd.readouterr().err.startswith("lema: stopping after this step")


def test_the_second_stops_at_once_and_the_first_gives_the_exit_code() -> None:
    with pytest.raises(Interrupted) as caught:
        with StopRequest() as stop, stop.finishing_steps():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the block went on")
    assert caught.value.exit_code == 143


def test_work_that_can_be_given_up_ends_alone() -> None:
    done = []

    def work() -> None:
        done.append("begun")
        signal.raise_signal(signal.SIGINT)
        done.append("went on")

    with StopRequest() as stop, stop.finishing_steps():
        stop.unless_stopped(work)
        assert done == ["begun"] and stop.requested()
        stop.unless_stopped(work)
        assert done == ["begun"]


def test_a_second_signal_while_work_is_given_up_stops_all() -> None:
    def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        with StopRequest() as stop, stop.finishing_steps():
            stop.unless_stopped(work)
            pytest.fail("the block went on")


def test_work_may_be_given_up_only_while_it_runs() -> None:
    with StopRequest() as stop, stop.finishing_steps():
        stop.unless_stopped(lambda: None)
        signal.raise_signal(signal.SIGINT)
        assert stop.requested()


def test_signals_are_the_callers_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(ValueError, match="not mine"):
        with StopRequest():
            raise ValueError("not mine")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_thread_of_a_library_user_can_run_a_task() -> None:
    entered = []

    def work() -> None:
        with StopRequest() as stop:
            entered.append(stop.requested())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [False]
