"""Text from a trained run: ``python -m k31fn.sample RUN --prompt "def "``.

Decodes token by token with the model's functional state. A run's ``config.json`` and newest
checkpoint are all that is read; no code of the run is executed. If the run has layers that are not
the library's, ``--recipe`` names the file that registers them.
"""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from k31fn import (
    balance,
    commands,
    data,
    device,
    model,
    random,
    regular_files,
    trainer,
    tree,
)
from k31fn.checkpoint.checkpointer import Checkpointer
from k31fn.checkpoint.errors import CheckpointError
from k31fn.config import files
from k31fn.config.codec import from_dict
from k31fn.config.recipe import Recipe
from k31fn.data import chat, images, media
from k31fn.data.store import INDEX
from k31fn.layers import projector
from k31fn.layers.patches import Images, from_grids
from k31fn.trainer import folder
from k31fn.typing import Float, Int

__all__ = ["generate", "load", "main"]


def __dir__() -> list[str]:
    return __all__


_MOST_SAMPLES = 100_000
_MOST_THREADS = 1024
_COLDEST = 1e-300  # a temperature that one divides by; a colder one chooses alike


def load(
    run: Path, *, where: torch.device, step: int | None = None
) -> tuple[Recipe, model.Params[Tensor], balance.State]:
    """Recipe, parameters and router biases of a run's newest checkpoint, or of the one of ``step``.

    Raises:
        ValueError: it is no run folder, or has no complete checkpoint, or its adapters are for
            another base.
        CheckpointError: the checkpoint is damaged.
    """
    recipe = folder.recipe_of(run)
    with Checkpointer(run / "checkpoints", read_only=True) as checkpoints:
        step = checkpoints.latest() if step is None else step
        if step is None:
            raise ValueError(f"{run} has no complete checkpoint yet; train it first")
        trainer.check_base(recipe, checkpoints.metadata(step).get("base", ""))
        layout = trainer.lay_out(recipe)
        state = trainer.saved(trainer.abstract_state(layout), layout)
        wanted = {"params": state.params, "balance": state.balance}
        restored = checkpoints.restore(step, wanted, partial=True, device=where)
    whole = trainer.completed(dataclasses.replace(state, **restored), layout, where)
    params = whole.params
    if recipe.lora:
        # what is frozen beside adapters is narrower than they are, and decoding has one dtype
        dtype = recipe.precision.param
        params = tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, params)
    return recipe, params, whole.balance


def _choose(
    logits: Float[Tensor, "B Z"],
    key: Int[Tensor, "2"],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Int[Tensor, "B"]:
    """A token per row: the most likely one at temperature 0, else drawn from softmax(logits /
    temperature).

    Only the fewest tokens, most likely first, whose probabilities add up to at least ``top_p`` are
    drawn from. A row's draw depends on its number and not on the other rows.

    Raises:
        ValueError: ``temperature`` is negative or ``top_p`` outside (0, 1].
    """
    _check_draw(temperature, top_p)
    if temperature == 0:
        return logits.argmax(dim=-1)
    # float64: probabilities of a large vocabulary add up to 1 closely enough for top_p. The largest
    # is subtracted first: a small temperature would make it infinite.
    wide = logits.to(torch.float64)
    scaled = (wide - wide.amax(dim=-1, keepdim=True)) / max(temperature, _COLDEST)
    probs, order = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    cumulative = probs.cumsum(dim=-1)
    # the most likely token always counts, also if it alone has more than top_p
    num_tokens = 1 + (cumulative[:, :-1] < top_p).sum(dim=-1, keepdim=True)
    mass = cumulative.gather(-1, num_tokens - 1)
    point = random.uniform(key, (len(logits), 1), dtype=torch.float64) * mass
    place = (cumulative <= point).sum(dim=-1, keepdim=True)
    # rounding may put the point at the very end of the mass
    return order.gather(-1, torch.minimum(place, num_tokens - 1)).squeeze(-1)


@torch.no_grad()
def generate(
    params: model.Params[Tensor],
    cfg: model.Config,
    state: balance.State,
    prompt: Int[Tensor, "B T"],
    *,
    num_tokens: int,
    key: Int[Tensor, "2"],
    temperature: float = 1.0,
    top_p: float = 1.0,
    end_token: int = -1,
    vocab_size: int | None = None,
    images: Images | tuple[()] = (),
    emit: Callable[[Tensor], object] = lambda tokens: None,
) -> Int[Tensor, "B N"]:
    """The tokens after each prompt, N = ``num_tokens`` or fewer.

    The prompt is read in one call, then one token at a time: both extend the same decoding state.

    Args:
        params: the model's parameters; their dtype is that of the decoding.
        cfg: the model's config.
        state: the routers' biases.
        prompt: one document per row, all of one length.
        num_tokens: how many at most.
        key: of the draws; the same key gives the same tokens.
        temperature: see :func:`_choose`.
        top_p: see :func:`_choose`.
        end_token: a row that has drawn it repeats it; ends when all rows have. None is -1.
        vocab_size: only tokens below it are drawn; None: all that the head has, which may be
            padded.
        images: those of the prompt, with a slot or -1 for each of its tokens.
        emit: gets each column ``[B]`` as it is drawn.

    Raises:
        ValueError: an empty prompt, a token that the model has not, or a number out of its range.
    """
    if prompt.shape[1] < 1 or num_tokens < 1:
        raise ValueError(
            f"prompt of {prompt.shape[1]} tokens, num_tokens={num_tokens}: both must be at least 1"
        )
    most = int(prompt.max())
    if most >= cfg.vocab_size:
        raise ValueError(
            f"the prompt has token {most}, the model's vocab_size is {cfg.vocab_size}: the run's "
            "tokenizer has more tokens than its model"
        )
    # in the parameters' dtype: a sample is drawn from what was trained, not from its rounding
    decoding = model.init_state(cfg, len(prompt), dtype=params.head.dtype, device=prompt.device)
    tokens = prompt  # the first call reads all of it
    drawn = []
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    for i in range(num_tokens):
        scores, decoding = model.extend(
            params, tokens, cfg, decoding, balance=state, images=() if i else images
        )
        chosen = _choose(
            scores[:, -1, :vocab_size], random.fold_in(key, i), temperature=temperature, top_p=top_p
        )
        # rows end at different tokens, and the tensor stays a rectangle
        chosen = torch.where(ended, end_token, chosen)
        ended = chosen == end_token
        emit(chosen)
        drawn.append(chosen)
        if end_token >= 0 and bool(ended.all()):  # waits for the device, as emit does in any case
            break
        tokens = chosen[:, None]
    return torch.stack(drawn, dim=1)


def _look(
    files: Sequence[str | Path], text: str, recipe: Recipe
) -> tuple[Int[Tensor, "1 T"], Images]:
    """A prompt with images, prepared as those that the run is trained on.

    By what its store says of them. Where there is none any more they are cut to patches of the
    tower's size, as many at most as a row of the run has.

    Args:
        files: of the images, in order.
        text: with a placeholder for each (:data:`k31fn.data.media.PLACEHOLDER`), or with none: then
            they come first.
        recipe: of the run.

    Returns:
        The tokens, and what :func:`generate` takes as ``images``.

    Raises:
        ValueError: the model has no vision, a file is no image, or the placeholders do not fit.
    """
    tower = recipe.model.vision
    if isinstance(tower, tuple) or not isinstance(recipe.data, data.Prepared):
        raise ValueError("--image: the run's model has no vision, or its data no images")
    # 4: the tower merges 2 x 2 patches, and a run on text alone says 0
    cfg = images.Config(patch_size=tower.patch_size, max_patches=max(4, recipe.patches))
    index = Path(recipe.data.train[0]) / INDEX
    if index.is_file():
        prepared = data.open_store(index.parent).index["prepared"]
        cfg = from_dict(images.Config, prepared.get("image", {}))
    tokenizer = data.open_tokenizer(recipe.data.tokenizer, end=recipe.data.end)
    pictures = [images.decode(_bytes(file), str(file), cfg) for file in files]
    if media.PLACEHOLDER not in text:
        text = media.PLACEHOLDER * len(pictures) + text
    tokens = torch.from_numpy(media.encode(text, pictures, tokenizer, "--prompt"))[None]
    pixels = images.normalise(np.concatenate([p.patches for p in pictures]))[None]
    # one row, with all images of the prompt in it
    where = from_grids([[p.grid for p in pictures]], pixels.shape[1])
    return tokens, Images(pixels, where, projector.slots(tokens, media.media_tokens(tokenizer).pad))


def _bytes(file: str | Path) -> bytes:
    return regular_files.read(regular_files.path(file, "image"), most=1 << 30)


def _check_draw(temperature: float, top_p: float) -> None:
    if not temperature >= 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"temperature={temperature} must be at least 0 and top_p={top_p} in (0, 1]"
        )


@commands.outlives_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Prints a prompt and what the model makes of it, token by token; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m k31fn.sample",
        usage="python -m k31fn.sample RUN [--OPTION VALUE ...]",
        description="Text from a trained run, up to the end of the document.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    where = (
        "run folder such as runs/tiny/20260101-120000, or a folder of runs such as runs/tiny: the "
        "newest of them"
    )
    parser.add_argument("run", type=regular_files.path, metavar="RUN", help=where)
    parser.add_argument("--prompt", default="def ", help="text to go on with")
    images_help = (
        "an image for each <|kimi_image_placeholder|> of the prompt, or in front of one that has "
        "none"
    )
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help=images_help)
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message; prints the answer"
    )
    parser.add_argument("--tokens", type=int, default=400, help="tokens to draw, at most")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: always the most likely token"
    )
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="draw from the most likely tokens of this mass"
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text")
    parser.add_argument(
        "--count", type=int, default=1, help="samples, of seeds SEED, SEED + 1, ..."
    )
    parser.add_argument("--save", action="store_true", help="write them to RUN/samples.txt too")
    parser.add_argument(
        "--device", default="", help="cpu, cuda, npu; if empty, the best of this machine"
    )
    parser.add_argument(
        "--recipe",
        type=regular_files.path,
        help="the recipe file that registers layers of the run's that are not the library's",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="CPU threads; a small model's decoding gains from none",
    )
    args = commands.parse_arguments(parser, argv)
    try:
        _run(args)
    except (ValueError, OSError, CheckpointError) as error:
        commands.print_own_traceback(error)
        print(f"k31fn.sample: {regular_files.shown(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def _run(args: argparse.Namespace) -> None:
    for name, most in (("count", _MOST_SAMPLES), ("threads", _MOST_THREADS)):
        if not 1 <= getattr(args, name) <= most:
            raise ValueError(f"{name}={getattr(args, name)} must be at least 1 and at most {most}")
    # before the model is read
    if args.tokens < 1:
        raise ValueError(f"tokens={args.tokens} must be at least 1")
    _check_draw(args.temperature, args.top_p)
    # one by default: products of a token are too small to share, and waiting costs more
    torch.set_num_threads(args.threads)
    where = device.parse(args.device) if args.device else device.default()
    # each sample has its own seed, so one of several can be drawn again alone
    keys = [random.key(args.seed + i, device=where) for i in range(args.count)]
    run = folder.resolve(args.run)
    if args.recipe is not None:
        files.register_kinds(args.recipe)  # the values are those of the run's own config
    recipe, params, state = load(run, where=where)
    texts = []
    for i, key in enumerate(keys):
        if args.count > 1:
            print(f"--- seed {args.seed + i}")
        texts.append(_print_sample(args, key, recipe, params, state))
    if args.save:
        file = run / "samples.txt"
        samples = ""
        for i, text in enumerate(texts):
            samples += f"--- seed {args.seed + i}\n{text}\n"
        folder.write(file, samples)
        print(f"samples: {file}")


def _print_sample(
    args: argparse.Namespace,
    key: Tensor,
    recipe: Recipe,
    params: model.Params[Tensor],
    state: balance.State,
) -> str:
    """Prints a sample as it is drawn; returns it with its prompt."""
    tokenizer = data.open_tokenizer(recipe.data.tokenizer, end=recipe.data.end)
    pictures: Images | tuple[()] = ()
    if args.image:
        if args.chat:
            raise ValueError(
                "--image with --chat: a message with images is not made here; leave out --chat"
            )
        inputs = _look(args.image, args.prompt, recipe)
        prompt, pictures = tree.map(lambda x: x.to(key.device), inputs)
    else:
        if args.chat:
            encoded = chat.prompt(args.prompt, tokenizer)
        else:
            encoded = tokenizer.encode(args.prompt).astype("int64")
        prompt = torch.from_numpy(encoded)[None].to(key.device)
    # an answer ends before its document does
    end = tokenizer.special_tokens[chat.END_OF_ANSWER] if args.chat else tokenizer.end_token
    # incremental: a character may come in several tokens
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    shown: list[str] = []

    def show(tokens: Tensor) -> None:
        # The prompt is shown with the first token, when all arguments have proved right.
        text = decoder.decode(tokenizer.decode_bytes(tokens.cpu()))
        if not shown:
            text = args.prompt + "\n" * args.chat + text
        shown.append(text)
        print(text, end="", flush=True)

    generate(
        params,
        recipe.model,
        state,
        prompt,
        num_tokens=args.tokens,
        key=key,
        temperature=args.temperature,
        top_p=args.top_p,
        end_token=end,
        vocab_size=tokenizer.vocab_size,  # the head may be padded, to tokens that nothing decodes
        images=pictures,
        emit=show,
    )
    shown.append(decoder.decode(b"", final=True))
    print(shown[-1])
    return "".join(shown)


if __name__ == "__main__":
    sys.exit(main())
