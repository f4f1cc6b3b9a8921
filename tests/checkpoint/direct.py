"""A session whose writer runs in the process of the tests: the same requests and files, and no
start of seconds.
"""

from __future__ import annotations

import json
import threading
import warnings
from typing import Any

from k31fn.checkpoint import writer_process, writer_session

_ONE_AT_A_TIME = threading.Lock()  # ranks that are threads


class Direct(writer_session.WriterSession):
    """Does what is asked at once, in order; answers wait as those of a process do."""

    answers: list[tuple[bool, writer_process.WriterAnswer]]

    def begin(self, operation: str, *, awaited: bool = True, **fields: Any) -> None:
        self._check_open()
        self.answers = []
        self._do(operation, fields, awaited)

    def then(self, operation: str, *, awaited: bool = True, **fields: Any) -> None:
        if operation != "will":  # of a process that ends
            self._do(operation, fields, awaited)

    def answer(self) -> writer_process.WriterAnswer:
        while not self.answers[0][0]:
            self.answers.pop(0)
        return self.answers.pop(0)[1]

    def answered(self) -> bool:
        return True

    def _do(self, operation: str, fields: dict[str, Any], awaited: bool) -> None:
        with _ONE_AT_A_TIME, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from k31fn.checkpoint import writer

            setup = writer.WriterSetup(**{**self._setup, "buffer": self._buffer.descriptor})
            request = json.loads(json.dumps({"op": operation, **fields}))
            self.answers.append(
                (awaited, writer_process.WriterAnswer(**writer.answer(setup, request)))
            )
