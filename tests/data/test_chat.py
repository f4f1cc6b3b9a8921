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
        ('{"messages": [{"role": "user"', "the line is not UTF-8 JSON"),
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
