"""The plain Python twin of reading, held to what every read kernel promises."""

from __future__ import annotations

from lema_core.store.reads import PythonReads
from lema_core.testing.read_suite import ReadSuite


class TestPythonReads(ReadSuite):
    def make_reads(self) -> PythonReads:
        return PythonReads()
