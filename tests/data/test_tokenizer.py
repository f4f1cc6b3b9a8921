import numpy as np
import torch

from k31fn.data import ByteTokenizer, Tokenizer

TOKENIZER = ByteTokenizer()


def test_round_trip():
    text = "def naïve():\n\treturn '☃'\x00"
    tokens = TOKENIZER.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert TOKENIZER.decode(tokens) == text
    assert TOKENIZER.decode(torch.from_numpy(tokens.astype(np.int64))) == text
    assert TOKENIZER.encode(text.encode()).tolist() == tokens.tolist()
    assert (TOKENIZER.vocab_size, TOKENIZER.end_token) == (257, 256)
    assert isinstance(TOKENIZER, Tokenizer)


def test_decode_never_fails():
    cut = list("☃".encode())[1:]
    assert TOKENIZER.decode([65, *cut, 66]) == "A��B"
    assert TOKENIZER.decode([65, 256, -100, 300, 66]) == "AB"
    assert TOKENIZER.decode([]) == ""
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a?b"
    assert TOKENIZER.decode_bytes(range(256)) == bytes(range(256))
