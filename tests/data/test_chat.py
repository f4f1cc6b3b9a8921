"""Conversations: their format, what of them is learnt, and that they reach rows whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples import docstrings
from k31fn.data import ByteTokenizer, chat, heldout_rows, images, open_store, open_tokenizer, stdlib
from k31fn.data.__main__ import main
from k31fn.data.image_packing import PackedDataset, Shape, collate
from k31fn.data.prepare import Config, prepare
from tests.data.pictures import png

TOKENIZER = ByteTokenizer(media=True, chat=True)
NAMES = {i: name for name, i in TOKENIZER.special_tokens.items()}


def ask(*texts: str) -> list[dict[str, Any]]:
    """Questions and answers in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def shown(tokens: Any) -> str:
    """Tokens with special ones by name."""
    return "".join(NAMES[t] if t in NAMES else chr(t) for t in np.asarray(tokens).tolist())


def encode(messages: Any, pictures: Any = ()) -> chat._Conversation:
    return chat.encode(messages, pictures, TOKENIZER, "x.jsonl:7")


TOOLS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'a "b" <|close|>', "name": 'O"N&l'},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"function": {"name": "find", "arguments": '{"city": "Ü", "days": 2, "all": true}'}}
        ],
    },
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


def test_the_format():
    """Written out by hand."""
    found = encode(TOOLS)
    text = re.sub(
        r"\s*\n\s*",
        "",
        """
        <|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|><|end_of_msg|>
        <|open|>message role="user" name="O&quot;N&amp;l"<|sep|>a "b" <|close|>
        <|close|>message<|sep|><|end_of_msg|>
        <|open|>message role="assistant"<|sep|><|open|>think<|sep|>hm<|close|>think<|sep|>
        <|open|>response<|sep|><|close|>response<|sep|>
        <|open|>tools<|sep|><|open|>call tool="find" index="1"<|sep|>
        <|open|>argument key="city" type="string"<|sep|>Ã\x9c<|close|>argument<|sep|>
        <|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>
        <|open|>argument key="all" type="boolean"<|sep|>true<|close|>argument<|sep|>
        <|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>
        <|open|>message role="tool" tool="find" index="1"<|sep|>rain
        <|close|>message<|sep|><|end_of_msg|>
        <|open|>message role="assistant"<|sep|>
        <|open|>response<|sep|>It rains.<|close|>response<|sep|>
        <|close|>message<|sep|><|end_of_msg|>
        """,
    )
    assert shown(found.tokens) == text
    written = found.tokens[found.tokens >= 257]
    assert (written == TOKENIZER.special_tokens["<|close|>"]).sum() == text.count(
        "<|close|>"
    ) - 1  # one is the user's
    assert found.answers == [False, False, True, False, True]
    assert [found.ends[-1], len(found.learnt)] == [len(found.tokens)] * 2


def test_what_is_learnt():
    """By a regular expression over the text: from the end of a prompt to the end of the message."""
    found = encode(TOOLS)
    text, at, expected = shown(found.tokens), 0, []
    marks = np.zeros(len(text), bool)
    for answer in re.finditer(
        r'role="assistant"<\|sep\|><\|open\|>\w+<\|sep\|>(.*?<\|end_of_msg\|>)', text
    ):
        marks[slice(*answer.span(1))] = True
    for token in found.tokens.tolist():
        expected.append(bool(marks[at]))
        at += len(NAMES.get(token, "x"))
    assert found.learnt.tolist() == expected
    assert 0 < found.learnt.sum() < len(found.learnt)


def test_a_prompt_is_what_comes_before_an_answer():
    found = encode(ask("What?", "That."))
    prompt = chat.prompt("What?", TOKENIZER)
    assert np.array_equal(found.tokens[: len(prompt)], prompt)
    assert found.learnt.tolist() == [i >= len(prompt) for i in range(len(found.tokens))]


def test_images_stand_where_the_messages_have_them():
    picture = images.decode(png(56, 28), "p", images.Config())
    parts = [{"type": "text", "text": "see "}, {"type": "image"}]
    found = encode([{"role": "user", "content": parts}, *ask("", "ok")[1:]], [picture])
    assert (
        "see <|media_begin|>image "
        "56x28<|media_content|><|media_pad|><|media_pad|><|media_end|><|close|>"
        in shown(found.tokens)
    )


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages must be a list of at least one message"),
        ("hello", "messages must be a list"),
        ([{"role": "bot", "content": "x"}], r"messages\[0\]: role 'bot' must be one of"),
        (ask("x", ""), r"messages\[1\]: an answer without content and tool_calls"),
        (ask("x"), "no message has the role 'assistant'"),
        ([{"role": "user", "content": 3}], r"messages\[0\]: content is text, or a list of parts"),
        ([*ask("x", "y"), {"role": "tool", "content": "z"}], r"messages\[2\] answers no call"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}],
            "arguments of a call are not JSON",
        ),
        ([{"role": "user", "content": "x", "audio": "y"}], r"messages\[0\] has \['audio'\]"),
        (
            [{"role": "user", "content": [{"type": "image"}]}, *ask("", "y")[1:]],
            "more images than the 0",
        ),
    ],
)
def test_bad_conversations_are_named(messages: Any, complaint: str):
    with pytest.raises(ValueError, match=r"^x\.jsonl:7: .*".replace(": .*", "") + ".*" + complaint):
        encode(messages)


# -------------------------------------------------------------------------------------------- calls
def call(name: str, identity: str | None = None, **arguments: Any) -> dict[str, Any]:
    return {"id": identity, "function": {"name": name, "arguments": json.dumps(arguments)}}


def calling(*calls: Any, **last: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": list(calls)},
        *([{"role": "tool", "content": "done", **last}] if last else []),
    ]


def headers(messages: list[dict[str, Any]]) -> list[str]:
    """The attributes of each result."""
    return re.findall(r'message role="tool" ([^<]*)<', shown(encode(messages).tokens))


def test_a_result_is_of_the_call_with_its_id():
    """Two results in the other order: each has tool and index of its own call."""
    both = calling(call("f", "a"), call("g", "b"))
    for ids, expected in (
        ("ba", ['tool="g" index="2"', 'tool="f" index="1"']),
        ("ab", ['tool="f" index="1"', 'tool="g" index="2"']),
    ):
        results = [{"role": "tool", "content": "r", "tool_call_id": i} for i in ids]
        assert headers([*both, *results]) == expected
    # Without ids: by the name of the tool, else by the order.
    unnamed = calling(call("f"), call("g"), call("f"))
    results = [{"role": "tool", "content": "r", "name": name} for name in ("g", "f", "f")]
    assert headers([*unnamed, *results]) == [
        'tool="g" index="2"',
        'tool="f" index="1"',
        'tool="f" index="3"',
    ]
    plain = {"role": "tool", "content": "r"}
    assert headers([*unnamed, results[0], plain, plain]) == [
        'tool="g" index="2"',
        'tool="f" index="1"',
        'tool="f" index="3"',
    ]
    # A numeric id is as good as its text.
    assert headers(calling(call("f", "1"), tool_call_id=1)) == ['tool="f" index="1"']
    # And a result whose call was cut off has only its name.
    alone = [{"role": "tool", "content": "r", "name": "f"}, *ask("", "y")[1:]]
    assert headers(alone) == ['tool="f" index="1"']


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (
            calling(call("f", "a"), tool_call_id="z"),
            r"messages\[2\]: tool_call_id='z' is of no call of the answer before it, whose ids "
            r"are \['a'\]",
        ),
        (
            calling(call("f", "a"), tool_call_id="a", name="g"),
            r"messages\[2\] is a result of 'g', the call of its id 'a' is of 'f'",
        ),
        (calling(call("f", "a"), call("g", "a")), r"messages\[1\]: two calls have one id"),
        (calling(call("f"), name="g"), r"messages\[2\] is a result of 'g'; no call of that"),
        (
            [*calling(call("f", "a"), tool_call_id="a"), calling(0, tool_call_id="a")[2]],
            r"messages\[3\] is a second result of the call of id 'a'",
        ),
        ([*calling(call("f"), name="f"), calling(0, name="f")[2]], r"messages\[3\] is a result"),
        (calling({"function": "f"}), r"messages\[1\]: a call needs a name"),
        (calling(call("f"), name=["f"]), r"messages\[2\]: name must be text, not a list"),
        ([{"role": "assistant", "tool_calls": {"name": "f"}}], "tool_calls must be a list"),
        (
            [{"role": "assistant", "content": "x", "reasoning_content": ["hm"]}],
            "reasoning_content must be text, not a list",
        ),
        (
            calling({"name": "f", "arguments": '{"a": 1, "a": 2}'}),
            "arguments of a call are not JSON: .* a is given twice",
        ),
        (calling({"name": "f", "arguments": "[" * 5000}), "are not JSON: .* 100 deep"),
        (ask("x\ud800", "y"), r"messages\[0\] is not valid Unicode"),
    ],
)
def test_calls_and_results_that_do_not_fit(messages: Any, complaint: str):
    with pytest.raises(ValueError, match=rf"^x\.jsonl:7.*{complaint}"):
        encode(messages)


@pytest.mark.parametrize("arguments", ["", " \n", None, "null", "{}", {}])
def test_a_call_without_arguments(arguments: Any):
    found = encode(calling({"name": "f", "arguments": arguments}))
    assert '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>' in shown(found.tokens)


def test_a_tokenizer_without_the_special_tokens():
    with pytest.raises(
        ValueError, match=r"no <\|open\|>, <\|close\|>, <\|sep\|>, <\|end_of_msg\|>"
    ):
        chat.prompt("x", ByteTokenizer())
    assert open_tokenizer("bytes+media+chat") == TOKENIZER
    assert open_tokenizer("bytes+chat").vocab_size == 261


# ------------------------------------------------------------------------------------------- stores
def stored(tmp_path: Path, talks: list[Any], **changes: Any) -> Path:
    lines = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    cfg = Config(
        str(tmp_path / "a.jsonl"),
        "bytes+media+chat",
        chat="messages",
        heldout_fraction=0.0,
        **changes,
    )
    prepare(cfg, tmp_path / "out")
    return tmp_path / "out" / "train"


TALKS = [
    ask(f"q{i}" * (1 + i % 5), f"a{i}" * (1 + i % 7), "more?", "yes " * (i % 4) + "!")
    for i in range(12)
]


def test_rows_have_labels_of_answers_only(tmp_path: Path):
    store = open_store(stored(tmp_path, TALKS))
    dataset = PackedDataset(store, Shape(600))
    batch = collate([dataset.row(i) for i in range(dataset.num_rows)], dataset.shape, store)
    learnt = []
    for tokens, labels, ids in zip(batch.tokens, batch.labels, batch.segments.ids, strict=True):
        for document in ids[ids > 0].unique():
            own, target = tokens[ids == document], labels[ids == document]
            marks = target != -100
            assert torch.equal(target[marks], own[1:][marks[:-1]])
            assert target[-1] == -100
            learnt.append(shown(target[marks]))
        assert (labels[ids == 0] == -100).all()
    tail = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    assert sorted(learnt) == sorted(
        f"{a['content']}{tail}{b['content']}{tail}" for _, a, _, b in TALKS
    )


def test_held_out_are_the_bytes_of_answers(tmp_path: Path):
    dataset = PackedDataset(open_store(stored(tmp_path, TALKS)), Shape(600))
    scored = heldout_rows([dataset], TOKENIZER)
    answers = [m["content"] for t in TALKS for m in t if m["role"] == "assistant"]
    assert scored.num_bytes == sum(map(len, answers))
    assert sorted(TOKENIZER.decode(scored.rows.labels)) == sorted("".join(answers))


def test_long_conversations_end_with_an_answer_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    talk = ask("a", "b", "c" * 30, "d", "e")
    whole = encode(talk)
    for length, kept in (
        (whole.ends[3], 4),
        (whole.ends[3] - 1, 2),
        (whole.ends[1], 2),
        (whole.ends[1] - 1, 0),
    ):
        assert whole.fitting(length) == kept
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": t}) + "\n" for t in (talk, ask("x" * 99, "y")))
    )
    arguments = [
        "prepare",
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "out"),
        "--chat",
        "--tokenizer",
        "bytes+chat",
    ]
    assert (
        main(
            [*arguments, "--max-length", str(whole.ends[1] + 1), "--heldout", "0", "--workers", "1"]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "documents left out: 1 length" in said
    assert "1 conversations shortened, 5 messages dropped" in said
    store = open_store(tmp_path / "out" / "train")
    assert store.lengths.tolist() == [whole.ends[1]]
    with pytest.raises(
        ValueError,
        match=rf"conversation of {whole.ends[1]} tokens .* prepare the data with --max-length 9",
    ):
        PackedDataset(store, Shape(9))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"messages": [{"role": "user"', "the line is not JSON"),
        ('{"text": "x"}', r"no field 'messages'; it has \['text'\]"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message has the role 'assistant'"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, complaint: str):
    good = json.dumps({"messages": ask("x", "y")})
    path = tmp_path / "talk.jsonl"
    path.write_text(f"{good}\n\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=rf"talk\.jsonl:3: {complaint}"):
        prepare(Config(str(path), "bytes+chat", chat="messages"), tmp_path / "out")
    path.with_suffix(".txt").write_text("x")
    with pytest.raises(ValueError, match=r"talk\.txt is a text file"):
        prepare(
            Config(str(path.with_suffix(".txt")), "bytes+chat", chat="messages"), tmp_path / "other"
        )


def test_a_table_teaches_what_lines_do_or_is_refused(tmp_path: Path):
    """A column of objects gives each call the arguments of all others."""
    pa = pytest.importorskip("pyarrow", reason="extra `data` not installed")
    import pyarrow.parquet as pq

    def prepared(name: str, talks: list[Any]) -> list[str]:
        source = tmp_path / name
        if source.suffix == ".jsonl":
            source.write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
        else:
            pq.write_table(pa.Table.from_pylist([{"messages": t} for t in talks]), source)
        cfg = Config(str(source), "bytes+media+chat", chat="messages", heldout_fraction=0.0)
        prepare(cfg, tmp_path / f"{name}.out")
        store = open_store(tmp_path / f"{name}.out" / "train")
        return [shown(store.read(i).tokens) for i in range(store.num_documents)]

    text = [calling(call("weather", city="Oslo")), calling(call("add", b=3, a=2))]
    lines = prepared("a.jsonl", text)
    assert 'key="city" type="string"<|sep|>Oslo' in lines[0]
    assert '"null"' not in "".join(lines)
    assert prepared("a.parquet", text) == lines
    plain = [
        calling({"name": "weather", "arguments": {"city": "Oslo"}}),
        calling({"name": "add", "arguments": {"b": 3, "a": 2}}),
    ]
    assert prepared("b.jsonl", plain) == lines
    with pytest.raises(
        ValueError, match=r"b\.parquet:0:0: messages\[1\]: arguments .* store them as JSON text"
    ):
        prepared("b.parquet", plain)


@pytest.mark.parametrize("workers", [1, 2])
def test_one_bad_conversation_in_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
):
    """It ends the preparation with its line, or is left out and counted."""
    good = json.dumps({"messages": ask("x", "y")})
    lines = [good] * 100
    lines[40] = json.dumps({"messages": ask("x")})
    lines[60] = '{"messages": ['
    lines[80] = '{"text": "x"}'
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(lines))
    call = ["prepare", str(path), "--chat", "--tokenizer", "bytes+chat", "--workers", str(workers)]
    assert main([*call[:2], str(tmp_path / "strict"), *call[2:]]) == 2
    assert "talk.jsonl:41: no message has the role 'assistant'" in capsys.readouterr().err
    assert main([*call[:2], str(tmp_path / "out"), *call[2:], "--on-bad", "skip"]) == 0
    said = capsys.readouterr().out
    assert "97 documents" in said
    assert "documents left out: 3 conversation" in said


def test_tools_beside_messages_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "talk.jsonl"
    talk = {"messages": ask("x", "y")}
    rows = [talk, talk | {"tools": [{"type": "function"}]}, talk | {"tools": []}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = str(tmp_path / "out")
    assert main(["prepare", str(path), out, "--chat", "--tokenizer", "bytes+chat"]) == 0
    said = capsys.readouterr().out
    assert "left out: the field 'tools' of 1 conversations" in said


def test_the_example_asks_about_the_standard_library(monkeypatch: pytest.MonkeyPatch):
    some = [d for d in stdlib() if d.name in ("queue.py", "_strptime.py", "threading.py")]
    monkeypatch.setattr(docstrings.data, "stdlib", lambda: some)
    found = {}
    for record in docstrings.conversations():
        question, answer = record["messages"][:2]
        found[question["content"]] = answer["content"]
    assert found["What does queue.Queue.get do?"] == "Remove and return an item from the queue."
    assert not any("_strptime" in question for question in found)
    assert len(found) > 20
