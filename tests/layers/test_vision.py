"""The tower and the projector against a plain form, one image at a time in raster order, written
from the equations.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from k31fn import params, random, tree
from k31fn.autodiff import remat
from k31fn.layers import projector, vision, vision_block
from k31fn.layers.patch_position import table_rows, time_rows
from k31fn.layers.patches import Patches, cell_order, from_grids, num_patches, num_slots

BLOCK = vision_block.Config(
    hidden_size=8, num_heads=2, head_dim=12, intermediate_size=10, init_std=0.3
)
CFG = vision.Config(
    BLOCK, num_layers=2, patch_size=2, num_channels=3, table_size=(6, 5), num_frames=3
)
PROJECTOR = projector.Config(CFG.output_size, hidden_size=10)
GRIDS = [(1, 4, 2), (1, 6, 5 + 1), (1, 2, 8)]


def weights(seed: int = 0) -> vision.Params[torch.Tensor]:
    """Far from their initial values, so that norm weights and both tables count."""
    drawn = params.init(vision.specs(CFG), random.key(seed), dtype=torch.float64)
    leaves, structure = tree.flatten(drawn)
    moved = [w + 0.3 * torch.randn_like(w) for w in leaves]
    return tree.unflatten(structure, moved)


def images(grids):
    return [torch.randn(num_patches(g), CFG.pixels_per_patch, dtype=torch.float64) for g in grids]


def pack(grids, raster, length: int):
    """One row: each image's patches in cell order, then zeros."""
    parts = [image[torch.from_numpy(cell_order(g))] for g, image in zip(grids, raster, strict=True)]
    whole = torch.cat(
        [
            *parts,
            torch.zeros(length - sum(map(len, parts)), CFG.pixels_per_patch, dtype=torch.float64),
        ]
    )
    return whole[None]


# ----------------------------------------------------------------------------------- the plain form
def plain_norm(x, weight):
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1.1920928955078125e-07)


def plain_turn(x, t, h, w):
    """x [T H K] as complex pairs of adjacent dims; pair 2i turned by the column, pair 2i + 1 by the
    row.
    """
    K = x.shape[-1]
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], K // 2, 2))
    turned = []
    for frame in range(t):
        for row in range(h):
            for column in range(w):
                place = pairs[(frame * h + row) * w + column]
                phase = [
                    (column if p % 2 == 0 else row) * 10000.0 ** (-4 * (p // 2) / K)
                    for p in range(K // 2)
                ]
                turned.append(place * torch.exp(1j * torch.tensor(phase, dtype=torch.float64)))
    return torch.view_as_real(torch.stack(turned)).flatten(-2)


def plain_tower(p, pixels, grid):
    t, h, w = grid
    table = F.interpolate(
        p.table.permute(2, 0, 1)[None],
        size=(h, w),
        mode="bilinear",
        align_corners=False,
        antialias=False,
    )
    position = table[0].permute(1, 2, 0).reshape(h * w, -1).repeat(t, 1)
    if t > 1:
        D = BLOCK.hidden_size
        for frame in range(t):
            sines = [math.sin(frame / 10000 ** (2 * i / D)) for i in range(D // 2)]
            cosines = [math.cos(frame / 10000 ** (2 * i / D)) for i in range(D // 2)]
            extra = torch.tensor([sines + cosines], dtype=torch.float64).expand(h * w, -1)
            before, after = frame * h * w, (t - frame - 1) * h * w
            position = position + F.pad(extra, (0, 0, before, after))
    x = pixels @ p.patch + position
    for b in p.blocks:
        n = plain_norm(x, b.attn_norm)
        q, k, v = (
            (n @ m).reshape(len(x), BLOCK.num_heads, BLOCK.head_dim) for m in (b.w_q, b.w_k, b.w_v)
        )
        q, k = plain_turn(q, t, h, w), plain_turn(k, t, h, w)
        o = torch.einsum(
            "hts,shv->thv", torch.softmax(torch.einsum("thk,shk->hts", q, k) / 12**0.5, -1), v
        )
        x = x + o.flatten(1) @ b.w_o
        u = plain_norm(x, b.mlp_norm) @ b.w_in
        x = (
            x
            + (0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))) @ b.w_out
        )
    y = plain_norm(x, p.norm).reshape(t, h, w, -1).mean(0)
    cells = y.reshape(h // 2, 2, w // 2, 2, -1).permute(0, 2, 1, 3, 4)
    return cells.reshape(h * w // 4, -1)


def plain_projector(p, x):
    h = x @ p.w_in
    y = (h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))) @ p.w_out
    return p.norm * y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5)


def features(p, pixels, patches, grids):
    y = vision.apply(p, pixels, CFG, patches=patches)[0]
    return y[: sum(map(num_slots, grids))]


def both(grids, max_frames: int = 1, length: int = 0):
    """Values of the two forms and their gradients for all weights and pixels."""
    p, raster = weights(), images(grids)
    length = length or sum(map(num_patches, grids)) + 8
    patches = from_grids([grids], length, max_frames=max_frames)
    ct = torch.randn(sum(map(num_slots, grids)), CFG.output_size, dtype=torch.float64)

    def ours(p, raster):
        y = features(p, pack(grids, raster, length), patches, grids)
        return (y * ct).sum(), y

    def plain(p, raster):
        y = torch.cat([plain_tower(p, image, g) for g, image in zip(grids, raster, strict=True)])
        return (y * ct).sum(), y

    results = [torch.func.grad(f, argnums=(0, 1), has_aux=True)(p, raster) for f in (ours, plain)]
    return results


@pytest.mark.parametrize(
    ("grids", "max_frames"),
    [
        ([(1, 4, 2)], 1),
        ([(1, 6, 2), (1, 2, 8)], 1),  # the height of the table, and wider than it
        ([(1, 2, 2), (1, 8, 6), (1, 4, 4)], 1),
        ([(3, 4, 2)], 3),
        ([(1, 4, 2), (2, 2, 4), (3, 2, 2), (1, 2, 2)], 3),
    ],
    ids=str,
)
def test_tower_equals_the_plain_form(grids, max_frames):
    (grads, y), (expected_grads, expected) = both(grids, max_frames)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    for name, a, b in zip(
        tree.paths(grads), tree.leaves(grads), tree.leaves(expected_grads), strict=True
    ):
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )


def test_images_in_a_pack_with_room_for_clips_are_unchanged():
    """The time table and the mean over frames touch clips only."""
    p, raster = weights(), images(GRIDS)
    length = 80
    pixels = pack(GRIDS, raster, length)
    plain = vision.apply(p, pixels, CFG, patches=from_grids([GRIDS], length))
    roomy = vision.apply(p, pixels, CFG, patches=from_grids([GRIDS], length, max_frames=3))
    n = sum(map(num_slots, GRIDS))
    torch.testing.assert_close(roomy[:, :n], plain[:, :n], rtol=0, atol=0)
    assert not roomy[:, n:].any()


def test_an_image_of_the_tables_size_reads_the_table_itself():
    cfg = vision.Config(BLOCK, 1, table_size=(6, 4))
    table = torch.randn(*cfg.table_size, 8)
    read = table_rows(table, from_grids([[(1, 6, 4)]], 24))[0]
    assert torch.equal(read, table.reshape(24, 8)[torch.from_numpy(cell_order((1, 6, 4)))])


@pytest.mark.parametrize(
    "size", [(2, 2), (6, 6), (10, 4), (64, 32), (30, 64), (128, 2), (512, 512)], ids=str
)
def test_the_stretched_table_is_torchs(size):
    h, w = size
    table = torch.randn(64, 64, 2, dtype=torch.float64)
    expected = F.interpolate(
        table.permute(2, 0, 1)[None], size=size, mode="bilinear", align_corners=False
    )[0]
    read = table_rows(table, from_grids([[(1, h, w)]], h * w))[0]
    raster = torch.empty_like(read)
    raster[torch.from_numpy(cell_order((1, h, w)))] = read
    torch.testing.assert_close(
        raster.reshape(h, w, 2).permute(2, 0, 1), expected, rtol=1e-12, atol=1e-12
    )


def test_time_table_is_added_to_clips_only():
    patches = from_grids([[(1, 2, 2), (2, 2, 2)]], 12, max_frames=2)
    rows = time_rows(patches, 2, 4, torch.float64)[0]
    assert not rows[:4].any()
    torch.testing.assert_close(
        rows[4], torch.tensor([0.0, 0, 1, 1], dtype=torch.float64), rtol=0, atol=0
    )
    second = [math.sin(1), math.sin(0.01), math.cos(1), math.cos(0.01)]
    torch.testing.assert_close(
        rows[8], torch.tensor(second, dtype=torch.float64), rtol=1e-14, atol=0
    )


def test_neighbours_in_the_pack_change_no_bit():
    p, raster = weights(), images(GRIDS)
    other = [raster[0] + 1, raster[1], raster[2] * 3]
    patches = from_grids([GRIDS], 80)
    before, after = (
        vision.apply(p, pack(GRIDS, r, 80), CFG, patches=patches)[0] for r in (raster, other)
    )
    first, second = num_slots(GRIDS[0]), num_slots(GRIDS[1])
    assert torch.equal(before[first : first + second], after[first : first + second])
    assert not torch.equal(before[:first], after[:first])

    def middle(pixels):
        return (
            vision.apply(p, pixels, CFG, patches=patches)[0, first : first + second].square().sum()
        )

    grad = torch.func.grad(middle)(pack(GRIDS, raster, 80))[0]
    mine = slice(num_patches(GRIDS[0]), num_patches(GRIDS[0]) + num_patches(GRIDS[1]))
    assert grad[mine].abs().min() > 0
    assert not grad[: mine.start].any()
    assert not grad[mine.stop :].any()


def test_the_order_of_images_and_the_row_they_lie_in_do_not_matter():
    p, raster = weights(), images(GRIDS)
    there = features(p, pack(GRIDS, raster, 80), from_grids([GRIDS], 80), GRIDS)
    swapped = GRIDS[::-1]
    pixels = torch.cat(
        [
            torch.zeros(1, 72, CFG.pixels_per_patch, dtype=torch.float64),
            pack(swapped, raster[::-1], 72),
        ]
    )
    back = vision.apply(p, pixels, CFG, patches=from_grids([[], swapped], 72))[1]
    cut = list(map(num_slots, swapped))
    parts = back[: sum(cut)].split(cut)[::-1]
    torch.testing.assert_close(torch.cat(parts), there, rtol=1e-12, atol=1e-12)


def test_a_row_without_images_is_finite_and_teaches_nothing():
    p = weights()
    patches = from_grids([[]], 8)
    pixels = torch.zeros(1, 8, CFG.pixels_per_patch, dtype=torch.float64)
    slots = torch.full((1, 5), -1)

    def loss(p):
        y = vision.apply(p, pixels, CFG, patches=patches)
        x = projector.place(torch.ones(1, 5, CFG.output_size, dtype=torch.float64), y, slots)
        return x.square().sum()

    grads = torch.func.grad(loss)(p)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in tree.leaves(grads))


def test_wrong_variants_are_caught():
    """Row and column swapped, a causal mask, the time table on images, a transposed cell: each
    moves the result.
    """
    grid = (1, 4, 6)
    p, (image,) = weights(), images([grid])
    patches = from_grids([[grid]], 24)
    good = plain_tower(p, image, grid)
    pixels = pack([grid], [image], 24)
    index = torch.arange(24)[None]
    variants = {
        "swapped": tree.map(
            lambda x: x,
            Patches(
                *[
                    getattr(patches, n)
                    for n in ("start", "stop", "column", "row", "width", "height", "frame")
                ],
                cells=(),
            ),
        ),
        "causal": Patches(
            patches.start,
            index + 1,
            patches.row,
            patches.column,
            patches.height,
            patches.width,
            patches.frame,
            (),
        ),
        "unstretched": Patches(
            patches.start,
            patches.stop,
            patches.row,
            patches.column,
            torch.full_like(index, 6),
            torch.full_like(index, 5),
            patches.frame,
            (),
        ),
    }
    for name, wrong in variants.items():
        y = vision.apply(p, pixels, CFG, patches=wrong)[0]
        assert (y - good).abs().max() > 1e-3, name
    raster = vision.apply(p, image[None], CFG, patches=patches)[0]
    assert (raster - good).abs().max() > 1e-3


def test_vmap_over_packings():
    """Different images per sample under one vmap of a gradient: what each gives alone."""
    p, length = weights(), 24
    rows = [[(1, 4, 2), (1, 2, 4)], [(1, 4, 6)], []]
    pixels = torch.randn(3, 1, length, CFG.pixels_per_patch, dtype=torch.float64)
    packs = [from_grids([row], length) for row in rows]

    def loss(p, pixels, patches):
        y = vision.apply(p, pixels, CFG, patches=patches)
        return (y.square().mean(-1) * (patches.stop[:, ::4] > 0)).sum()

    stacked = tree.map(lambda *fields: torch.stack(fields), *packs)
    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(p, pixels, stacked)
    for i, patches in enumerate(packs):
        alone = torch.func.grad(loss)(p, pixels[i], patches)
        tree.map(
            lambda m, a, i=i: torch.testing.assert_close(m[i], a, rtol=1e-10, atol=1e-11),
            mapped,
            alone,
        )


def test_layer_by_layer_with_recomputation():
    """The steps that a caller may take alone, each layer inside remat."""
    p, raster = weights(), images(GRIDS)
    pixels, patches = pack(GRIDS, raster, 80), from_grids([GRIDS], 80)

    def steps(p, pixels):
        rest = vision.Params(p.patch, p.table, (), p.norm)
        x = vision.embed(rest, pixels, CFG, patches=patches)
        shared = vision_block.geometry(patches, CFG.block, x.dtype)
        run = remat(lambda b, x, g: vision_block.apply(b, x, CFG.block, geometry=g))
        for block in p.blocks:
            x = run(block, x, shared)
        return vision.merge(rest, x, CFG, patches=patches)

    y, pull = torch.func.vjp(steps, p, pixels)
    whole, pull_whole = torch.func.vjp(
        lambda p, x: vision.apply(p, x, CFG, patches=patches), p, pixels
    )
    assert torch.equal(y, whole)
    tree.map(
        lambda a, b: torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13),
        pull(y),
        pull_whole(y),
    )


# ---------------------------------------------------------------------------------------- projector
def test_projector_equals_the_plain_form():
    p = params.init(projector.specs(PROJECTOR), random.key(1), dtype=torch.float64)
    p = tree.map(lambda w: w + 0.1 * torch.randn_like(w), p)
    x = torch.randn(2, 3, PROJECTOR.input_size, dtype=torch.float64)
    results = [
        torch.func.vjp(f, p, x)
        for f in (lambda p, x: projector.apply(p, x, PROJECTOR), plain_projector)
    ]
    ct = torch.randn_like(results[0][0])
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-12, atol=1e-12)
    for a, b in zip(tree.leaves(results[0][1](ct)), tree.leaves(results[1][1](ct)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_features_take_their_placeholders():
    tokens = torch.tensor([[7, 9, 9, 3, 9], [9, 3, 3, 3, 3], [1, 2, 3, 4, 5]])
    slots = projector.slots(tokens, 9)
    assert slots.tolist() == [[-1, 0, 1, -1, 2], [0, -1, -1, -1, -1], [-1] * 5]
    x, features = (
        torch.zeros(3, 5, 2),
        1 + torch.arange(3.0)[:, None] + torch.arange(3.0)[:, None, None] * 10,
    )
    placed = projector.place(x, features.expand(3, 3, 2), slots)
    assert placed[..., 0].tolist() == [[0, 1, 2, 0, 3], [11, 0, 0, 0, 0], [0] * 5]


# ------------------------------------------------------------------------------------------ numbers
def test_parameter_counts_of_k3():
    block = vision_block.Config(
        hidden_size=1024, num_heads=12, head_dim=128, intermediate_size=4096
    )
    tower = vision.Config(block, num_layers=27)
    assert params.count(vision.specs(tower)) == 401_214_464
    assert params.count(projector.specs(projector.Config(tower.output_size, 7168))) == 46_144_512
    assert block.norm_eps == pytest.approx(1.19e-7, rel=2e-3)


def test_bfloat16_stays_bfloat16_and_close():
    p, raster = weights(), images(GRIDS)
    pixels, patches = pack(GRIDS, raster, 80), from_grids([GRIDS], 80)
    exact = features(p, pixels, patches, GRIDS)
    narrow = features(tree.map(lambda w: w.bfloat16(), p), pixels.bfloat16(), patches, GRIDS)
    assert narrow.dtype == torch.bfloat16
    error = (narrow.double() - exact).norm() / exact.norm()
    assert error < 0.05  # 2^-8 per rounding, two layers with weights of size 1


# ------------------------------------------------------------------------------------------ layouts
def test_cell_order():
    assert cell_order((1, 2, 4)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert cell_order((2, 2, 2)).tolist() == list(range(8))
    patches = from_grids([[(1, 2, 4)]], 12)
    assert patches.row[0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0]
    assert patches.column[0].tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 0, 0, 0, 0]
    assert patches.stop[0].tolist() == [8] * 8 + [0] * 4
    assert sorted(cell_order((3, 6, 4))) == np.arange(72).tolist()


def test_cells_of_clips():
    patches = from_grids([[(1, 2, 2), (2, 2, 4), (1, 2, 2)]], 28, max_frames=2)
    assert patches.cells[0].tolist() == [
        [0, -1],
        [1, 3],
        [2, 4],
        [5, -1],
        [-1, -1],
        [-1, -1],
        [-1, -1],
    ]
    assert patches.frame[0].tolist() == [0] * 4 + [1] * 8 + [2] * 8 + [0] * 8


@pytest.mark.parametrize(
    ("rows", "length", "message"),
    [
        ([[(1, 3, 2)]], 8, r"rows\[0\]\[0\]=\(1, 3, 2\).*even"),
        ([[], [(1, 2, 2), (1, 0, 2)]], 8, r"rows\[1\]\[1\]"),
        ([[(2, 2, 2)]], 8, "max_frames=1"),
        ([[(1, 2, 2), (1, 2, 4)]], 8, "ends at patch 12, after length=8"),
        ([[]], 6, "multiple of 4"),
        ([], 4, "needs a row"),
    ],
)
def test_layouts_that_are_refused(rows, length, message):
    with pytest.raises(ValueError, match=message):
        from_grids(rows, length)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 6}, "multiple of 4.*nearest: 8"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"norm_eps": 0.0}, "norm_eps"),
    ],
)
def test_block_configs_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        vision_block.Config(
            **({"hidden_size": 8, "num_heads": 2, "head_dim": 4, "intermediate_size": 4} | change)
        )


def test_tower_configs_that_are_refused():
    with pytest.raises(ValueError, match="num_layers=0"):
        vision.Config(BLOCK, 0)
    with pytest.raises(ValueError, match="table_size"):
        vision.Config(BLOCK, 1, table_size=(0, 4))
    with pytest.raises(ValueError, match="must be even"):
        vision.Config(vision_block.Config(7, 1, 4, 4), 1)
    longer = from_grids([[]], 8, max_frames=4)
    with pytest.raises(
        ValueError, match=r"clips of 4 frames, more than vision\.Config\.num_frames=3"
    ):
        vision.embed(weights(), torch.zeros(1, 8, 12), CFG, patches=longer)
    with pytest.raises(ValueError, match="whole cells"):
        vision.merge(weights(), torch.zeros(1, 6, 8), CFG, patches=from_grids([[]], 8))
