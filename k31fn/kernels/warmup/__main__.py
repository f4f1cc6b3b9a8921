"""A process that compiles: ``python -m k31fn.kernels.warmup FOLDER`` reads launches, a line of JSON
each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from k31fn.kernels.warmup import Launch
from k31fn.kernels.warmup import triton as ahead

__all__ = ["main"]


def main() -> None:
    """Answers each line with how the kernel was made, or why it was not."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is not an answer
    ahead.use_folder(Path(sys.argv[1]))
    for line in sys.stdin:
        module, function, target, data = json.loads(line)
        ahead.ahead_of_time((target[0], target[1], target[2]))
        try:
            answer = {"state": ahead.ensure(Launch(module, function, tuple(target), data))[1]}
        except Exception as error:  # the parent says it, whatever it is
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
