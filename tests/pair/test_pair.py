"""A paired run tells a gradient that is 1% too large from rounding."""

import inspect
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k31fn import model, tree
from k31fn.autodiff import vjp
from k31fn.kernels import choice
from k31fn.kernels.registry import OPS, Implementation, use_impl
from k31fn.pair.__main__ import main
from k31fn.pair.judge import Leaf, Probes, loss_differs, losses_apart
from tests import small
from tests.trainer import runs

PROBES = 60


def judged(
    noise_a: float, noise_b: float, *, scale: float = 1.0, size: int = 500, other: float = 1.0
) -> Leaf:
    """A parameter of ``size`` elements with independent relative noise on both sides, beside one of
    norm ``other``.
    """
    probes = Probes(rounding=2**-8)
    for _ in range(PROBES):
        exact, a, b = torch.randn(3, size, dtype=torch.float64)
        sides = (exact + noise_a * a, scale * (exact + noise_b * b), exact)
        probes.add(*({"w": x, "other": torch.full((1,), other * size**0.5)} for x in sides))
    return next(leaf for leaf in probes.judged() if leaf.path == "w")


@pytest.mark.parametrize("noise", [0.0, 1e-6, 0.02, 0.2])
def test_noise_is_no_difference_and_one_percent_is(noise: float) -> None:
    assert judged(noise, noise).differs == ""
    assert (
        judged(noise, noise / 3).differs == ""
    )  # a better one; regressing b on a would find it 4% too large at 0.2
    one_percent = judged(noise, noise, scale=1.01, size=5000)
    assert one_percent.differs.startswith("1.0")
    assert one_percent.scale == pytest.approx(0.01, abs=3 * one_percent.deviation + 1e-9)
    assert not one_percent.unresolved
    assert judged(noise, noise, scale=0.99, size=5000).differs.startswith("0.9")


def test_what_is_too_noisy_is_unresolved_and_other_errors_are_seen() -> None:
    assert judged(0.5, 0.5, size=3).unresolved
    assert judged(0.5, 0.5, size=3, scale=1.01).differs == ""
    assert judged(0.5, 0.5, size=5000).unresolved
    assert "error 0.1" in judged(0.02, 0.1).differs  # of no direction, five times side a's
    assert judged(0.02, 0.06).differs == ""
    assert (
        judged(2.0, 6.0, other=1e4).differs == ""
    )  # both are what is left of much larger gradients
    assert not judged(0.02, 0.02).unresolved


def test_a_gradient_that_one_side_does_not_have_differs() -> None:
    probes, one = Probes(rounding=1e-7), torch.ones(3)
    for _ in range(6):
        probes.add({"w": one, "z": 0 * one}, {"w": one, "z": one}, {"w": one, "z": 0 * one})
    assert [leaf.differs for leaf in probes.judged()] == [
        "side b has a gradient, side a has none",
        "",
    ]
    (missing,) = [leaf for leaf in _probed(one, 0 * one) if leaf.path == "w"]
    assert missing.differs.startswith("0.0000 times side a's")


def _probed(a: Tensor, b: Tensor) -> list[Leaf]:
    probes = Probes(rounding=1e-7)
    for _ in range(6):
        probes.add({"w": a}, {"w": b}, {"w": a})
    return probes.judged()


def test_losses_apart_are_measured_against_those_of_another_order() -> None:
    a, wave = [2.0] * 40, [0.1 * math.sin(i) for i in range(40)]
    assert (
        losses_apart(a, [x + w for x, w in zip(a, wave, strict=True)], [2 + w / 2 for w in wave])[2]
        == ""
    )
    apart, noise, differs = losses_apart(a, [2.3] * 40, [2 + w / 2 for w in wave])
    assert (apart, noise) == (pytest.approx(0.3), pytest.approx(0.035, rel=0.1))
    assert differs == "training losses are 0.3 nats apart, at most 0.18"
    assert losses_apart(a, [2.3] * 40, [])[2] == ""
    assert "at the same parameters" in loss_differs([(2.0, 2.1, 2.001)] * 6, 2**-8)
    assert loss_differs([(2.0, 2.01, 2.001)] * 6, 2**-8) == ""


def scaled(name: str, argument: str, factor: float = 1.01) -> Callable[..., Any]:
    """The reference with one of its gradients scaled."""

    def fn(*args: Any, **kwargs: Any) -> Any:
        named = inspect.signature(OPS[name].reference).bind(*args, **kwargs).arguments
        x = named[argument]
        named[argument] = x + (factor - 1) * (x - x.detach())
        return OPS[name].reference(**named)

    return fn


def backwards(
    sources: tuple[Tensor, ...], query: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    """AttnRes with the features in reverse order: all its sums run the other way."""
    flipped = tuple(s.flip(-1) for s in sources)
    return OPS["attn_res"].reference(flipped, query.flip(-1), norm_weight.flip(-1), eps).flip(-1)


@contextmanager
def planted(op: str, fn: Callable[..., Any]) -> Iterator[None]:
    choice.parse("")
    OPS[op].implementations["planted"] = Implementation("planted", (), fn, on_request=("cpu",))
    try:
        yield
    finally:
        del OPS[op].implementations["planted"]


def pair(
    text: Path, tmp_path: Path, *args: str, steps: int = 6, **changes: Any
) -> tuple[int, dict[str, Any]]:
    config = runs.write_config(tmp_path / "c.py", runs.recipe(text, steps=steps, **changes))
    status = main([config, "--device", "cpu", "--out", str(tmp_path / "pairs"), *args])
    (folder,) = (tmp_path / "pairs" / "small").iterdir()
    assert (folder / "pair.png").stat().st_size > 10_000
    records = [json.loads(line) for line in (folder / "pair.jsonl").read_text().splitlines()]
    assert len(records) == steps
    return status, {**json.loads((folder / "report.json").read_text()), "records": records}


def test_one_percent_of_one_gradient_is_found(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with planted("kda_gated", scaled("kda_gated", "z")):
        status, report = pair(text, tmp_path, "--b", "kernels=kda_gated:planted")
    assert status == 1
    found = "gradient of kda_gated(z): 1.0100 times side a's"
    assert any(r.startswith(found) for r in report["differs"])
    worst = {r["worst"] for r in report["records"]}
    assert worst <= {f"layers.0.attn.{n}" for n in ("w_fa", "w_fb", "A_log", "dt_bias")}
    out = capsys.readouterr().out
    assert "the sides differ" in out
    assert " 1.0100 !" in out


@pytest.mark.slow
def test_another_order_of_sums_is_no_difference(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with planted("attn_res", backwards):
        status, report = pair(text, tmp_path, "--b", "kernels=attn_res:planted")
    assert status == 0, report["differs"]
    found = report["records"][0]
    assert 0 < found["grad_apart"] < 1e-5  # it is another order
    assert {x["path"] for x in report["operators"]} == {
        f"attn_res({n})" for n in ("sources", "query", "norm_weight")
    }
    assert all(x["error_b"] < 1e-5 for x in report["operators"])
    assert report["milliseconds"]["a"] > 0
    assert report["peak_bytes"]["b"] > 0
    assert "the sides agree" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("argument", ["query", ""])
def test_in_bfloat16(text: Path, tmp_path: Path, argument: str) -> None:
    """The noise of a gradient is some percent there."""
    fn = scaled("attn_res", argument) if argument else backwards
    with planted("attn_res", fn):
        status, report = pair(
            text, tmp_path, "--b", "kernels=attn_res:planted", steps=60, compute="bfloat16"
        )
    assert status == (1 if argument else 0), report["differs"]
    noise = {x["path"]: x["error_a"] for x in report["parameters"]}
    assert noise["layers.0.attn.w_q"] > 0.01
    if argument:
        assert any("gradient of attn_res(query): 1.0" in r for r in report["differs"])


@pytest.mark.slow
def test_both_start_from_a_checkpoint(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from k31fn.trainer import main as train

    config = runs.write_config(tmp_path / "t.py", runs.recipe(text, steps=5))
    assert train([config, "--runs", str(tmp_path / "runs"), "--device", "cpu"]) == 0
    run = runs.only_run(tmp_path / "runs")
    status, report = pair(text, tmp_path, "--start", str(run), "--b", "remat=layer")
    assert status == 0
    assert [r["step"] for r in report["records"]] == list(range(5, 11))
    first, *_ = (r["train/loss"] for r in runs.records(run) if "train/loss" in r)
    assert report["records"][0]["loss/a"] < first - 0.5  # not the loss of initial values
    assert report["records"][0]["loss/a"] == report["records"][0]["loss/b"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--b", "kernels=tritn"],
            "--b kernels='tritn': no op has an implementation 'tritn'; there are",
        ),
        (
            ["--b", "kernels=grouped_matmul:grouped_mm"],
            "--b kernels: grouped_matmul:grouped_mm runs on cuda",
        ),
        (["--b", "remat"], "--b 'remat' must be kernels=WHAT or FIELD=VALUE"),
        (
            ["--b", "seed=3"],
            "--b seed=3: both sides train on the same rows; set it for both, with --seed",
        ),
        (["--b", "model.moe.num-experts=6"], "the sides have other parameters"),
        (["--steps", "3"], "steps=3 with probe_every=1: gradients are compared 3 times"),
        (["--start", "nowhere"], "nowhere is neither a run folder nor a folder of runs"),
        (["--probe-every", "-1"], "probe_every=-1 must be at least 0"),
    ],
)
def test_a_wrong_call_is_refused(
    args: list[str], message: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.write_config(tmp_path / "c.py", runs.recipe(text, steps=6))
    assert main([config, "--device", "cpu", "--out", str(tmp_path / "pairs"), *args]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "pairs").exists()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "kernels=attn_res:triton,mhc_pre:reference" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["--b", "x"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_the_choice_holds_in_a_backward_on_another_thread(
    remat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's backward runs on threads of the engine, whose context knows of no choice: no operator
    may ask it then.
    """
    cfg = small.config()
    weights, biases = small.weights(cfg), model.init_balance(cfg)
    batch = model.make_batch(small.tokens(2, 12), vocab_size=cfg.vocab_size)

    def f(p: Any) -> Tensor:
        return model.loss(p, batch, cfg, balance=biases, remat=remat)[0]

    choice.parse("")
    trapped = []
    for op in OPS.values():

        def trap(*args: Any, op: str = op.name, **kwargs: Any) -> Any:
            trapped.append(op)
            raise AssertionError(op)

        monkeypatch.setattr(op, "implementations", {"trap": Implementation("trap", ("cpu",), trap)})
    with use_impl(**choice.parse("reference")):
        value, pull = vjp(f, weights)
    grads: list[Any] = []
    thread = threading.Thread(target=lambda: grads.append(pull(torch.ones_like(value))[0]))
    thread.start()
    thread.join()
    assert not trapped
    assert sum(float(g.square().sum()) for g in tree.leaves(grads)) > 0
    with pytest.raises(AssertionError):
        f(weights)
