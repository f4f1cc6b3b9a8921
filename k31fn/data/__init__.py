"""Training data: text to rows of tokens, from files on this machine.

``load`` gives tokenised training and held-out documents, ``Dataset(...).batch_at(step)`` the rows of a step as a pure
function of (seed, step, rank), ``heldout`` the fixed rows that a run is scored on and ``NGram`` the model to beat.
"""

from k31fn.data.heldout import HeldOut, heldout, trained_on
from k31fn.data.ngram import NGram
from k31fn.data.packing import Corpus, Dataset, Example, pieces
from k31fn.data.sources import Document, read, stdlib
from k31fn.data.splits import Config, Splits, load
from k31fn.data.tokenizer import ByteTokenizer, Tokenizer

__all__ = [
    "ByteTokenizer",
    "Config",
    "Corpus",
    "Dataset",
    "Document",
    "Example",
    "HeldOut",
    "NGram",
    "Splits",
    "Tokenizer",
    "heldout",
    "load",
    "pieces",
    "read",
    "stdlib",
    "trained_on",
]
