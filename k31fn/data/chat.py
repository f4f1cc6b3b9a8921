"""Conversations as tokens, in the chat format of Kimi K3, with the tokens that are to be learnt.

Four special tokens give the structure; names, attributes and contents are text, each encoded by
itself. What a user writes can never become a special token. A message is::

    <|open|>message role="user"<|sep|> CONTENT <|close|>message<|sep|><|end_of_msg|>

An answer (role ``assistant``) holds ``think`` if it has a ``reasoning_content``, ``response``, and
``tools`` if it has ``tool_calls``::

    <|open|>message role="assistant"<|sep|>
      <|open|>think<|sep|> REASONING <|close|>think<|sep|>
      <|open|>response<|sep|> CONTENT <|close|>response<|sep|>
      <|open|>tools<|sep|>
        <|open|>call tool="NAME" index="1"<|sep|>
          <|open|>argument key="KEY" type="string"<|sep|> VALUE <|close|>argument<|sep|>
        <|close|>call<|sep|>
      <|close|>tools<|sep|>
    <|close|>message<|sep|><|end_of_msg|>

without the spaces and line ends above. The result of a call (role ``tool``) has the attributes
``tool`` and ``index``, those of the call it answers: the one of its ``tool_call_id``. Learnt is
what a model writes: of an answer all behind its first ``<|open|>think<|sep|>`` or
``<|open|>response<|sep|>``, which a prompt ends with (:func:`prompt`), its ``<|end_of_msg|>``
included.

This is how public programs that serve K3 write it; the template that K3 is released with was not
seen. The declaration of tools is not part of it: put it into a system message. A field ``tools``
beside the messages is left out and counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from k31fn.data import media
from k31fn.data.images import Image
from k31fn.data.tokenizer import CHAT_NAMES, Tokenizer
from k31fn.data.tool_calls import Call, calls_of, result_attributes

__all__ = [
    "END_OF_ANSWER",
    "check_tokenizer",
    "encode",
    "prompt",
]

_OPEN, _CLOSE, _SEP, _END = CHAT_NAMES
END_OF_ANSWER = _CLOSE
"""The special token behind the text of an answer, from which a program that prints it reads no
further.
"""

# What this format can say. Another key is refused: what it meant would be lost in silence.
_ROLES = ("system", "user", "assistant", "tool")
_KEYS = {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id", "tool"}
# Names of the types of arguments; every other type, such as dict, is an "object".
_KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
}


class _MessagePiece(NamedTuple):
    """A part of a message: a special token by name, text, or an image, and whether it is learnt."""

    kind: str
    text: str
    learnt: bool


class _Conversation(NamedTuple):
    """Tokens of a conversation.

    Attributes:
        tokens: of all messages.
        learnt: whether each is part of an answer.
        ends: number of tokens up to the end of each message.
        answers: whether each message is an answer.
    """

    tokens: np.ndarray
    learnt: np.ndarray
    ends: list[int]
    answers: list[bool]

    def fitting(self, length: int) -> int:
        """How many messages make the longest start of at most ``length`` tokens that ends in an
        answer; 0: none.
        """
        count = 0
        for number, (end, is_answer) in enumerate(zip(self.ends, self.answers, strict=True), 1):
            if is_answer and end <= length:
                count = number
        return count

    def cut(self, count: int) -> _Conversation:
        """The first messages."""
        stop = self.ends[count - 1] if count else 0
        return _Conversation(
            self.tokens[:stop], self.learnt[:stop], self.ends[:count], self.answers[:count]
        )


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer that lacks one of the special tokens.

    Raises:
        ValueError: names those that are missing.
    """
    missing = [name for name in CHAT_NAMES if name not in tokenizer.special_tokens]
    if missing:
        raise ValueError(
            f"the tokenizer has no {', '.join(missing)}, which conversations need; use another, "
            "such as 'bytes+chat'"
        )


def encode(
    messages: Any,
    images: Sequence[Image],
    tokenizer: Tokenizer,
    name: str,
    *,
    columnar: bool = False,
) -> _Conversation:
    """The tokens of a conversation; its images, in order, stand where its messages have parts of
    type ``image``. ``columnar`` says that it comes from a table (:mod:`k31fn.data.tool_calls`).

    Raises:
        ValueError: the messages are not such a conversation, or have no answer, or another number
            of images; begins with ``name``.
    """
    left = list(images)[::-1]  # taken from the end, in their order
    tokens: list[np.ndarray] = []
    learnt: list[bool] = []
    ends: list[int] = []
    for number, pieces in enumerate(_render(messages, name, columnar=columnar)):
        for piece in pieces:
            try:
                piece.text.encode()
            except UnicodeEncodeError as e:  # half a character, which would become a "?"
                raise ValueError(
                    f"{name}: messages[{number}] is not valid Unicode: {e.reason}"
                ) from e
            if piece.kind == "image" and not left:
                raise ValueError(
                    f"{name}: messages have more images than the {len(images)} of the record"
                )
            part = _encode(piece, left, tokenizer, name)
            tokens.append(part)
            learnt += [piece.learnt] * len(part)
        ends.append(len(learnt))
    if left:
        raise ValueError(
            f"{name}: the record has {len(images)} images, its messages {len(images) - len(left)}"
        )
    answers = [message["role"] == "assistant" for message in messages]
    if not any(answers):
        raise ValueError(
            f"{name}: no message has the role 'assistant': there is nothing to learn from"
        )
    return _Conversation(np.concatenate(tokens), np.array(learnt), ends, answers)


def prompt(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens after which a model answers a user's message."""
    check_tokenizer(tokenizer)
    (question,) = _render([{"role": "user", "content": text}], "prompt")
    pieces = [*question, *_open("message", {"role": "assistant"}), *_open("response")]
    # Piece by piece, as in training: a token never spans two of them.
    return np.concatenate([_encode(piece, [], tokenizer, "prompt") for piece in pieces])


def _render(messages: Any, name: str, *, columnar: bool = False) -> list[list[_MessagePiece]]:
    """The pieces of each message.

    Raises:
        ValueError: as :func:`encode`.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{name}: messages must be a list of at least one message, not {str(messages)[:60]!r}"
        )
    rendered: list[list[_MessagePiece]] = []
    calls: list[Call] = []  # of the last answer
    answered: set[int] = set()  # which of them have their result
    for number, message in enumerate(messages):
        where = f"{name}: messages[{number}]"
        _check(message, where)
        role = message["role"]
        attributes = {"role": role}
        # Of a tool's result the name is that of the tool, which has an attribute of its own.
        if message.get("name") and role != "tool":
            attributes["name"] = message["name"]
        if role == "assistant":
            calls = calls_of(message, where, columnar=columnar)
            body = _answer(message, calls, where)
            answered = set()
        else:
            body = _content(message.get("content"), False, where)
        if role == "tool":
            attributes |= result_attributes(message, calls, answered, where)
        learnt = role == "assistant"
        end = _MessagePiece("special", _END, learnt)
        # What opens a message is the prompt's, also of an answer: a model never writes it.
        rendered.append([*_open("message", attributes), *body, *_close("message", learnt), end])
    return rendered


def _answer(message: Mapping[str, Any], calls: Sequence[Call], where: str) -> list[_MessagePiece]:
    """The elements inside of an answer's message."""
    content = _content(message.get("content"), True, where)
    if any(piece.kind == "image" for piece in content):
        raise ValueError(f"{where}: an answer holds an image; a model writes text only")
    if not content and not calls:
        raise ValueError(f"{where}: an answer without content and tool_calls; leave it out")
    # The first element is opened by the prompt (:func:`prompt`): behind a thought the model opens
    # the response itself.
    thought = message.get("reasoning_content")
    body: list[_MessagePiece] = []
    if thought is not None:
        body += [*_open("think"), *_text(thought, True), *_close("think", True)]
    body += [*_open("response", learnt=bool(body)), *content, *_close("response", True)]
    if calls:
        body += _open("tools", learnt=True)
        for index, call in enumerate(calls, 1):
            body += _call(call, index)
        body += _close("tools", True)
    return body


def _call(call: Call, index: int) -> list[_MessagePiece]:
    pieces = _open("call", {"tool": call.tool, "index": str(index)}, learnt=True)
    for key, value in call.arguments.items():
        # A string stands as it is, without quotes: its type says that it is one.
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        kind = _KINDS.get(type(value), "object")
        pieces += _open("argument", {"key": key, "type": kind}, learnt=True)
        pieces += [*_text(text, True), *_close("argument", True)]
    return pieces + _close("call", True)


def _check(message: Any, where: str) -> None:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise ValueError(f"{where}: role {str(role)[:60]!r} must be one of {list(_ROLES)}")
    # None is what a table of records has where a field is absent.
    present = {name for name, value in message.items() if value is not None}
    unknown = sorted(present - _KEYS)
    if unknown:
        raise ValueError(
            f"{where} has {unknown}, which this format cannot express; known: {sorted(_KEYS)}"
        )
    for name in ("name", "reasoning_content"):
        if name in present and not isinstance(message[name], str):
            raise ValueError(f"{where}: {name} must be text, not a {type(message[name]).__name__}")
    if message["role"] != "assistant" and (
        message.get("tool_calls") or message.get("reasoning_content")
    ):
        raise ValueError(
            f"{where}: only an answer (role 'assistant') has tool_calls and reasoning_content"
        )


def _content(content: Any, learnt: bool, where: str) -> list[_MessagePiece]:
    """The pieces of text, or of a list of parts with their type."""
    if content is None or isinstance(content, str):
        return _text(content or "", learnt)
    pieces: list[_MessagePiece] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image", "image_url"):
            pieces.append(_MessagePiece("image", "", learnt))
        elif kind == "text" and isinstance(part.get("text"), str):
            pieces += _text(part["text"], learnt)
        else:
            raise ValueError(
                f"{where}: content is text, or a list of parts of type 'text' and 'image', not "
                f"{part!r}"
            )
    return pieces


def _text(text: str, learnt: bool) -> list[_MessagePiece]:
    # An empty text has no tokens, so no piece either: contents may be empty.
    return [_MessagePiece("text", text, learnt)] if text else []


def _open(
    tag: str, attributes: Mapping[str, str] | None = None, *, learnt: bool = False
) -> list[_MessagePiece]:
    pieces = [_MessagePiece("special", _OPEN, learnt), *_text(tag, learnt)]
    for key, value in (attributes or {}).items():
        # Only what would end the attribute is escaped, and the mark of an escape itself.
        escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
        for text in (f" {key}", '="', escaped, '"'):
            pieces += _text(text, learnt)
    return [*pieces, _MessagePiece("special", _SEP, learnt)]


def _close(tag: str, learnt: bool) -> list[_MessagePiece]:
    return [
        _MessagePiece("special", _CLOSE, learnt),
        _MessagePiece("text", tag, learnt),
        _MessagePiece("special", _SEP, learnt),
    ]


def _encode(piece: _MessagePiece, left: list[Image], tokenizer: Tokenizer, name: str) -> np.ndarray:
    if piece.kind == "special":
        return np.array([tokenizer.special_tokens[piece.text]], np.int64)
    if piece.kind == "image":
        return media.encode(media.PLACEHOLDER, [left.pop()], tokenizer, name)
    return tokenizer.encode(piece.text).astype(np.int64)
