from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from k31fn import params, random, tree
from k31fn.layers.linear import linear
from k31fn.params import (
    Constant,
    Initializer,
    LowRank,
    Normal,
    ParamSpec,
    Quantized,
    SoftplusInverse,
    TruncatedNormal,
    Uniform,
)

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
KEY = random.key(7)

INITIALIZERS = [
    Constant(2.5),
    Normal(0.02),
    TruncatedNormal(0.02),
    Uniform(-0.5, 0.5),
    SoftplusInverse(),
]


ZERO = Constant(0.0)


def spec(init: Initializer = ZERO, shape: tuple[int, ...] = (4, 6), **fields: Any) -> ParamSpec:
    return ParamSpec(shape, ("",) * len(shape), init, **fields)


def layer() -> dict[str, Any]:
    return {
        "w": spec(Normal(0.02), (64, 48), tags=frozenset({"matrix"})),
        "norm": spec(Constant(1.0), (48,), tags=frozenset({"no_decay"})),
        "A_log": spec(Constant(math.log(15.3)), (3,), dtype=F32, tags=frozenset({"no_decay"})),
        "absent": (),
        "experts": [
            spec(Uniform(-0.5, 0.5), (2, 8, 8), tags=frozenset({"matrix", "expert"}))
            for _ in range(2)
        ],
    }


# ---------------------------------------------------------------------------------------- ParamSpec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"shape": (2, 3), "axes": ("hidden",)},
            r"axes=\('hidden',\): needs one name per dimension of shape \(2, 3\)",
        ),
        (
            {"shape": (2, 3), "axes": ("hiden", "mlp")},
            r"axes=\('hiden', 'mlp'\): no rule knows 'hiden', nearest: 'hidden'; known: conv, ",
        ),
        (
            {"shape": (2, 0), "axes": ("", "")},
            r"shape=\(2, 0\): every dimension must be at least 1",
        ),
        (
            {"shape": (2,), "axes": ("",), "tags": frozenset({"muon"})},
            r"tags=\['muon'\] unknown; known: .*'matrix'",
        ),
        ({"shape": (2, 6), "axes": ("", ""), "head_dim": 3}, "a per_head leaf needs a head_dim"),
        ({"shape": (2, 6), "axes": ("", ""), "tags": frozenset({"per_head"})}, "head_dim=0"),
        (
            {"shape": (2, 6), "axes": ("", ""), "tags": frozenset({"per_head"}), "head_dim": 4},
            "head_dim=4",
        ),
    ],
)
def test_a_wrong_spec_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ParamSpec(init=Constant(0.0), **fields)


def test_a_spec_is_a_leaf():
    specs = layer()
    assert tree.paths(specs) == ["A_log", "experts.0", "experts.1", "norm", "w"]
    assert specs["w"].numel == 64 * 48
    assert spec(shape=()).numel == 1


# --------------------------------------------------------------------------------------------- init


@pytest.mark.parametrize("init", INITIALIZERS, ids=lambda i: type(i).__name__)
@pytest.mark.parametrize("shape", [(5, 37), (3, 4, 9), (131,)], ids=str)
def test_a_tile_drawn_alone_is_that_slice_of_the_whole(init: Initializer, shape: tuple[int, ...]):
    specs = {"w": spec(init, shape)}
    whole = params.init(specs, KEY, dtype=F32)["w"]
    assert whole.shape == shape
    for start in (0, 1, 2):
        for size in (1, 2, 3, 7, 8, 17):
            tile = tuple(slice(min(start, n - 1), min(start + size, n)) for n in shape)
            part = params.init(specs, KEY, dtype=F32, tile=lambda path, s, tile=tile: tile)["w"]
            assert torch.equal(part, whole[tile]), tile


def test_tiles_are_chosen_per_leaf_and_cover_the_whole():
    specs = layer()
    whole = params.init(specs, KEY)

    def half(index: int) -> Any:
        def tile(path: str, s: ParamSpec) -> tuple[slice, ...]:
            n = s.shape[0] // 2
            return (slice(index * n, None if index else n), *[slice(None)] * (len(s.shape) - 1))

        return params.init(specs, KEY, tile=tile)

    joined = tree.map(lambda a, b: torch.cat([a, b]), half(0), half(1))
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), joined, whole)


def test_a_leaf_does_not_depend_on_the_others():
    specs = layer()
    whole = params.init(specs, KEY)
    fewer = {"w": specs["w"], "experts": specs["experts"][:1]}
    drawn = params.init(fewer, KEY)
    assert torch.equal(drawn["w"], whole["w"])
    assert torch.equal(drawn["experts"][0], whole["experts"][0])


def test_leaves_of_the_same_shape_and_other_keys_differ():
    same = {name: spec(Normal(1.0), (64,)) for name in "abcdef"}
    first, second = params.init(same, KEY, dtype=F32), params.init(same, random.key(8), dtype=F32)
    values = [*first.values(), *second.values()]
    for i, a in enumerate(values):
        for b in values[i + 1 :]:
            assert not torch.equal(a, b)
            assert (
                abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.6
            )  # 64 numbers: 0.125 is one sigma
    again = params.init(same, KEY, dtype=F32)
    assert all(torch.equal(first[name], again[name]) for name in same)


def test_the_distributions():
    """Mean, spread and range over 40,000 numbers: tolerances are five standard errors."""
    n = 40_000

    def drawn(init: Initializer) -> torch.Tensor:
        return params.init({"w": spec(init, (n,))}, KEY, dtype=F64)["w"]

    assert torch.equal(drawn(Constant(2.5)), torch.full((n,), 2.5, dtype=F64))
    x = drawn(Normal(0.02))
    assert abs(float(x.mean())) < 5 * 0.02 / n**0.5
    assert float(x.std()) == pytest.approx(0.02, rel=5 / (2 * n) ** 0.5)
    assert float(x.abs().max()) > 3.5 * 0.02
    x = drawn(TruncatedNormal(0.02, bound=2.0))
    assert float(x.abs().max()) <= 2 * 0.02 * (1 + 1e-6)
    assert float(x.var()) == pytest.approx(0.7737 * 0.02**2, rel=0.03)
    x = drawn(Uniform(-0.5, 0.25))
    assert (float(x.min()), float(x.max())) == pytest.approx((-0.5, 0.25), abs=1e-3)
    assert float(x.mean()) == pytest.approx(-0.125, abs=5 * 0.75 / (12 * n) ** 0.5)
    dt = torch.nn.functional.softplus(drawn(SoftplusInverse(1e-3, 1e-1)))
    assert float(dt.min()) == pytest.approx(1e-3, rel=1e-2)
    assert float(dt.max()) == pytest.approx(1e-1, rel=1e-2)
    spread = math.log(1e-1) - math.log(1e-3)
    assert float(dt.log().mean()) == pytest.approx(math.log(1e-2), abs=5 * spread / (12 * n) ** 0.5)


# --------------------------------------------------------------------------- dtypes, abstract, cast


@pytest.mark.parametrize(
    ("dtype", "ordinary", "island"),
    [(None, BF16, F32), (BF16, BF16, F32), (F32, F32, F32), (F64, F64, F64)],
)
def test_islands_stay_at_least_float32(
    dtype: torch.dtype | None, ordinary: torch.dtype, island: torch.dtype
):
    specs = layer()
    for made in (
        params.init(specs, KEY, dtype=dtype),
        params.abstract(specs, dtype=dtype),
        params.cast(params.init(specs, KEY, dtype=F64), specs, dtype or BF16),
    ):
        assert {made["w"].dtype, made["norm"].dtype, made["experts"][1].dtype} == {ordinary}
        assert made["A_log"].dtype == island


def test_the_decay_rate_survives_a_bf16_model():
    """D03: log(15.3) in bfloat16 would change the rate by 0.65%."""
    specs = layer()
    built = params.init(specs, KEY, dtype=BF16)
    for leaf in (built["A_log"], params.cast(built, specs, BF16)["A_log"]):
        assert float(leaf[0].exp()) == pytest.approx(15.3, rel=1e-6)
    assert abs(float(built["A_log"][0].to(BF16).to(F64).exp()) / 15.3 - 1) > 5e-3


def test_a_float64_run_starts_from_the_numbers_of_a_float32_run():
    specs = {"w": spec(Normal(0.02), (64,))}
    assert torch.equal(
        params.init(specs, KEY, dtype=F64)["w"].to(F32), params.init(specs, KEY, dtype=F32)["w"]
    )


@pytest.mark.parametrize(
    "call", [lambda s: params.init(s, KEY, dtype=torch.float16), params.abstract]
)
def test_other_dtypes_are_refused(call: Any):
    if call is params.abstract:
        call = lambda s: params.abstract(s, dtype=torch.int64)  # noqa: E731
    with pytest.raises(ValueError, match="must be one of"):
        call(layer())


def test_abstract_parameters_have_shapes_and_no_memory():
    specs = layer()
    made = params.abstract(specs)
    assert all(p.device.type == "meta" for p in tree.leaves(made))
    assert tree.map(lambda p: tuple(p.shape), made) == tree.map(lambda s: s.shape, specs)


def test_cast_needs_the_same_tree():
    specs = layer()
    with pytest.raises(ValueError, match="only in the second"):
        params.cast({"w": torch.ones(64, 48)}, specs, BF16)


# ------------------------------------------------------------------------------------ count, select


def test_count():
    specs = layer()
    assert params.count(specs) == 64 * 48 + 48 + 3 + 2 * 128
    assert params.count(specs, lambda path, s: "expert" in s.tags) == 256
    assert params.count(specs, lambda path, s: path.startswith("experts.1")) == 128
    assert params.count({}) == 0


def test_select():
    specs = layer()
    made = params.init(specs, KEY)
    chosen = params.select(made, specs, lambda path, s: "no_decay" in s.tags)
    assert list(chosen) == ["A_log", "norm"]
    assert chosen["norm"] is made["norm"]
    with pytest.raises(ValueError, match="trees differ in structure"):
        params.select({"w": made["w"]}, specs, lambda path, s: True)


def test_none_is_refused():
    with pytest.raises(ValueError, match="tree leaf 'b' is None"):
        params.init({"w": spec(), "b": None}, KEY)
    with pytest.raises(ValueError, match="tree leaf 'b' is None"):
        params.count({"w": spec(), "b": None})


# --------------------------------------------------------------------------------------- leaf kinds


def test_quantized_and_low_rank_leaves_are_trees_of_leaves():
    codes = torch.randint(-8, 8, (6, 4), dtype=torch.int8)
    leaf = LowRank(Quantized(codes, torch.ones(3, 4)), torch.ones(6, 2), torch.zeros(2, 4))
    assert tree.paths({"w": leaf}) == ["w.base.codes", "w.base.scales", "w.a", "w.b"]
    specs = tree.map(lambda t: spec(shape=tuple(t.shape), dtype=t.dtype), leaf)
    cast = params.cast(leaf, specs, BF16)
    assert cast.base.codes.dtype == torch.int8, "codes stay what they are"
    assert cast.a.dtype == F32, "declared float32: an island"


def test_leaf_kinds_multiply_as_their_dense_weight():
    codes = torch.randint(-8, 8, (6, 4), dtype=torch.int8)
    scales, a, b, x = (
        torch.rand(3, 4, dtype=F64),
        torch.rand(6, 2, dtype=F64),
        torch.rand(2, 4, dtype=F64),
        torch.rand(5, 6, dtype=F64),
    )
    dense = torch.stack([codes[i].to(F64) * scales[i // 2] for i in range(6)])
    torch.testing.assert_close(linear(x, Quantized(codes, scales)), x @ dense)
    torch.testing.assert_close(
        linear(x, LowRank(Quantized(codes, scales), a, b)), x @ (dense + a @ b)
    )
