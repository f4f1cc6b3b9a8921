"""The whole model with images in the pack: places, labels, isolation, decoding, gradients, bad
input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import autodiff, model, random, segments, tree
from k31fn.layers import projector
from k31fn.layers.patches import Grid, Images, from_grids, num_patches
from k31fn.testing import assert_close_trees, check_grads
from tests import small

MEDIA = 18
CFG = small.with_vision()
BALANCE = model.init_balance(CFG)
A: Grid = (1, 2, 4)  # two slots
B: Grid = (1, 4, 2)
C: Grid = (1, 2, 2)  # one
# two documents in a row, of 7 and 6 tokens, each with images; and a row of one, and a row of text
TOKENS = torch.tensor(
    [
        [1, 18, 18, 2, 3, 18, 4, 5, 6, 18, 18, 7, 8],
        [9, 8, 7, 6, 5, 18, 3, 2, 1, 0, 0, 0, 0],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    ]
)
GRIDS: list[list[Grid]] = [[A, C, B], [C], []]
LENGTHS = [[7, 6], [9], [13]]


def weights(dtype: torch.dtype = torch.float64) -> Any:
    return small.weights(CFG, dtype)


def patches_of(grids: Sequence[Grid], seed: int) -> Tensor:
    return random.normal(random.key(seed), (sum(map(num_patches, grids)), 12)).to(torch.float64)


def images(
    tokens: Tensor, grids: list[list[Grid]], pixels: Sequence[Tensor], length: int = 24
) -> Images:
    full = torch.stack(
        [torch.cat([p, torch.zeros(length - len(p), 12, dtype=p.dtype)]) for p in pixels]
    )
    return Images(full, from_grids(grids, length), projector.slots(tokens, MEDIA))


PIXELS = [patches_of(grids, 5 + i) for i, grids in enumerate(GRIDS)]
IMAGES = images(TOKENS, GRIDS, PIXELS)
PACKING = segments.from_lengths(LENGTHS, 13)


def hidden(p: Any, tokens: Tensor, packing: segments.Segments | None, seen: Any) -> Tensor:
    return model.apply(p, tokens, CFG, balance=BALANCE, segments=packing, images=seen).hidden


def gradient(p: Any, batch: model.Batch, **options: Any) -> tuple[Tensor, Any]:
    return autodiff.value_and_grad(
        lambda p: model.loss(p, batch, CFG, balance=BALANCE, **options)[0]
    )(p)


def make(tokens: Tensor, packing: segments.Segments, seen: Any) -> model.Batch:
    return model.make_batch(tokens, packing, vocab_size=CFG.vocab_size, images=seen)


BATCH = make(TOKENS, PACKING, IMAGES)


def test_features_take_the_places_of_placeholders():
    """The state before the first layer, against the tower and the projector of each image alone."""
    from k31fn.layers import vision

    p = weights()
    assert not isinstance(CFG.vision, tuple)
    assert not isinstance(CFG.projector, tuple)
    carry = model.start(p, TOKENS, CFG, images=IMAGES)
    x = p.embedding.weight[TOKENS]
    for row, grids in enumerate(GRIDS):
        at, places = 0, (TOKENS[row] == MEDIA).nonzero()[:, 0].tolist()
        for grid in grids:
            n = num_patches(grid)
            own = PIXELS[row][None, at : at + n]
            y = vision.apply(p.vision, own, CFG.vision, patches=from_grids([[grid]], n))
            for feature in projector.apply(p.projector, y, CFG.projector)[0]:
                x[row, places.pop(0)] = feature
            at += n
        assert not places
    torch.testing.assert_close(carry.prefix, x, rtol=1e-12, atol=1e-12)


def test_gradients_reach_the_tower_and_not_the_placeholder():
    """The embedding of the media token is read nowhere."""
    p = weights()
    _, grads = gradient(p, BATCH)
    assert all(
        bool(g.any())
        for path, g in tree.flatten_with_paths(grads)
        if path.startswith(("vision", "projector"))
    )
    assert not grads.embedding.weight[MEDIA].any()
    assert grads.embedding.weight[1].any()
    off = dataclasses.replace(
        CFG, indexer_weight=0.0
    )  # whose teacher is no function of the trunk to its gradient

    def loss(tower: Any, onto: Any) -> Tensor:
        seeing = dataclasses.replace(p, vision=tower, projector=onto)
        return model.loss(seeing, BATCH, off, balance=BALANCE)[0]

    check_grads(loss, (p.vision, p.projector), order=1)


def test_remat_changes_no_bit():
    p = weights()
    assert_close_trees(gradient(p, BATCH, remat="layer"), gradient(p, BATCH), rtol=0, atol=0)


def test_labels():
    """D07: never a placeholder, never the next document's token; what follows an image is a
    label.
    """
    x = -100
    assert BATCH.labels.tolist() == [
        [x, x, 2, 3, x, 4, x, 6, x, x, 7, 8, x],
        [8, 7, 6, 5, x, 3, 2, 1, x, x, x, x, x],
        [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, x],
    ]
    assert int(BATCH.num_labels) == 6 + 7 + 12
    assert int(BATCH.num_queries) == 13 + 9 + 13


def test_documents_with_images_do_not_see_each_other():
    """D06: another first document, its images too, changes nothing of the second, nor of its
    gradients.
    """
    p = weights()
    second = torch.zeros(3, 13, dtype=torch.bool)
    second[0, 7:] = True
    only = torch.where(second, BATCH.labels, -100)
    tokens, pixels = TOKENS.clone(), PIXELS[0].clone()
    tokens[0, [0, 3, 4]] = torch.tensor([9, 11, 12])
    pixels[: num_patches(A) + num_patches(C)] += 1
    other = make(tokens, PACKING, images(tokens, GRIDS, [pixels, *PIXELS[1:]]))
    a, b = (hidden(p, batch.tokens, PACKING, batch.images) for batch in (BATCH, other))
    assert not torch.allclose(a[0, :7], b[0, :7])
    torch.testing.assert_close(a[0, 7:], b[0, 7:], rtol=0, atol=1e-12)
    off = dataclasses.replace(CFG, indexer_weight=0.0)
    grads = [
        autodiff.value_and_grad(
            lambda p, batch=batch: model.loss(p, batch, off, balance=BALANCE)[0]
        )(p)
        for batch in (dataclasses.replace(x, labels=only) for x in (BATCH, other))
    ]
    assert_close_trees(grads[0], grads[1], rtol=1e-10, atol=1e-12)


def test_a_document_in_a_pack_is_the_document_alone():
    """D06: its own row, its own images, its own positions."""
    p = weights()
    packed = hidden(p, TOKENS, PACKING, IMAGES)
    own = TOKENS[:1, 7:]
    seen = images(own, [[B]], [PIXELS[0][num_patches(A) + num_patches(C) :]], 8)
    torch.testing.assert_close(hidden(p, own, None, seen)[0], packed[0, 7:], rtol=1e-10, atol=1e-12)


def test_rows_and_one_long_row_have_the_same_gradient():
    """D05: all documents and images in one row of three times the length."""
    p = weights()
    kept = [(r, s) for r, lengths in enumerate(LENGTHS) for s in range(sum(lengths))]
    tokens = torch.stack([TOKENS[r, s] for r, s in kept])[None]
    packing = segments.from_lengths([[n for lengths in LENGTHS for n in lengths]], tokens.shape[1])
    seen = images(tokens, [[g for grids in GRIDS for g in grids]], [torch.cat(PIXELS)], 40)
    assert_close_trees(
        gradient(p, make(tokens, packing, seen)), gradient(p, BATCH), rtol=1e-9, atol=1e-12
    )


def test_prefill_and_decoding_equal_the_forward():
    """Cut anywhere, also inside an image; the images are handed in with the tokens that hold their
    placeholders.
    """
    p = weights()
    tokens, seen = TOKENS[:1, :7], images(TOKENS[:1, :7], [[A, C]], [PIXELS[0][:12]], 12)
    whole = model.logits(p, hidden(p, tokens, None, seen))
    for cut in range(8):
        state, parts = model.init_state(CFG, 1, dtype=torch.float64), []
        for piece in (slice(0, cut), slice(cut, 7)):
            if tokens[:, piece].shape[1]:
                now = dataclasses.replace(seen, slots=seen.slots[:, piece])
                out, state = model.extend(
                    p, tokens[:, piece], CFG, state, balance=BALANCE, images=now
                )
                parts.append(out)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-9, atol=1e-10)


def test_a_batch_of_text_alone():
    """A model with eyes reads text as the one without; with room for images and none there, too."""
    p, text = weights(), small.config()
    blind = dataclasses.replace(p, vision=(), projector=())
    tokens = TOKENS[2:]
    expected = model.apply(blind, tokens, text, balance=BALANCE).hidden
    room = images(tokens, [[]], [torch.zeros(0, 12, dtype=torch.float64)], 8)
    for seen in ((), room):
        assert torch.equal(hidden(p, tokens, None, seen), expected)
    _, grads = gradient(p, make(tokens, segments.whole(1, 13), room))
    assert not any(bool(g.any()) for g in tree.leaves((grads.vision, grads.projector)))


def test_bad_input():
    p, blind = weights(), small.config()
    with pytest.raises(ValueError, match="a batch with images for a model of text alone"):
        model.apply(
            dataclasses.replace(p, vision=()), TOKENS, blind, balance=BALANCE, images=IMAGES
        )
    with pytest.raises(ValueError, match=r"slots \[3, 13\] do not belong to tokens \[2, 13\]"):
        hidden(p, TOKENS[:2], None, IMAGES)
    with pytest.raises(ValueError, match=r"patches of 3 numbers, the tower takes 12"):
        hidden(p, TOKENS, None, dataclasses.replace(IMAGES, pixels=IMAGES.pixels[..., :3]))


def test_bad_config():
    assert not isinstance(CFG.vision, tuple)
    with pytest.raises(ValueError, match=r"model\.Config\.vision without projector"):
        dataclasses.replace(CFG, projector=())
    with pytest.raises(ValueError, match=r"model\.Config\.projector without vision"):
        dataclasses.replace(CFG, vision=())
    with pytest.raises(ValueError, match=r"projector\.input_size=31 must be 32"):
        dataclasses.replace(CFG, projector=projector.Config(31, 16))
    with pytest.raises(ValueError, match=r"projector\.hidden_size=9 must be 16"):
        dataclasses.replace(CFG, projector=projector.Config(32, 9))
