"""A gradient or a loss that is not finite is a difference, wherever it is."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn.kernels.registry import OPS
from k31fn.pair.judge import Leaf, Probes, loss_differs, losses_apart
from tests.pair.test_pair import pair, planted

BAD = [math.nan, math.inf, -math.inf]


def probed(bad: float, where: str, *, probes: int = 12) -> tuple[Probes, list[dict[str, float]]]:
    """Two parameters; one element of the first is ``bad`` on the sides ``where``, in the fifth
    probe and the last.
    """
    found, apart = Probes(rounding=1e-7), []
    for i in range(probes):
        sides = {name: {"w": torch.ones(4), "v": torch.ones(3)} for name in ("a", "b", "exact")}
        for name in where.split():
            if i in (4, probes - 1):
                sides[name]["w"][2] = bad
        apart.append(found.add(*sides.values()))
    return found, apart


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("where", "text_"),
    [
        ("b", "not finite on side b in 2 of 12 probes"),
        ("a", "not finite on side a in 2 of 12 probes"),
        ("exact", "not finite by the references in 2 of 12 probes"),
        ("a b", "not finite on side a in 2, on side b in 2 of 12 probes"),
        (
            "a b exact",
            "not finite on side a in 2, on side b in 2, by the references in 2 of 12 probes",
        ),
    ],
)
def test_a_gradient_that_is_not_finite_differs(bad: float, where: str, text_: str) -> None:
    probes, apart = probed(bad, where)
    first, second = probes.judged()
    assert (first.path, first.differs) == ("w", text_)
    assert math.isnan(first.scale)
    assert second == Leaf("v", 0.0, 0.0, 0.0, 0.0, "", unresolved=False)
    assert probes.group(["v", "w"]).differs == text_
    for i, found in enumerate(apart):
        assert all(map(math.isfinite, found.values())) is (i not in (4, 11))
        assert found["v"] == 0.0
    assert not any(leaf.differs for leaf in probed(1.0, where)[0].judged())


def test_one_that_was_probed_seldom_differs_too() -> None:
    assert [leaf.path for leaf in probed(math.nan, "b", probes=5)[0].judged()] == ["w"]
    assert probed(1.0, "b", probes=5)[0].judged() == []


@pytest.mark.parametrize("bad", BAD)
def test_a_loss_that_is_not_finite_differs(bad: float) -> None:
    equal = [(2.0, 2.0, 2.0)] * 6
    assert loss_differs(equal, 1e-7) == ""
    assert loss_differs([*equal, (2.0, bad, 2.0)], 1e-7) == (
        "loss at the same parameters: not finite on side b in 1 of 7 probes"
    )
    assert "by the references in 6 of 6" in loss_differs([(bad, bad, bad)] * 6, 1e-7)
    a, b = [2.0] * 8, [bad, *[2.0] * 7]  # in the first half, whose losses are not compared
    assert losses_apart(a, a, a)[2] == ""
    assert losses_apart(a, b, a)[2] == "training loss: not finite on side b in 1 of 8 steps"
    assert losses_apart(b, b, [])[2].startswith(
        "training loss: not finite on side a in 1, on side b in 1"
    )
    assert "rows reversed in 1 of 8" in losses_apart(a, a, b)[2]


def spoilt(sources: tuple[Tensor, ...], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """AttnRes whose first element of the query's gradient is NaN: 0 times the slope of a root
    at 0.
    """
    nothing = 0 * (query[:1] - query[:1].detach()).sqrt()
    spoilt_query = torch.cat([query[:1] + nothing, query[1:]])
    return OPS["attn_res"].reference(sources, spoilt_query, norm_weight, eps)


def refuse(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def test_an_operator_with_a_gradient_of_nan_is_found(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with planted("attn_res", spoilt):
        status, report = pair(text, tmp_path, "--b", "kernels=attn_res:planted", batch_size=1)
    assert status == 1
    assert "gradient of attn_res(query): not finite on side b in 6 of 6 probes" in report["differs"]
    assert "gradient norm: not finite on side b in 6 of 6 steps" in report["differs"]
    assert not any(
        "on side a" in reason or "attn_res(sources)" in reason for reason in report["differs"]
    )
    for record in report["records"]:
        assert record["worst"].endswith("mix.query")
        assert (
            record["worst_apart"] == record["grad_apart"] == record["grad_apart/ffn_mix"] == "NaN"
        )
        assert record["grad_apart/kda"] < 1e-5
    (folder,) = (tmp_path / "pairs" / "small").iterdir()
    strict = json.loads((folder / "report.json").read_text(), parse_constant=refuse)
    assert strict["noise"] is None  # a batch of one row has no other order
    assert {x["scale"] for x in strict["operators"] if x["path"] == "attn_res(query)"} == {"NaN"}
    for line in (folder / "pair.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    out = capsys.readouterr().out
    assert "gradients nan, layers.0.ffn_mix.query nan" in out
    assert "layers.0.ffn_mix.query nan !" in out
    operator = next(line for line in out.splitlines() if line.startswith("attn_res(query)"))
    assert operator.split() == ["attn_res(query)", *["nan"] * 4, "!"]


@pytest.mark.slow
def test_the_same_of_both_sides_is_no_agreement(text: Path, tmp_path: Path) -> None:
    with planted("attn_res", spoilt):
        status, report = pair(
            text, tmp_path, "--a", "kernels=attn_res:planted", "--b", "kernels=attn_res:planted"
        )
    assert status == 1
    both = "not finite on side a in 6, on side b in 6 of 6 probes"  # and finite by the references
    assert f"gradient of final_mix.query: {both}" in report["differs"]
