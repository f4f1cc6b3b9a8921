"""Training data: text and images to rows of tokens and patches, from files on this machine.

Small text is held in memory: ``load`` gives tokenised training and held-out documents,
``Dataset(...).batch_at(step)`` the rows of a step as a pure function of (seed, step, rank),
``heldout`` the fixed rows that a run is scored on and ``NGram`` the model to beat.

Anything else is prepared first: ``python -m k31fn.data prepare SOURCE FOLDER`` writes stores that
are mapped into memory. ``open_prepared(Prepared(...), ...)`` gives a ``Mixture`` to train on, with
a ``batch_at(step)`` like that of a ``Dataset``, and ``open_heldout`` rows to score. A
``Curriculum`` is several of either, of one length of rows each.
"""

from k31fn.data.curriculum import Curriculum, Rows
from k31fn.data.heldout import HeldOut, heldout, heldout_rows, trained_on
from k31fn.data.mixture import Mixture
from k31fn.data.ngram import NGram
from k31fn.data.packing import Corpus, Dataset, Example, pieces
from k31fn.data.prepared import Prepared, open_heldout, open_prepared
from k31fn.data.sources import read, stdlib
from k31fn.data.splits import Config, load
from k31fn.data.store import open_store
from k31fn.data.tokenizer import ByteTokenizer, Tokenizer
from k31fn.data.tokenizer_files import open_tokenizer

__all__ = [
    "ByteTokenizer",
    "Config",
    "Corpus",
    "Curriculum",
    "Dataset",
    "Example",
    "HeldOut",
    "Mixture",
    "NGram",
    "Prepared",
    "Rows",
    "Tokenizer",
    "heldout",
    "heldout_rows",
    "load",
    "open_heldout",
    "open_prepared",
    "open_store",
    "open_tokenizer",
    "pieces",
    "read",
    "stdlib",
    "trained_on",
]


def __dir__() -> list[str]:
    return __all__
