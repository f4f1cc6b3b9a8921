"""Sources to stores: tokenises text and cuts images into patches, on many cores, and goes on where
it was stopped.

Each unit of a source (:mod:`k31fn.data.records`) becomes one shard of the training store and one of
the held-out store. What a shard holds depends on its unit and the settings only, so it does not
matter how many processes there are, in which order they work or how often they are killed. A
document goes to the held-out store by the hash of its content: equal documents go the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k31fn import regular_files, strict_json
from k31fn.data import chat, media, plan, shard_writer, store
from k31fn.data.images import Config as ImageConfig
from k31fn.data.images import Image, ImageError, decode
from k31fn.data.records import Record, Unit, position, read_unit, units
from k31fn.data.tokenizer import Tokenizer, fingerprint
from k31fn.data.tokenizer_files import open_tokenizer

__all__ = ["SPLITS", "Config", "PrepareProgress", "prepare"]

SPLITS = ("train", "heldout")
_DONE = "counts.json"  # what a shard holds; written last, so it says that the shard is whole
_SKIPPED = "skipped_"  # how names of counts begin that are of documents left out
_UNREAD = "unread_"  # and those of fields
_PATIENCE = 0.5  # seconds between reports of progress


@dataclass(frozen=True)
class Config:
    """What to prepare, and how.

    Attributes:
        source: a file or folder of this machine (:mod:`k31fn.data.records`).
        tokenizer: as :func:`k31fn.data.tokenizer_files.open_tokenizer` takes it.
        end: the name of the token that ends a document; "": the tokenizer's own.
        text: the field of records that holds the text.
        images: the field that holds the images; "": none.
        chat: the field that holds messages, in place of ``text``: records are conversations, of
            which only answers are learnt (:mod:`k31fn.data.chat`); "": they are text.
        max_length: most tokens of a conversation; a longer one keeps the messages up to the last
            answer that fits, and is left out if none does. 0: any.
        suffixes: files of a folder that are read.
        heldout_fraction: of the documents, about.
        image: limits of images, and what a bad image, conversation or line does (``on_bad``).
    """

    source: str
    tokenizer: str = "bytes"
    end: str = ""
    text: str = "text"
    images: str = ""
    chat: str = ""
    max_length: int = 0
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet")
    heldout_fraction: float = 0.05
    image: ImageConfig = field(default_factory=ImageConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.heldout_fraction < 1:
            raise ValueError(
                f"heldout_fraction={self.heldout_fraction} must be in [0, 1), such as 0.05"
            )
        if self.max_length < 0 or (self.max_length and not self.chat):
            raise ValueError(
                f"max_length={self.max_length} must be at least 0, and is for conversations "
                "(chat) only"
            )


class PrepareProgress(NamedTuple):
    """How far it is: shards done of all, and what they hold."""

    done: int
    total: int
    counts: Counter[str]


class _PrepareResult(NamedTuple):
    """What the stores hold, and how many documents were left out, by the fault of their image or as
    too long, or as unreadable; how many conversations had a field that is not read, and how many
    files of the source were of another suffix.

    Of conversations ``counts`` also has those ``shortened``, the messages ``dropped`` of them and
    of those left out, and the tokens ``learnt``.
    """

    counts: Counter[str]
    skipped: Counter[str]
    unread: Counter[str]
    others: Counter[str]


def prepare(
    cfg: Config,
    folder: str | Path,
    *,
    workers: int = 1,
    report: Callable[[PrepareProgress], None] | None = None,
) -> _PrepareResult:
    """Writes the stores ``folder/train`` and ``folder/heldout``.

    Shards that are there are kept, so calling it again after a failure does what is left. It is
    finished when the two ``index.json`` are there.

    Args:
        cfg: what to prepare.
        folder: new, or that of an earlier call with the same settings.
        workers: processes; 1 works in this one.
        report: is called as shards are done, and now and then.

    Raises:
        ValueError: the source cannot be read, a record or an image is bad (and ``cfg.image.on_bad``
            says refuse), there is no document, the folder cannot be made, or it was prepared with
            other settings or from other files (:mod:`k31fn.data.plan`).
        OSError: it cannot be written.
    """
    root = regular_files.path(folder, "folder")
    others: Counter[str] = Counter()
    work = units(cfg.source, cfg.suffixes, others)
    tokenizer = open_tokenizer(cfg.tokenizer, end=cfg.end)
    if cfg.images:
        media.media_tokens(tokenizer)  # or a clear error before any work
    if cfg.chat:
        chat.check_tokenizer(tokenizer)
    files = plan.keep_plan(root, cfg, work, tokenizer)
    names = [f"shard-{number:06}" for number in range(len(work))]
    counts: Counter[str] = Counter()
    done = 0
    for finished in _work(cfg, root, list(zip(names, work, strict=True)), max(1, workers)):
        done += len(finished)
        for name in finished:
            counts.update(strict_json.load_object(root / name / _DONE))
        if report:
            report(PrepareProgress(done, len(work), counts))
    # Also while it was read: half of one file and half of another would be no data set.
    plan.check_unchanged(files, f"{root} is being prepared")
    if not counts["documents"]:
        left_out = sum(count for name, count in counts.items() if name.startswith(_SKIPPED))
        raise ValueError(
            f"source {cfg.source!r} holds no document to learn from: all of it is empty, or left "
            f"out ({left_out} records)"
        )
    # Last, since a store without its index is none: nobody trains on half of the data by mistake.
    for split in SPLITS:
        _write_index(root / split, split, names, cfg, tokenizer)
    result = _PrepareResult(Counter(), Counter(), Counter(), others)
    for name, count in counts.items():
        if name.startswith(_SKIPPED):
            result.skipped[name.removeprefix(_SKIPPED)] = count
        elif name.startswith(_UNREAD):
            result.unread[name.removeprefix(_UNREAD)] = count
        else:
            result.counts[name] = count
    return result


# ------------------------------------------------------------------------------------------ a shard
def _is_done(root: Path, name: str) -> bool:
    return (root / name / _DONE).is_file()


def _prepare_unit(cfg: Config, unit: Unit, root: Path, name: str) -> None:
    """Writes a unit's shards.

    They are moved to their places together, so a killed process leaves none or all.
    """
    # Opened here, from its name: what goes to a process is the settings alone.
    tokenizer = open_tokenizer(cfg.tokenizer, end=cfg.end)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    counts: Counter[str] = Counter()
    options: dict[str, Any] = {"token_dtype": dtype, "patch_width": 3 * cfg.image.patch_size**2}
    options["answers"] = bool(cfg.chat)
    named: list[str] = []  # images that records name
    with shard_writer.write_shards(root / name, SPLITS, **options) as (folder, shards):
        for record in read_unit(unit, text=cfg.text, images=cfg.images, chat=cfg.chat):
            named += record.files
            try:
                document = _document(record, cfg, tokenizer, counts, unit)
            except ValueError as e:
                if cfg.image.on_bad == "refuse":
                    raise
                what = "conversation" if cfg.chat else "record"
                counts[f"{_SKIPPED}{e.reason if isinstance(e, ImageError) else what}"] += 1
                continue
            counts.update(f"{_UNREAD}{name}" for name in record.unread)
            if not len(document.tokens):
                counts[f"{_SKIPPED}length"] += 1
                continue
            held_out = _place(record) < cfg.heldout_fraction
            shards["heldout" if held_out else "train"].add(document)
        for split, shard in shards.items():
            totals = shard.finish()
            counts.update({name: totals[name] for name in ("documents", "tokens", "images")})
            plan.write_json(folder / split / _DONE, totals)
        plan.write_json(folder / plan.IMAGES, plan.stamps(named))
        plan.write_json(folder / _DONE, counts)


def _document(
    record: Record, cfg: Config, tokenizer: Tokenizer, counts: Counter[str], unit: Unit
) -> shard_writer.StoredDocument:
    """A record's tokens and patches; without tokens if it is a conversation that is too long."""
    if record.fault is not None:
        raise record.fault
    pictures: list[Image] = []
    for number, data in enumerate(record.images):
        if isinstance(data, ImageError):
            raise data
        pictures.append(decode(data, f"{record.name}, number {number}", cfg.image))
    if cfg.chat:
        return _conversation(record, pictures, cfg, tokenizer, counts, unit)
    if pictures:
        text = record.text.decode("utf-8", errors="replace")
        tokens = media.encode(text, pictures, tokenizer, record.name)
        spans = _spans(tokens, pictures, tokenizer)
    else:
        # From bytes: a text that is not UTF-8 keeps what it is, as far as the tokenizer can say it.
        tokens = tokenizer.encode(record.text).astype(np.int64)
        spans = np.zeros((0, 2), np.int64)
    return _with_images(np.append(tokens, tokenizer.end_token), pictures, spans)


def _spans(tokens: np.ndarray, pictures: list[Image], tokenizer: Tokenizer) -> np.ndarray:
    slots = [picture.num_slots for picture in pictures]
    return media.spans(tokens, slots, media.media_tokens(tokenizer))


def _with_images(
    tokens: np.ndarray,
    pictures: list[Image],
    spans: np.ndarray,
    learnt: np.ndarray | tuple[()] = (),
) -> shard_writer.StoredDocument:
    grids = [picture.grid for picture in pictures]
    patches = [picture.patches for picture in pictures]
    return shard_writer.StoredDocument(tokens, grids, spans, patches, learnt)


def _conversation(
    record: Record,
    pictures: list[Image],
    cfg: Config,
    tokenizer: Tokenizer,
    counts: Counter[str],
    unit: Unit,
) -> shard_writer.StoredDocument:
    """A conversation's tokens and patches, shortened to ``cfg.max_length``; none if none fit."""
    is_row = unit.kind != "jsonl"
    try:
        whole = chat.encode(record.messages, pictures, tokenizer, "", columnar=is_row)
    except ValueError as e:
        # Its line is looked for only now: the lines before it have to be counted.
        raise ValueError(f"{position(unit, record.name.removeprefix(unit.name))}{e}") from e
    count = whole.fitting(cfg.max_length or len(whole.tokens))
    short = whole.cut(count)
    dropped = len(whole.ends) - count
    counts["dropped"] += dropped
    counts["shortened"] += int(count > 0 and dropped > 0)
    counts["learnt"] += int(short.learnt.sum())
    spans = np.zeros((0, 2), np.int64)
    if pictures:
        spans = _spans(whole.tokens, pictures, tokenizer)
        spans = spans[spans[:, 1] <= len(short.tokens)]  # images of messages that were dropped go
    return _with_images(short.tokens, pictures[: len(spans)], spans, short.learnt)


def _place(record: Record) -> float:
    """A hash of the content, in [0, 1)."""
    # 48 bits, which a float holds exactly.
    digest = hashlib.blake2b(record.text, digest_size=6)
    for data in record.images:
        digest.update(data if isinstance(data, bytes) else b"")
    return int.from_bytes(digest.digest()) / (1 << 48)


# ---------------------------------------------------------------------------------------- all of it
def _work(
    cfg: Config, root: Path, tasks: Sequence[tuple[str, Unit]], workers: int
) -> Iterator[list[str]]:
    """Does the tasks; yields the names of those that are done: at first, after each and now and
    then.
    """
    done: list[str] = []
    left: list[tuple[str, Unit]] = []
    for name, unit in tasks:
        if _is_done(root, name):
            done.append(name)
        else:
            left.append((name, unit))
    yield done
    if workers == 1 or len(left) < 2:
        for name, unit in left:
            _prepare_unit(cfg, unit, root, name)
            yield [name]
        return
    # A fork would copy the locks of torch's and tokenizers' threads, some of them held.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(left)), mp_context=context) as pool:
        waiting = {pool.submit(_prepare_unit, cfg, unit, root, name): name for name, unit in left}
        try:
            while waiting:
                finished, _ = wait(waiting, timeout=_PATIENCE, return_when=FIRST_COMPLETED)
                # All of them before the yield, so that an error is raised where it happened.
                for future in finished:
                    future.result()
                yield [waiting.pop(future) for future in finished]
        except BaseException:
            # Else leaving the block would wait for everything that is queued.
            pool.shutdown(cancel_futures=True)
            raise


def _write_index(
    folder: Path, split: str, names: list[str], cfg: Config, tokenizer: Tokenizer
) -> None:
    """The index of one split's store."""
    shards = []
    for name in names:
        totals = strict_json.load_object(folder.parent / name / split / _DONE)
        if totals["documents"]:  # a small unit may hold nothing out
            shards.append({"name": f"../{name}/{split}", **totals})
    folder.mkdir(exist_ok=True)
    index = {
        "version": store.VERSION,
        "shards": shards,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": fingerprint(tokenizer),
        "end_token": tokenizer.end_token,
        "media_token": tokenizer.special_tokens.get("<|media_pad|>", -1),
        "patch_width": 3 * cfg.image.patch_size**2,
        "answers": bool(cfg.chat),
        "prepared": dataclasses.asdict(cfg),
    }
    plan.write_json(folder / store.INDEX, index)
