"""Whether the operators that adapters call are those of torch_npu: their schemas must stand in its
library.

``operators.txt`` has the schemas, one a line, over which tests run the adapters. torch_npu itself
is not installed: it does not load without CANN, and torch does not load beside it then.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

__all__ = ["WHEELS", "unconfirmed", "wanted"]

WHEELS = Path(sys.prefix) / "wheels"


def wanted() -> list[str]:
    """The schemas that adapters rely on."""
    return Path(__file__).with_name("operators.txt").read_text(encoding="utf-8").splitlines()


def unconfirmed(wheel: Path, schemas: list[str]) -> list[str]:
    """Those that no library of the wheel has, as a whole string."""
    left = {schema: b"\0" + schema.encode() + b"\0" for schema in schemas}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so") and left:
                content = archive.read(name)
                left = {schema: text for schema, text in left.items() if text not in content}
    return list(left)
