"""The calls of tools in an answer, and which call a result is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from k31fn import strict_json

__all__ = ["Call", "calls_of", "result_attributes"]


class Call(NamedTuple):
    """A call: the name of the tool, its arguments by name, and the id that its result gives;
    "": none.
    """

    tool: str
    arguments: dict[str, Any]
    id: str = ""


def calls_of(message: Mapping[str, Any], where: str, *, columnar: bool = False) -> list[Call]:
    """The calls of an answer.

    Args:
        message: of the role ``assistant``.
        where: its place, for errors.
        columnar: whether it comes from a table. There an object has the fields of all objects of
            its column, so that of arguments it is not known which a call has.

    Raises:
        ValueError: a call without a name, arguments that are neither an object nor the JSON of one,
            or two calls of one id.
    """
    given = message.get("tool_calls") or []
    if not isinstance(given, list):
        raise ValueError(f"{where}: tool_calls must be a list, not {str(given)[:60]!r}")
    calls = [_call(call, where, columnar) for call in given]
    ids = [call.id for call in calls if call.id]
    if len(set(ids)) < len(ids):
        raise ValueError(f"{where}: two calls have one id: {ids}; which one a result is of?")
    return calls


def _call(call: Any, where: str, columnar: bool) -> Call:
    # OpenAI's form has a "function" with arguments as a JSON string; a plain object will do.
    function = (call.get("function") or call) if isinstance(call, dict) else {}
    if not isinstance(function, dict):
        function = {}
    name = function.get("name")
    arguments = function.get("arguments")
    if columnar and isinstance(arguments, dict):
        raise ValueError(
            f"{where}: arguments of a call are an object in a table, which gives each call the "
            "arguments of all others; store them as JSON text, or use .jsonl"
        )
    if isinstance(arguments, str):
        arguments = _arguments_of_text(arguments, where)
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError(
            f"{where}: a call needs a name and arguments by name, not {str(call)[:60]!r}"
        )
    identity = call.get("id")
    return Call(name, arguments, "" if identity is None else str(identity))


def _arguments_of_text(text: str, where: str) -> Any:
    if not text.strip():
        return None  # as some programs write a call without any
    try:
        return strict_json.parse(text, "the text")
    except ValueError as error:
        raise ValueError(
            f"{where}: arguments of a call are not JSON: {text[:60]!r}; {error}"
        ) from error


def result_attributes(
    message: Mapping[str, Any], calls: Sequence[Call], answered: set[int], where: str
) -> dict[str, str]:
    """Tool and index of the call that a result is of: the one with its ``tool_call_id``; without
    one the first of its tool, or of any, that has no result yet.

    Args:
        message: of the role ``tool``.
        calls: of the answer before it.
        answered: indices, from 1, of the calls that have their result; gets one more.
        where: place of the message, for errors.

    Raises:
        ValueError: there is no such call, it has its result, or it is one of another tool.
    """
    tool = message.get("tool") or message.get("name") or ""
    identity = message.get("tool_call_id")
    if not isinstance(tool, str):
        raise ValueError(f"{where}: the name of a tool must be text, not {str(tool)[:60]!r}")
    if not calls and tool:
        # The call is not part of the conversation, which then has the results' own order.
        answered.add(len(answered) + 1)
        return {"tool": tool, "index": str(len(answered))}
    for index, call in enumerate(calls, 1):
        fits = call.id == str(identity) if identity else index not in answered
        if not fits or (not identity and tool and call.tool != tool):
            continue
        if index in answered:
            raise ValueError(f"{where} is a second result of the call of id {identity!r}")
        if tool and call.tool != tool:
            raise ValueError(
                f"{where} is a result of {tool!r}, the call of its id {identity!r} is of "
                f"{call.tool!r}"
            )
        answered.add(index)
        return {"tool": call.tool, "index": str(index)}
    if identity:
        known = [call.id for call in calls]
        raise ValueError(
            f"{where}: tool_call_id={identity!r} is of no call of the answer before it, whose ids "
            f"are {known}"
        )
    if calls:
        raise ValueError(
            f"{where} is a result of {tool or 'a call'!r}; no call of that in the answer before it "
            "is without a result"
        )
    raise ValueError(
        f"{where} answers no call: give it a 'name', or put it behind the calls it answers"
    )
