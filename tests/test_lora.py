"""Low-rank adapters: what is trained, what is held, and that both forms of the model agree."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import lora, model, params, random, tree
from k31fn.autodiff import value_and_grad
from k31fn.layers import latent_moe, mlp
from k31fn.layers.linear import dequantize, grouped_linear, linear, transposed_linear
from k31fn.params import LowRank, ParamSpec, Quantized
from k31fn.testing import assert_close_trees, live_bytes
from tests import small

KEY = random.key(5)
HELD = ["bfloat16", "fp8", "mxfp4"]
CFG = small.config(
    moe=latent_moe.Config(
        16, latent_size=32, expert_size=64, shared_size=10, num_experts=5, top_k=2
    ),
    num_layers=2,
    full_attention_layers=(1,),
)


def of_paths(values: Any) -> dict[str, Any]:
    return dict(tree.flatten_with_paths(values))


def adapted(
    cfg: model.Config, held: str, dtype: torch.dtype = torch.float64
) -> tuple[Any, Any, Any]:
    """Specs, parameters with adapters that are not zero, and the weights that were adapted."""
    specs, dense = model.specs(cfg), small.weights(cfg, dtype)
    new, by_path = lora.apply(specs, rank=3, alpha=6.0, held=held), of_paths(dense)
    drawn = lora.init(new, KEY, lambda path, tile: by_path[path][tile], dtype=dtype)

    def shaken(path: str, x: Tensor) -> Tensor:
        return (
            0.1 * random.normal(random.fold_in(KEY, len(path)), x.shape, dtype=dtype)
            if path.endswith(".b")
            else x
        )

    shaken_too = tree.map_with_path(shaken, drawn)
    return new, tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, shaken_too), dense


def test_only_adapters_are_trained():
    specs, by_path = (
        lora.apply(model.specs(CFG), rank=3, alpha=6.0, held="mxfp4"),
        of_paths(model.specs(CFG)),
    )
    trained = {path for path, s in tree.flatten_with_paths(specs) if "frozen" not in s.tags}
    matrices = [p for p, s in by_path.items() if "matrix" in s.tags and re.search(lora.LAYERS, p)]
    assert trained == {f"{p}.{n}" for p in matrices for n in "ab"}
    assert not any(re.search(r"indexer|router|head|embedding", p) for p in trained)
    experts = (
        of_paths(specs)["layers.1.ffn.experts.w_down.a"],
        of_paths(specs)["layers.1.ffn.experts.w_down.b"],
    )
    assert [s.shape for s in experts] == [(5, 64, 3), (5, 3, 32)]
    assert [s.axes for s in experts] == [("experts", "expert_mlp", ""), ("experts", "", "latent")]
    assert [s.beside for s in experts] == [("latent",), ("expert_mlp",)]
    assert all("expert" in s.tags for s in experts)
    assert specs.layers[0].attn.w_q.scale == 2.0
    drawn = params.init(specs, KEY)
    assert all(not bool(x.any()) for p, x in tree.flatten_with_paths(drawn) if p.endswith(".b"))
    a = of_paths(
        lora.apply(
            {"w": ParamSpec((64, 8), ("", ""), params.Normal(1.0), tags=frozenset({"matrix"}))},
            pattern="w",
            rank=500,
        )
    )["w.a"]
    assert abs(float(params.draw("w.a", a, KEY, dtype=torch.float32).std()) - 1 / 8) < 0.01


def test_how_frozen_weights_are_held():
    specs = model.specs(CFG)
    for held, codes in (("fp8", torch.uint8), ("mxfp4", torch.uint8), ("bfloat16", torch.bfloat16)):
        paths = of_paths(lora.apply(specs, held=held))
        name = "layers.1.ffn.experts.w_gate.base" + ("" if held == "bfloat16" else ".codes")
        assert paths[name].dtype == codes
        assert ("layers.0.attn.w_q.base.codes" in paths) == (held == "fp8")
        assert paths["layers.1.ffn.router.weight"].dtype == torch.bfloat16
        assert paths["layers.0.attn.A_log"].dtype == torch.float32
    wide = params.abstract(lora.apply(specs, held="fp8"), dtype=torch.float64)
    assert wide.layers[0].attn.w_q.base.scales.dtype == torch.float32, (
        "as declared in a model of any dtype"
    )
    assert wide.layers[0].attn.w_q.a.dtype == torch.float64
    some = of_paths(lora.apply(specs, held="fp8", pattern=r"attn\.w_q", held_pattern=r"experts"))
    assert "layers.0.attn.w_q.base" in some
    assert "layers.1.ffn.experts.w_up.codes" in some
    assert "layers.0.attn.w_k" in some


@pytest.mark.parametrize("held", HELD)
def test_a_tile_is_that_of_the_whole(held: str):
    """Tiles of codes and of scales end inside of groups of 32 rows and of blocks."""
    spec = ParamSpec(
        (2, 96, 8),
        ("experts", "latent", "mlp"),
        params.Normal(1.0),
        tags=frozenset({"matrix", "expert"}),
    )
    specs, dense = {"w": spec}, random.normal(KEY, (2, 96, 8))
    new = lora.apply(specs, pattern="w", rank=2, held=held, held_pattern="w")
    read: list[Any] = []

    def source(path: str, tile: Any) -> Tensor:
        read.append(tile)
        return dense[tile]

    whole = lora.init(new, KEY, source)
    for height, width in ((slice(1, 3), slice(2, 7)), (slice(0, 1), slice(0, 8))):
        read.clear()
        tile = slice(1, 2), height, width

        def cut(path: str, spec: ParamSpec, tile: Any = tile) -> Any:
            return tuple(
                slice(s.start, min(s.stop, n)) for s, n in zip(tile, spec.shape, strict=True)
            )

        part = lora.init(new, KEY, source, tile=cut)
        expected = tree.map_with_path(lambda p, x: x[cut(p, of_paths(new)[p])], whole)
        assert_close_trees(part, expected, rtol=0, atol=0)
        assert all(t[0] == slice(1, 2) for t in read), "of no other expert"


@pytest.mark.parametrize("held", HELD)
def test_adapters_merged(held: str):
    """The model with adapters is the model with W + s A B, and gradients are s G B^T and s A^T G
    for that one's G.
    """
    cfg = CFG
    _, with_adapters, _ = adapted(cfg, held)
    tokens, balance = small.tokens(2, 12), model.init_balance(cfg)
    batch = model.make_batch(tokens, vocab_size=19)

    def loss(p: Any) -> Tensor:
        return model.loss(p, batch, cfg, balance=balance)[0]

    dense = lora.merge(with_adapters, torch.float64)
    assert tree.paths(dense) == tree.paths(model.specs(cfg))
    (value, grads), (expected, of_dense) = (value_and_grad(loss)(p) for p in (with_adapters, dense))
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    held_as, by_path, checked = of_paths(with_adapters), of_paths(of_dense), 0
    for path, g in tree.flatten_with_paths(grads):
        name, _, kind = path.rpartition(".")
        if kind in "ab" and f"{name}.a" in held_as:
            a, b = held_as[f"{name}.a"], held_as[f"{name}.b"]
            want = 2.0 * (by_path[name] @ b.mT if kind == "a" else a.mT @ by_path[name])
            torch.testing.assert_close(g, want, rtol=1e-9, atol=1e-12)
            checked += 1
    assert checked == sum(p.endswith(".a") for p in held_as) * 2 > 20


@pytest.mark.parametrize("held", ["fp8", "mxfp4"])
def test_products_with_frozen_weights(held: str):
    """Values and gradients of the decoded weight, for every kind of product; the backward holds on
    to bytes alone.
    """
    spec = ParamSpec(
        (3, 64, 96), ("experts", "", ""), params.Normal(1.0), tags=frozenset({"matrix", "expert"})
    )
    new = lora.apply({"w": spec}, pattern="w", rank=2, held=held, held_pattern="w")
    w = lora.init(new, KEY, lambda _, tile: random.normal(KEY, spec.shape)[tile])["w"].base
    assert isinstance(w, Quantized)
    assert w.codes.dtype == torch.uint8
    dense, sizes = dequantize(w, torch.float64), torch.tensor([2, 0, 5])
    rows, back = (
        random.normal(random.key(i), (7, n), dtype=torch.float64) for i, n in enumerate((64, 96))
    )
    one = tree.map(lambda x: x[1], w)
    cases = [
        (lambda x, w: grouped_linear(x, w, sizes), rows, w, dense),
        (linear, rows, one, dense[1]),
        (transposed_linear, back, one, dense[1]),
        (linear, rows[None].expand(3, 7, 64), w, dense),
        (linear, rows, w, dense),  # rows that all three weights multiply
    ]
    for f, x, frozen, plain in cases:
        got, want = (
            value_and_grad(lambda x, w=w, f=f: f(x, w).square().sum())(x) for w in (frozen, plain)
        )
        assert_close_trees(got, want, rtol=1e-12, atol=1e-12)
        hessians = [
            torch.func.grad(
                lambda x, w=w, f=f: torch.func.grad(lambda x: f(x, w).pow(3).sum())(x).sum()
            )(x)
            for w in (frozen, plain)
        ]
        torch.testing.assert_close(*hessians, rtol=1e-10, atol=1e-10)
    x = rows.clone().requires_grad_()
    with live_bytes() as live:
        y = linear(x, one)
        assert live.current <= y.nbytes < dense[1].nbytes
    y.sum().backward()


def many_experts() -> tuple[model.Config, Any, Any]:
    moe = latent_moe.Config(
        16, latent_size=32, expert_size=64, shared_size=8, num_experts=32, top_k=2
    )
    cfg = small.config(
        num_layers=3,
        full_attention_layers=(1,),
        num_dense_layers=0,
        dense=mlp.Config(16, 16),
        moe=moe,
    )
    specs, by_path = lora.apply(model.specs(cfg), rank=1, held="mxfp4"), of_paths(model.specs(cfg))
    weights = lora.init(
        specs, KEY, lambda path, tile: params.draw(path, by_path[path], KEY, tile=tile)
    )
    return cfg, specs, weights


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("remat", ["none", pytest.param("layer", marks=pytest.mark.slow)])
def test_live_bytes_of_the_base_are_those_of_its_codes(remat: Any):
    """A step never holds more than some matrices decoded; with the base decoded once, it holds all
    of them.
    """
    cfg, specs, weights = many_experts()
    tokens, balance = small.tokens(1, 8), model.init_balance(cfg)
    batch = model.make_batch(tokens, vocab_size=19)
    codes = sum(
        x.nbytes for p, x in tree.flatten_with_paths(weights) if "experts" in p and ".base." in p
    )
    one = 32 * 32 * 64 * 4  # bytes of a matrix in float32
    decoded = 3 * 3 * one
    assert codes == decoded * (4 + 8 / 32) / 32

    def peak(decode: bool) -> int:
        def loss(trained: Any) -> Tensor:
            full = tree.map_with_path(lambda p, x: trained.get(p, x), weights)
            if decode:
                is_codes = lambda w: isinstance(w, Quantized)  # noqa: E731
                full = tree.map(
                    lambda w: dequantize(w, torch.float32) if is_codes(w) else w,
                    full,
                    is_leaf=is_codes,
                )
            return model.loss(full, batch, cfg, balance=balance, remat=remat)[0]

        by_path = of_paths(specs)
        trained = {
            p: x.float()
            for p, x in tree.flatten_with_paths(weights)
            if "frozen" not in by_path[p].tags
        }
        with live_bytes() as live:
            value_and_grad(loss)(trained)
        return live.peak

    assert peak(decode=False) < decoded / 2
    assert peak(decode=True) > decoded


def test_what_cannot_be_adapted_is_refused():
    specs = model.specs(CFG)
    with pytest.raises(ValueError, match=r"lora.pattern='nothing' matches no matrix"):
        lora.apply(specs, pattern="nothing")
    with pytest.raises(ValueError, match=r"lora.rank=0 must be at least 1"):
        lora.apply(specs, rank=0)
    with pytest.raises(ValueError, match=r"regular expression"):
        lora.Config(pattern="(")
    odd = small.replace(CFG, moe=dataclasses.replace(CFG.sublayers["moe"], expert_size=40))
    with pytest.raises(ValueError, match=r"40 columns are no whole groups of 32"):
        lora.apply(model.specs(odd), held="mxfp4")


def test_a_low_rank_leaf_keeps_its_scale_through_layers():
    w = LowRank(
        torch.zeros(4, 6).double(), torch.ones(4, 2).double(), torch.ones(2, 6).double(), 0.5
    )
    x = torch.ones(3, 4).double()
    assert bool((linear(x, w) == 4.0).all())
    assert bool((transposed_linear(torch.ones(3, 6).double(), w) == 6.0).all())
