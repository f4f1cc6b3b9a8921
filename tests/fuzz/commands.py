"""Command lines as processes of their own, forked from one that has imported all of it: a start
costs milliseconds, not seconds.

``python -m tests.fuzz.commands`` reads JSON lines ``{"module", "words", "cwd"}`` and answers each
with ``{"status", "out", "err", "seconds"}``; status -9: it was killed after its time.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

LIMIT_S = 120.0
MEMORY = 24 << 30  # address space, of which torch alone takes some


def _child(module: str, words: list[str], cwd: str) -> None:
    os.chdir(cwd)
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(f"{cwd}/.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.argv = [module, *words]
    try:
        status = importlib.import_module(module).main(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def _run(module: str, words: list[str], cwd: str) -> dict[str, object]:
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        _child(module, words, cwd)
    status = None
    while status is None:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() - began > LIMIT_S:
            os.kill(pid, signal.SIGKILL)
        else:
            time.sleep(0.01)
    said = {}
    for name in ("out", "err"):
        file = Path(cwd, f".{name}")
        said[name] = file.read_text(errors="replace") if file.exists() else ""
        file.unlink(missing_ok=True)
    return {"status": status, "seconds": time.monotonic() - began, **said}


def main() -> None:
    """Answers requests until standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        if "import" in request:
            for module in request["import"]:
                importlib.import_module(module)
            answer: dict[str, object] = {}
        else:
            answer = _run(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
