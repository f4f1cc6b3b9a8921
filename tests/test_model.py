"""The whole text model: golden values of K3, packing, decoding, gradients, remat, balance, bad
input.
"""

import dataclasses
import functools
import gc
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k31fn import autodiff, balance, hf, model, params, random, segments, tree
from k31fn.layers import attn_res, block, dsa, indexer, kinds, mhc, mlp, mtp, plain_residual, router
from k31fn.testing import assert_close_trees, check_grads, live_bytes
from tests import small

GOLDEN = Path(__file__).parent / "golden" / "k3_text_tiny"
MHC = mhc.Config(num_streams=3, init_scale=0.5)
LAYERS = range(8)


@pytest.fixture(scope="module")
def golden():
    cfg = hf.config_from_hf(GOLDEN)
    weights, state = hf.load(GOLDEN, cfg)
    return cfg, weights, state


@pytest.fixture(scope="module")
def expected():
    return load_file(GOLDEN / "expected.safetensors")


class Seen:
    """What the layers read and chose, caught at the seams between them."""

    def __init__(self, monkeypatch):
        self.inputs, self.carries, self.routes = [], [], []
        connect, route = attn_res.connect, router.apply

        def spy_connect(p, carry, cfg, f, **options):
            def spy(h):
                self.inputs.append(h)
                return f(h)

            carry, aux = connect(p, carry, cfg, spy, **options)
            self.carries.append(carry)
            return carry, aux

        def spy_route(*args, **kwargs):
            self.routes.append(route(*args, **kwargs))
            return self.routes[-1]

        spied = dataclasses.replace(attn_res.KIND, connect=spy_connect)
        monkeypatch.setitem(kinds._BY_CONFIG, attn_res.Config, spied)
        monkeypatch.setattr(router, "apply", spy_route)


def test_golden_forward(golden, expected, monkeypatch):
    cfg, weights, state = golden
    seen = Seen(monkeypatch)
    out = model.apply(weights, expected["input_ids"], cfg, balance=state)
    for i in LAYERS:
        torch.testing.assert_close(
            seen.inputs[2 * i], expected[f"layers.{i}.attn_res_in"], rtol=0, atol=1e-4
        )
        torch.testing.assert_close(
            seen.inputs[2 * i + 1], expected[f"layers.{i}.mlp_res_in"], rtol=0, atol=1e-4
        )
        torch.testing.assert_close(
            seen.carries[2 * i + 1].prefix, expected[f"layers.{i}.prefix_out"], rtol=0, atol=1e-4
        )
    assert len(seen.carries[-1].blocks) + 1 == 4  # info.json: num_block_sources_at_output
    torch.testing.assert_close(out.residual, expected["output_attn_res"], rtol=0, atol=1e-4)
    torch.testing.assert_close(
        model.logits(weights, out.hidden), expected["logits"], rtol=0, atol=3e-4
    )
    for i, route in zip(range(1, 8), seen.routes, strict=True):
        chosen, order = route.topk_idx.flatten(0, 1).sort(dim=-1)
        assert torch.equal(chosen.int(), expected[f"layers.{i}.router_indices"])
        got = route.weights.flatten(0, 1).gather(1, order)
        torch.testing.assert_close(got, expected[f"layers.{i}.router_weights"], rtol=0, atol=1e-5)


def test_golden_latent_norm_eps_is_seen(golden, expected):
    """The weak spot of the facts file: another eps of the latent norms moves the logits by 0.05."""
    cfg, weights, state = golden
    other = small.replace(
        cfg,
        full_attention=dataclasses.replace(cfg.sublayers["full_attention"], latent_norm_eps=1e-5),
    )
    out = model.apply(weights, expected["input_ids"], other, balance=state)
    got = model.logits(weights, out.hidden)
    torch.testing.assert_close(got, expected["logits_lora_norm_eps_1e-5"], rtol=0, atol=3e-4)
    assert (got - expected["logits"]).abs().max() > 1e-2


def _named_gradients(cfg, weights, state, batch):
    (value, _), grads = autodiff.value_and_grad(
        lambda p: model.loss(p, batch, cfg, balance=state), has_aux=True
    )(weights)
    return value, hf.to_names(grads, cfg)


def _relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_golden_loss_and_gradients(golden, expected):
    cfg, weights, state = golden
    batch = model.make_batch(expected["input_ids"], vocab_size=cfg.vocab_size)
    value, grads = _named_gradients(cfg, weights, state, batch)
    torch.testing.assert_close(value, expected["loss"], rtol=0, atol=1e-5)
    named = {k: v for k, v in expected.items() if k.startswith("grad.")}
    assert len(named) == 40
    for name, want in named.items():
        assert _relative(grads["language_model." + name.removeprefix("grad.")], want) < 2e-4, name
    info = json.loads((GOLDEN / "info.json").read_text())
    norms = info["grad_l2_norm"]
    assert len(norms) == 371
    for name, want in norms.items():
        got = float(grads[name].double().norm())
        assert abs(got - want) <= 2e-4 * want + 1e-12, (name, got, want)
    unused = [n for n in info["no_grad_params"] if "e_score_correction_bias" not in n]
    assert all(not grads[name].any() for name in unused)


def test_golden_packed(golden):
    cfg, weights, state = golden
    packed = load_file(GOLDEN / "expected_packed.safetensors")
    ids = packed["doc_ids"]
    batch = model.make_batch(packed["input_ids"], segments.from_ids(ids), vocab_size=cfg.vocab_size)
    shifted = torch.cat([packed["labels"][:, 1:], torch.full((2, 1), -100)], dim=1)
    assert torch.equal(
        batch.labels, shifted
    )  # labels -100 at document starts and pads, shifted to the predicting token
    out = model.apply(weights, batch.tokens, cfg, balance=state, segments=batch.segments)
    real = ids > 0
    got = model.logits(weights, out.hidden)
    torch.testing.assert_close(got[real], packed["logits"][real], rtol=0, atol=3e-4)
    value, grads = _named_gradients(cfg, weights, state, batch)
    torch.testing.assert_close(value, packed["loss"], rtol=0, atol=1e-5)
    for name, want in packed.items():
        if name.startswith("grad."):
            assert _relative(grads["language_model." + name.removeprefix("grad.")], want) < 2e-4, (
                name
            )


# ---------------------------------------------------------------------------- packing and causality


def _hidden(cfg, p, tok, packing=None, state=None):
    return model.apply(
        p, tok, cfg, balance=state or model.init_balance(cfg), segments=packing
    ).hidden


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_packed_documents_equal_documents_alone(dtype, tolerance):
    """D06: the second document in a row is the same as alone, values and gradients."""
    cfg = small.config()
    p, tok = small.weights(cfg, dtype), small.tokens(1, 24)
    packing = segments.from_lengths([[9, 11]], 24)

    def of_packed(p):
        return _hidden(cfg, p, tok, packing)[:, 9:20]

    def alone(p):
        return _hidden(cfg, p, tok[:, 9:20])

    def gradient(f):
        return autodiff.value_and_grad(lambda p: f(p).square().mean())(p)[1]

    torch.testing.assert_close(
        of_packed(p), alone(p), rtol=0, atol=tolerance * float(alone(p).abs().max())
    )
    scale = max(float(g.abs().max()) for g in tree.leaves(gradient(alone)))
    assert_close_trees(gradient(of_packed), gradient(alone), rtol=0, atol=10 * tolerance * scale)


def test_changing_one_document_leaves_the_other():
    """D06 at equal T: every attention layer is bit-exact; the experts' products change bits with
    their row count.
    """
    cfg = small.config()
    p, tok = small.weights(cfg), small.tokens(1, 24)
    packing = segments.from_lengths([[9, 11]], 24)
    other = tok.clone()
    other[0, :9] = (other[0, :9] + 3) % 19
    other[0, 20:] = 5  # padding carries any token
    a, b = (_hidden(cfg, p, t, packing)[:, 9:20] for t in (tok, other))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert not torch.allclose(
        *(_hidden(cfg, p, t)[:, 9:20] for t in (tok, other))
    )  # without boundaries they do differ


def test_rows_and_flattened_rows_have_the_same_gradient():
    """D05: offsets [0, T, 2T] over two rows, and over one row of 2T; other offsets are refused by
    segments.
    """
    cfg, tok = small.config(num_mtp_layers=1), small.tokens(2, 9)
    p, state = small.weights(cfg), model.init_balance(cfg)

    def gradient(tok):
        packing = segments.from_cu_seqlens([0, 9, 18], batch=tok.shape[0], length=tok.shape[1])
        batch = model.make_batch(tok, packing, vocab_size=cfg.vocab_size)
        return autodiff.value_and_grad(lambda p: model.loss(p, batch, cfg, balance=state)[0])(p)

    rows, flat = gradient(tok), gradient(tok.reshape(1, 18))
    scale = max(float(g.abs().max()) for g in tree.leaves(rows))
    assert_close_trees(flat, rows, rtol=0, atol=1e-12 * scale)


def test_later_tokens_do_not_reach_earlier_ones():
    cfg = small.config()
    p, tok = small.weights(cfg), small.tokens(1, 20)
    other = tok.clone()
    other[0, 13:] = (other[0, 13:] + 1) % 19
    a, b = (_hidden(cfg, p, t) for t in (tok, other))
    torch.testing.assert_close(a[:, :13], b[:, :13], rtol=0, atol=1e-12)
    assert not torch.allclose(a[:, 13:], b[:, 13:])


@pytest.mark.parametrize(
    "kind", ["dsa", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mla", "mhc"))]
)
def test_prefill_and_decode_equal_the_forward(kind):
    cfg = small.config()
    if kind == "mla":
        cfg = small.replace(cfg, full_attention=cfg.sublayers["full_attention"].attn)
    if kind == "mhc":
        cfg = dataclasses.replace(cfg, residual=MHC)
    p, tok = small.weights(cfg, torch.float32), small.tokens(2, 8)
    state = model.init_balance(cfg)
    whole = model.logits(p, _hidden(cfg, p, tok, state=state))
    for cut in range(9):
        pieces = [
            piece for piece in (tok[:, :cut], *tok[:, cut:].split(1, dim=1)) if piece.shape[1]
        ]
        decoding, parts = model.init_state(cfg, 2, dtype=torch.float32), []
        for piece in pieces:
            out, decoding = model.extend(p, piece, cfg, decoding, balance=state)
            parts.append(out)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------ gradients and remat


def _loss(cfg, tok, packing=None, remat="none"):
    batch = model.make_batch(tok, packing, vocab_size=cfg.vocab_size)
    state = model.init_balance(cfg)
    return lambda p: model.loss(p, batch, cfg, balance=state, remat=remat)[0]


@pytest.mark.slow
def test_gradients_of_the_whole_model():
    """Second order too, through DSA, its KL, the router and AttnRes at once, decisions and the
    indexer's teacher pinned.
    """
    cfg = small.config(num_layers=2, full_attention_layers=(1,))
    p = small.weights(cfg)
    check_grads(_loss(cfg, small.tokens(1, 6)), (p,), order=2)
    # A remat notes what is stopped in it, and its replay finds it.
    check_grads(_loss(cfg, small.tokens(1, 6), remat="layer"), (p,))


RESIDUALS = {"attn_res": small.config().residual, "mhc": MHC, "plain": plain_residual.Config()}


@pytest.mark.parametrize(
    ("residual", "policy"),
    [
        ("attn_res", "layer"),
        ("mhc", "cross_layer"),
        *[
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("attn_res", "intra_layer"),
                ("attn_res", "cross_layer"),
                ("mhc", "layer"),
                ("mhc", "intra_layer"),
                ("plain", "layer"),
                ("plain", "intra_layer"),
                ("plain", "cross_layer"),
            )
        ],
    ],
)
def test_remat_changes_no_bit_and_keeps_decisions(residual, policy):
    """D23, D26: with remat the routes are decided once, tokens are counted once, gradients are the
    same bits.
    """
    cfg = small.config(residual=RESIDUALS[residual], num_mtp_layers=1)
    p, tok = small.weights(cfg, torch.float32), small.tokens(2, 10)
    batch = model.make_batch(tok, vocab_size=cfg.vocab_size)
    state = model.init_balance(cfg)
    results = {}
    for remat in ("none", policy):
        step = autodiff.value_and_grad(
            lambda p, remat=remat: model.loss(p, batch, cfg, balance=state, remat=remat),
            has_aux=True,
        )
        results[remat] = step(p)
    (value, parts), grads = results["none"]
    (value_r, parts_r), grads_r = results[policy]
    assert torch.equal(value, value_r)
    assert torch.equal(parts.load, parts_r.load)
    assert torch.equal(parts.load.sum(1), torch.full((4,), 2 * 10 * cfg.sublayers["moe"].top_k))
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(grads), tree.leaves(grads_r), strict=True)
    )
    by_transform = torch.func.grad(_loss(cfg, tok, remat=policy))(p)
    assert all(
        torch.equal(a, b)
        for a, b in zip(tree.leaves(grads), tree.leaves(by_transform), strict=True)
    )


def _peak(f):
    gc.collect()
    with live_bytes() as live:
        f()
    return live.peak


def test_remat_per_layer_holds_one_layer_and_the_stream():
    """Gradients, one stream of [B T D] per layer and 1.3 of the largest layer's own peak; without
    remat a multiple.
    """
    num_layers, width, size = 6, 32, (2, 32)
    attention = dataclasses.replace(
        small.config().sublayers["full_attention"].attn, hidden_size=width
    )
    cfg = small.config(
        hidden_size=width,
        num_layers=num_layers,
        full_attention_layers=(1, 5),
        kda=dataclasses.replace(small.config().sublayers["kda"], hidden_size=width),
        full_attention=dsa.Config(
            attention, indexer.Config(width, 8, num_heads=2, head_dim=4), topk=4
        ),
        dense=mlp.Config(width, 24),
        moe=dataclasses.replace(small.config().sublayers["moe"], hidden_size=width),
        residual=attn_res.Config(block_size=4, query_std=0.1),
    )
    p = small.weights(cfg, torch.float32)

    def of_layer(i):
        bias = torch.zeros(cfg.sublayers["moe"].num_experts) if i else ()
        x = torch.randn(*size, width)
        carry = attn_res.Carry(x, (x.clone(),) if i else ())
        out, pull = autodiff.vjp(
            lambda p, carry: block.apply(p, carry, model.layer_configs(cfg)[i], bias=bias)[0],
            p.layers[i],
            carry,
        )
        pull(tree.map(torch.ones_like, out))

    own = max(
        _peak(lambda i=i: of_layer(i)) for i in range(3)
    )  # dense with KDA, MoE with DSA, MoE with KDA
    gradients = sum(w.nbytes for w in tree.leaves(p))
    bound = gradients + num_layers * math.prod(size) * width * 4 + 1.3 * own
    tok = small.tokens(*size)
    with_remat, without = (
        _peak(lambda remat=remat: autodiff.value_and_grad(_loss(cfg, tok, remat=remat))(p))
        for remat in ("layer", "none")
    )
    assert with_remat <= bound
    assert without > 1.5 * bound


def test_per_sample_gradients_over_packings():
    cfg = small.config(num_layers=2, full_attention_layers=(1,))
    p, tok = small.weights(cfg), small.tokens(3, 8)
    packings = segments.from_lengths([[8], [3, 5], [2, 2, 1]], 8)
    state = model.init_balance(cfg)

    def loss(p, row, ids, position):
        packing = segments.Segments(ids[None], position[None])
        labels = segments.next_token_labels(row[None], packing)
        batch = model.Batch(row[None], labels, packing, (labels >= 0).sum(), (ids > 0).sum())
        return model.loss(p, batch, cfg, balance=state)[0]

    got = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0))(
        p, tok, packings.ids, packings.position
    )
    for i in range(3):
        want = torch.func.grad(loss)(p, tok[i], packings.ids[i], packings.position[i])
        assert_close_trees(tree.map(lambda g, i=i: g[i], got), want, rtol=1e-9, atol=1e-12)


def test_the_indexer_learns_from_its_own_loss_only():
    """D11: every indexer parameter has a gradient; weight 0 takes it away and changes no other
    bit.
    """
    cfg, tok = small.config(), small.tokens(2, 12)
    p = small.weights(cfg)
    on = dict(tree.flatten_with_paths(torch.func.grad(_loss(cfg, tok))(p)))
    off = dict(
        tree.flatten_with_paths(
            torch.func.grad(_loss(dataclasses.replace(cfg, indexer_weight=0.0), tok))(p)
        )
    )
    index = {path for path in on if ".indexer." in path}
    assert len(index) == 2 * 5  # two DSA layers: wq_b, wk, weights, norm weight and bias
    assert all(on[path].any() and not off[path].any() for path in index)
    assert all(torch.equal(on[path], off[path]) for path in on if path not in index)


def test_loss_does_not_depend_on_how_tokens_are_split():
    """D13, D15: two micro-batches of unequal length sum to the loss, gradients and router counts of
    one batch.
    """
    cfg, tok = small.config(), small.tokens(2, 12)
    packing = segments.from_lengths([[7, 5], [4]], 12)
    p, state = small.weights(cfg), model.init_balance(cfg)
    whole = model.make_batch(tok, packing, vocab_size=cfg.vocab_size)

    def run(batch):
        f = autodiff.value_and_grad(
            lambda p: model.loss(p, batch, cfg, balance=state), has_aux=True
        )
        (value, parts), grads = f(p)
        return value, parts.histogram, grads

    rows = [
        model.Batch(
            whole.tokens[i : i + 1],
            whole.labels[i : i + 1],
            segments.Segments(packing.ids[i : i + 1], packing.position[i : i + 1]),
            whole.num_labels,
            whole.num_queries,
        )
        for i in range(2)
    ]
    together = run(whole)
    apart = [run(row) for row in rows]
    assert_close_trees(tree.map(torch.add, *(a[0] for a in apart)), together[0], rtol=1e-12, atol=0)
    assert torch.equal(apart[0][1] + apart[1][1], together[1])
    assert_close_trees(
        tree.map(torch.add, *(a[2] for a in apart)), together[2], rtol=1e-10, atol=1e-13
    )


def test_labels_stop_at_documents():
    """D07."""
    packing = segments.from_lengths([[3, 2]], 5)
    batch = model.make_batch(torch.tensor([[1, 2, 3, 4, 5]]), packing, vocab_size=9)
    assert batch.labels.tolist() == [[2, 3, -100, 5, -100]]
    assert int(batch.num_labels) == 3


def test_no_valid_label():
    """D16: a micro-batch, and a step, without a label contribute 0 and no NaN."""
    cfg = small.config()
    p, tok = small.weights(cfg), small.tokens(1, 3)
    packing = segments.from_lengths([[1, 1, 1]], 3)
    batch = model.make_batch(tok, packing, vocab_size=cfg.vocab_size)
    assert int(batch.num_labels) == 0
    off = dataclasses.replace(cfg, indexer_weight=0.0)
    value, grads = autodiff.value_and_grad(
        lambda p: model.loss(p, batch, off, balance=model.init_balance(cfg))[0]
    )(p)
    assert float(value) == 0
    assert not any(g.any() for g in tree.leaves(grads))


@pytest.mark.parametrize("num_labels", [0, 7])
def test_tokens_without_labels_train_the_indexers_only(num_labels):
    """D16: no label in a micro-batch, of a step with some and of one with none; queries there
    are.
    """
    cfg = small.config(num_mtp_layers=1)
    p = small.weights(cfg)
    batch = model.make_batch(small.tokens(1, 9), vocab_size=cfg.vocab_size)
    masked = torch.full_like(batch.labels, -100)
    batch = dataclasses.replace(batch, labels=masked, num_labels=torch.tensor(num_labels))
    step = autodiff.value_and_grad(
        lambda p: model.loss(p, batch, cfg, balance=model.init_balance(cfg)), has_aux=True
    )
    (value, parts), grads = step(p)
    torch.testing.assert_close(value, parts.kl.mean() / 9, rtol=1e-14, atol=0)
    assert value > 0
    assert all(bool(g.any()) == (".indexer." in path) for path, g in tree.flatten_with_paths(grads))


def test_balance_is_an_explicit_output():
    """D24, D25: the state after three steps is what the steps computed; a layer without balancing
    keeps its bias.
    """
    cfg, tok = small.config(), small.tokens(2, 12)
    p, state = small.weights(cfg), model.init_balance(cfg)
    for _ in range(3):
        parts = model.loss(p, model.make_batch(tok, vocab_size=19), cfg, balance=state)[1]
        before, state = (
            state,
            balance.update(state, parts.histogram, top_k=cfg.sublayers["moe"].top_k),
        )
        assert not torch.equal(before.bias, state.bias)
    assert state.bias.any(dim=1).all()
    unbalanced = small.replace(cfg, moe=dataclasses.replace(cfg.sublayers["moe"], balanced=False))
    parts = model.loss(p, model.make_batch(tok, vocab_size=19), unbalanced, balance=state)[1]
    assert torch.equal(balance.update(state, parts.histogram, top_k=2).bias, state.bias)


def test_bf16_model_keeps_its_islands():
    """D03: A_log, dt_bias, convolutions and o_norm stay float32 through build and cast."""
    cfg = small.config()
    specs = model.specs(cfg)
    islands = ("A_log", "dt_bias", "conv", "o_norm")
    built = params.init(specs, random.key(0), dtype=torch.bfloat16)
    cast = params.cast(small.weights(cfg, torch.float32), specs, torch.bfloat16)
    for p in (built, cast):
        for path, leaf in tree.flatten_with_paths(p):
            expected = torch.float32 if any(name in path for name in islands) else torch.bfloat16
            assert leaf.dtype == expected, path
    out = _hidden(cfg, cast, small.tokens(1, 8))
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_pieces_of_two_stages_make_the_whole_at_every_cut(reduction):
    cfg = small.config(indexer_reduction=reduction)
    p, batch, state = (
        small.weights(cfg),
        model.make_batch(small.tokens(2, 9), vocab_size=19),
        model.init_balance(cfg),
    )
    want, whole = model.loss(p, batch, cfg, balance=state)
    lacks = {"embedding": ("final_mix", "final_norm", "head"), "head": ("embedding",)}
    for cut in range(cfg.num_layers + 1):
        first, second = (
            dataclasses.replace(
                p,
                layers=tuple(layer if i in present else () for i, layer in enumerate(p.layers)),
                **dict.fromkeys(lacks[has], ()),
            )
            for has, present in (("embedding", range(cut)), ("head", range(cut, cfg.num_layers)))
        )
        run = functools.partial(model.run_layers, cfg=cfg, balance=state, segments=batch.segments)
        carry, above = run(first, model.start(first, batch.tokens, cfg), layers=range(cut))
        carry, below = run(second, carry, layers=range(cut, cfg.num_layers))
        lm = model.lm_loss(second, model.finish(second, carry, cfg).hidden, batch.labels)
        zero = torch.zeros_like(lm)
        parts = model.Losses(zero, zero, *above), model.Losses(lm, zero, *below)
        joined = [torch.cat(pair) for pair in zip(above[:3], below[:3], strict=True)]
        assert_close_trees(
            [lm, *joined], [whole.lm, whole.kl, whole.load, whole.histogram], rtol=0, atol=0
        )
        assert (above.logits, below.logits, whole.logits) == ((), (), ())  # nobody asked for them
        total = sum(model.weigh(part, batch, cfg) for part in parts)
        torch.testing.assert_close(total, want, rtol=1e-14, atol=0)


def test_mtp_predicts_the_token_after_the_next():
    cfg = small.config(num_mtp_layers=1)
    p, tok = small.weights(cfg), small.tokens(1, 9)
    packing = segments.from_lengths([[5, 4]], 9)
    batch = model.make_batch(tok, packing, vocab_size=19)
    assert mtp.labels(batch.labels).tolist() == [
        [
            int(tok[0, 2]),
            int(tok[0, 3]),
            int(tok[0, 4]),
            -100,
            -100,
            int(tok[0, 7]),
            int(tok[0, 8]),
            -100,
            -100,
        ]
    ]
    state = model.init_balance(cfg)
    (value, parts), grads = autodiff.value_and_grad(
        lambda p: model.loss(p, batch, cfg, balance=state), has_aux=True
    )(p)
    assert parts.load.shape[0] == len(model.moe_layers(cfg)) == 4
    without = model.loss(p, batch, dataclasses.replace(cfg, mtp_weight=0.0), balance=state)[0]
    torch.testing.assert_close(value, without + cfg.mtp_weight * parts.mtp / 7, rtol=1e-12, atol=0)
    assert parts.kl.shape == (
        3,
    )  # two DSA layers and the MTP layer's, whose indexer learns as theirs do (D11)
    assert all(g.any() for path, g in tree.flatten_with_paths(grads.mtp) if "experts" not in path)
    recomputed = autodiff.value_and_grad(
        lambda p: model.loss(p, batch, cfg, balance=state, remat="layer")[0]
    )(p)
    assert_close_trees(recomputed, (value, grads), rtol=0, atol=0)


def test_mtp_reads_nothing_of_the_next_document():
    """D06: the first document's terms do not know the second's tokens, though an MTP layer reads
    one token ahead.
    """
    cfg = small.config(num_mtp_layers=1)
    p, tok, h = (
        small.weights(cfg),
        small.tokens(1, 9),
        random.normal(random.key(2), (1, 9, 16), dtype=torch.float64),
    )
    packing = segments.from_lengths([[5, 3]], 9)
    layer = mtp.Config(
        block.Config(cfg.sublayers["full_attention"], cfg.sublayers["moe"], plain_residual.Config())
    )
    bias = torch.zeros(cfg.sublayers["moe"].num_experts)

    def hidden(tok):
        return mtp.apply(
            p.mtp, h, tok, layer, embed=p.embedding, segments=packing, bias=bias
        ).hidden

    other = tok.clone()
    other[0, 5:] = (other[0, 5:] + 1) % 19
    torch.testing.assert_close(hidden(other)[:, :5], hidden(tok)[:, :5], rtol=0, atol=1e-12)
    alone = mtp.apply(p.mtp, h[:, :5], tok[:, :5], layer, embed=p.embedding, bias=bias).hidden
    torch.testing.assert_close(alone, hidden(tok)[:, :5], rtol=0, atol=1e-12)


def test_an_mtp_layer_may_be_the_only_moe_layer():
    cfg = small.config(num_dense_layers=4, num_mtp_layers=1)
    batch = model.make_batch(small.tokens(1, 6), vocab_size=19)
    parts = model.loss(small.weights(cfg), batch, cfg, balance=model.init_balance(cfg))[1]
    assert parts.load.sum() == 6 * cfg.sublayers["moe"].top_k
    assert parts.histogram.shape == (1, cfg.sublayers["moe"].num_experts, router.NUM_BINS)


def test_a_dense_model_reports_no_layers():
    cfg = small.config(num_dense_layers=4)
    out = model.apply(small.weights(cfg), small.tokens(1, 6), cfg, balance=model.init_balance(cfg))
    assert out.load.shape == (0, 5)
    assert out.histogram.shape == (0, 5, router.NUM_BINS)


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 12}, "kda.hidden_size=16 must equal hidden_size=12"),
        (
            {"layers": (("kda", "dense"), ("conv", "moe"))},
            r"layers\[1\]=.*'conv' is no token mixer",
        ),
        ({"layers": (("kda", "full_attention"),)}, "'full_attention' is no channel mixer"),
        ({"mtp": ("kda",)}, r"mtp=\('kda',\)"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_layers": 0}, r"layers=\(\) must name at least one layer"),
    ],
)
def test_bad_config(change, words):
    with pytest.raises(ValueError, match=words):
        small.config(**change)


def test_bad_batches():
    tok = small.tokens(1, 4)
    with pytest.raises(ValueError, match=r"tokens\[0, 2\]=19"):
        model.make_batch(torch.tensor([[1, 2, 19, 3]]), vocab_size=19)
    descending = segments.Segments(
        torch.tensor([[2, 2, 1, 1]]), torch.zeros(1, 4, dtype=torch.int64)
    )
    with pytest.raises(ValueError, match=r"segments\.ids"):
        model.make_batch(tok, descending, vocab_size=19)
    empty = segments.Segments(torch.tensor([[1, 1, 3, 3]]), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="document 2 is empty"):
        model.make_batch(tok, empty, vocab_size=19)
    with pytest.raises(
        ValueError, match=r"segments have shape \[1, 4\], the tokens \[B, T\]=\[2, 4\]"
    ):
        model.make_batch(
            small.tokens(2, 4), segments.whole(1, 4), vocab_size=19
        )  # half the queries would be counted


def test_bad_arguments():
    cfg, tok = small.config(), small.tokens(1, 4)
    p, state = small.weights(cfg), model.init_balance(cfg)
    with pytest.raises(ValueError, match=r"num_layers=4, but params has 3 layers"):
        model.apply(dataclasses.replace(p, layers=p.layers[:3]), tok, cfg, balance=state)
    with pytest.raises(ValueError, match=r"segments have shape \[1, 5\]"):
        model.apply(p, tok, cfg, balance=state, segments=segments.whole(1, 5))
    three_heads = dataclasses.replace(cfg.sublayers["full_attention"].attn, num_heads=3)
    of_three = small.replace(
        cfg, full_attention=dataclasses.replace(cfg.sublayers["full_attention"], attn=three_heads)
    )
    with pytest.raises(
        ValueError, match=r"mla w_qb: 12 columns do not divide into num_heads=3 heads of 6"
    ):
        model.apply(p, tok, of_three, balance=state)
    odd = small.replace(cfg, kda=dataclasses.replace(cfg.sublayers["kda"], head_dim=3))
    with pytest.raises(ValueError, match=r"8 columns do not divide into num_heads=2 heads of 3"):
        model.apply(p, tok, odd, balance=state)
    with pytest.raises(ValueError, match=r"router: bias \[4\] for num_experts=5"):
        model.apply(p, tok, cfg, balance=balance.init(model.moe_layers(cfg), 4))


def test_none_leaf():
    cfg = small.config()
    p = dataclasses.replace(small.weights(cfg), head=None)
    with pytest.raises(ValueError, match="head' is None"):
        autodiff.value_and_grad(lambda p: p.embedding.weight.sum())(p)
    with pytest.raises(ValueError, match="head' is None"):
        model.apply(p, small.tokens(1, 4), cfg, balance=model.init_balance(cfg))
    with pytest.raises(ValueError, match=r"Params\.head is None"):
        torch.func.grad(lambda p: p.embedding.weight.sum())(p)
