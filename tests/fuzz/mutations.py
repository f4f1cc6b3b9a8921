"""Damage to files and to command lines, drawn from a seed."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

# What a field of a file may hold instead of what it should.
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2.5,
    1 << 31,
    -(1 << 63),
    1 << 64,
    10**12,
    10**400,
    1e308,
    -1e308,
    1e-310,
    float("nan"),
    float("inf"),
    "",
    "x",
    "nan",
    "../../x",
    "/",
    "a" * 3000,
    "\ud800",
    "é漢\u0000",
    [],
    [[]],
    {},
    {"a": {}},
    [1, "2", None],
)
NUMBERS = ("0", "-1", "1e308", "nan", "inf", "-inf", "1e-310", "2.5", "9223372036854775807")
NUMBERS += ("1000000000001", "99999999999999999999999", "0x10", "1_0", "١", "", " ", "1,2", "1e5")
WORDS = (
    "",
    " ",
    "auto",
    "..",
    "/",
    "/dev/null",
    "a/b",
    "é",
    "-",
    "--",
    "x" * 300,
    "none",
    "[]",
    "()",
)


def json_text(text: bytes, draw: random.Random) -> bytes:
    """JSON with one or two parts of it replaced, or text that is nearly JSON."""
    if draw.random() < 0.2:
        return _nearly(text, draw)
    value = json.loads(text)
    for _ in range(draw.randint(1, 2)):
        value = _changed(value, draw)
    return json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")


def _nearly(text: bytes, draw: random.Random) -> bytes:
    nested = b"[" * draw.choice([900, 5000, 100_000])
    at = draw.randrange(len(text) + 1)
    return draw.choice(
        [
            b"",
            b"\xef\xbb\xbf" + text,
            text + b"}",
            text + text,
            text[:at],
            text[:at] + nested + text[at:],
            nested,
            b'{"a": ' * 5000,
            text.replace(b":", b": NaN, :", 1),
            text.replace(b'"', b'"\xff', 1),
            text.decode("utf-8", "replace").encode("utf-16"),
            b"null",
            b"3",
            b'"text"',
            text[:at] + b"9" * 5000 + text[at:],
        ]
    )


def _changed(value: Any, draw: random.Random) -> Any:
    """With one part of it replaced, left out, doubled or renamed."""
    whole = {"root": copy.deepcopy(value)}
    place, key = _anywhere(whole, draw)
    what = draw.random()
    if isinstance(place, dict) and place is not whole and what < 0.15:
        del place[key]
    elif isinstance(place, dict) and place is not whole and what < 0.25:
        place[draw.choice(["x", "", "kind", key + "x", "__class__"])] = place[key]
    elif isinstance(place, list) and what < 0.25:
        place.insert(0, copy.deepcopy(draw.choice([*place, *ODD])))
    else:
        place[key] = copy.deepcopy(draw.choice(ODD))
    return whole["root"]


def _anywhere(whole: Any, draw: random.Random) -> tuple[Any, Any]:
    """A place in nested data, shallow ones as likely as deep ones."""
    place, key = whole, "root"
    while draw.random() < 0.75:
        inner = place[key]
        if isinstance(inner, dict) and inner:
            place, key = inner, draw.choice(list(inner))
        elif isinstance(inner, list) and inner:
            place, key = inner, draw.randrange(len(inner))
        else:
            break
    return place, key


def some_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bits flipped, pieces cut out, doubled, or replaced by what headers have."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        # the beginning of a file, where its header is, is hit as often as the rest
        at = draw.randrange(min(len(out), draw.choice([64, 1 << 30])) or 1)
        what = draw.random()
        if not out:
            break
        if what < 0.4:
            out[at] ^= 1 << draw.randrange(8)
        elif what < 0.6:
            number = draw.choice([0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 60_000_000])
            out[at : at + 4] = struct.pack(draw.choice([">I", "<I"]), number)
        elif what < 0.75:
            del out[at : at + draw.choice([1, 4, 100])]
        elif what < 0.85:
            out[at:at] = out[at : at + draw.choice([1, 8, 100])]
        else:
            del out[at:]
    return bytes(out)


def lines(data: bytes, draw: random.Random) -> bytes:
    """One line of JSON changed as such, or the bytes of the file."""
    rows = data.splitlines()
    if draw.random() < 0.25 or not rows:
        return some_bytes(data, draw)
    at = draw.randrange(len(rows))
    rows[at] = json_text(rows[at], draw).replace(b"\n", b" ")
    return b"\n".join(rows) + b"\n"


def safetensors(data: bytes, draw: random.Random) -> bytes:
    """The header changed as JSON, with its length set right or not, or the bytes of the file."""
    if draw.random() < 0.3:
        return some_bytes(data, draw)
    size = struct.unpack("<Q", data[:8])[0]
    header = json_text(data[8 : 8 + size], draw)
    length = len(header)
    if draw.random() < 0.1:
        length = draw.choice([0, 1, length + 1, 1 << 40, (1 << 64) - 1])
    return struct.pack("<Q", length) + header + data[8 + size :]


def arguments(fields: list[str], draw: random.Random) -> list[str]:
    """Some fields with values that few of them take."""
    found: list[str] = []
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(fields)
        value = draw.choice([*NUMBERS, *NUMBERS, *WORDS])
        found += [f"--{name}={value}"] if draw.random() < 0.5 else [f"--{name}", value]
    if draw.random() < 0.1:
        found.insert(
            draw.randrange(len(found) + 1), draw.choice(["--", "-x", "--nothing", "\udcff"])
        )
    return found
