"""Training data: text and images to rows of tokens and patches, from files on this machine.

Small text is held in memory: ``load`` gives tokenised training and held-out documents, ``Dataset(...).batch_at(step)``
the rows of a step as a pure function of (seed, step, rank), ``heldout`` the fixed rows that a run is scored on and
``NGram`` the model to beat.

Anything else is prepared first: ``python -m k31fn.data prepare SOURCE FOLDER`` writes stores that are mapped into
memory. ``Mixture([PackedDataset(open_store(folder), shape), ...], weights, batch_size).batch_at(step)`` reads them.
"""

from k31fn.data.heldout import HeldOut, heldout, trained_on
from k31fn.data.image_packing import Images, PackedDataset, Shape
from k31fn.data.mixture import Mixture
from k31fn.data.ngram import NGram
from k31fn.data.packing import Corpus, Dataset, Example, pieces
from k31fn.data.sources import Document, read, stdlib
from k31fn.data.splits import Config, Splits, load
from k31fn.data.store import Store, open_store
from k31fn.data.tokenizer import ByteTokenizer, Tokenizer
from k31fn.data.tokenizer_files import open_tokenizer

__all__ = [
    "ByteTokenizer",
    "Config",
    "Corpus",
    "Dataset",
    "Document",
    "Example",
    "HeldOut",
    "Images",
    "Mixture",
    "NGram",
    "PackedDataset",
    "Shape",
    "Splits",
    "Store",
    "Tokenizer",
    "heldout",
    "load",
    "open_store",
    "open_tokenizer",
    "pieces",
    "read",
    "stdlib",
    "trained_on",
]
