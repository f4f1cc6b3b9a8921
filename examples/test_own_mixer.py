"""What a mixer of one's own must hold. Run: ``pytest examples/test_own_mixer.py``."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.own_mixer import mamba2, sliding_window
from k31fn import config, hf, inspect, metrics, model, params, plot, random, sample, segments
from k31fn.layers import kinds
from k31fn.parallel import AxisRules, Mesh, P, Sharding, partition, pvary
from k31fn.segments import Segments
from k31fn.testing import assert_sharded_equals_dense, check_grads
from k31fn.trainer import main

RECIPE = Path(__file__).parent / "own_mixer" / "recipe.py"
B, T, D = 2, 12, 8
MIXERS = {
    "mamba2": (mamba2, mamba2.Config(D, num_heads=2, head_dim=4, state_size=3, chunk=5)),
    "sliding_window": (sliding_window, sliding_window.Config(D, num_heads=2, head_dim=4, window=3)),
}
each_mixer = pytest.mark.parametrize("name", MIXERS)


def drawn(name: str) -> tuple[Any, Tensor]:
    """Weights of order one, so that no term is nearly absent, and tokens."""
    layer, cfg = MIXERS[name]
    weights = params.init(layer.specs(cfg), random.key(0), dtype=torch.float64)
    weights = params.tree.map(lambda w: 20 * w if w.ndim == 2 and w.shape[1] > 4 else w, weights)
    return weights, random.normal(random.key(1), (B, T, D), dtype=torch.float64)


def apply(name: str, p: Any, x: Tensor, packing: Segments | None = None) -> Tensor:
    layer, cfg = MIXERS[name]
    return layer.apply(p, x, cfg, segments=packing).y


@each_mixer
def test_gradients(name: str):
    packing = segments.from_lengths([[5, 1], [2, 3]], 6)
    p, x = drawn(name)
    check_grads(lambda p, x: apply(name, p, x, packing), (p, x[:, :6]), order=2)


@each_mixer
def test_documents_do_not_see_each_other(name: str):
    """Each document's output is what it is alone, padding's is zero, and causality holds."""
    p, x = drawn(name)
    y = apply(name, p, x, segments.from_lengths([[7, 4], [12]], T))
    for row, some in ((0, slice(0, 7)), (0, slice(7, 11)), (1, slice(0, 12))):
        alone = apply(name, p, x[row : row + 1, some])[0]
        torch.testing.assert_close(y[row, some], alone, rtol=0, atol=1e-12)
    assert torch.equal(y[0, 11], torch.zeros(D, dtype=torch.float64))
    other = x.clone()
    other[:, 6:] += 1
    assert torch.equal(apply(name, p, other)[:, :6], apply(name, p, x)[:, :6])


@each_mixer
def test_prefill_and_decode_equal_the_whole(name: str):
    layer, cfg = MIXERS[name]
    p, x = drawn(name)
    state = layer.init_state(cfg, B, dtype=torch.float64)
    pieces = []
    for piece in (x[:, :7], x[:, 7:8], x[:, 8:9], x[:, 9:]):
        y, state = layer.extend(p, piece, cfg, state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, dim=1), apply(name, p, x), rtol=0, atol=1e-12)


@each_mixer
def test_per_sample_gradients_over_packings(name: str):
    p, x = drawn(name)
    packings = segments.from_lengths([[7, 4], [3, 9]], T)

    def loss(p: Any, row: Tensor, ids: Tensor, position: Tensor) -> Tensor:
        return apply(name, p, row[None], Segments(ids[None], position[None])).square().sum()

    rows = (x, packings.ids, packings.position)
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0))(p, *rows)
    total = torch.func.grad(lambda p: apply(name, p, x, packings).square().sum())(p)
    summed = params.tree.map(lambda g: g.sum(0), per_sample)
    for got, want in zip(params.tree.leaves(summed), params.tree.leaves(total), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_against_the_recurrence_token_by_token():
    """The chunks of the state-space mixer are the loop that its equations say."""
    draw = lambda i, *shape: random.normal(random.key(i), shape, dtype=torch.float64)  # noqa: E731
    u, g, b, c = draw(2, 1, T, 2, 4), -draw(3, 1, T, 2).abs(), draw(4, 1, T, 3), draw(5, 1, T, 3)
    ids = torch.tensor([[1] * 7 + [2] * 5])
    s, outputs = torch.zeros(2, 3, 4, dtype=torch.float64), []
    for t in range(T):
        s = torch.where(ids[0, t] == ids[0, max(t - 1, 0)], g[0, t].exp()[:, None, None] * s, 0)
        s = s + b[0, t, :, None] * u[0, t, :, None]
        outputs.append(torch.einsum("hnk,n->hk", s, c[0, t]))
    got, last = mamba2._recurrence(u, g, b, c, ids, None, 5)
    torch.testing.assert_close(got[0], torch.stack(outputs), rtol=0, atol=1e-12)
    torch.testing.assert_close(last[0], s, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "mesh", "collectives"),
    [
        # x, and b with c, are gathered, and the output scattered; the backward of each is the
        # other. The gradients of three weights are summed over the ranks.
        ("mamba2", Mesh(tp=2), {"all_gather": 3, "psum_scatter": 3, "psum": 3}),
        ("sliding_window", Mesh(tp=2), {"all_gather": 2, "psum_scatter": 2}),
        # Keys and values of the other slice; and the gradients of four weights.
        ("sliding_window", Mesh(cp=2), {"all_gather": 1, "psum_scatter": 1, "psum": 4}),
        ("sliding_window", Mesh(cp=2, tp=2), {"all_gather": 3, "psum_scatter": 3, "psum": 4}),
    ],
    ids=str,
)
def test_on_a_mesh(name: str, mesh: Mesh, collectives: dict[str, int]):
    """Over heads and, where the kind says so, over the context: values and gradients of the
    whole.
    """
    layer, cfg = MIXERS[name]
    weights = partition(layer.specs(cfg), AxisRules(spread=()), mesh)
    tokens = P(("dp", "fsdp"), ("cp", "tp"))

    def on_rank(axes: Any, p: Any, x: Tensor) -> Tensor:
        whole = params.tree.map(lambda w: pvary(w, axes.data), p)
        return layer.apply(whole, x, cfg, sh=Sharding.on(axes)).y

    assert_sharded_equals_dense(
        on_rank,
        drawn(name),
        (weights, tokens),
        tokens,
        mesh,
        collectives=collectives,
        rtol=1e-10,
        atol=1e-12,
        backends=("simulated", "threads"),
    )


def test_what_a_kind_cannot_split_is_refused_by_name():
    recipe = config.load_recipe(RECIPE)
    with pytest.raises(
        ValueError, match=r"mesh\.cp=2: layers of kind mamba2 \(model\.ssm\) do not split over cp"
    ):
        dataclasses.replace(recipe, mesh=Mesh(cp=2))
    dataclasses.replace(recipe, mesh=Mesh(tp=2))


SMALL = ["--batch-size", "2", "--length", "32", "--data.path", "k31fn/layers", "--steps", "6"]
SMALL += ["--eval-every", "3", "--eval-bytes", "100", "--heldout-bytes", "100", "--threads", "1"]
SMALL += ["--checkpoint-every", "3", "--device", "cpu", "--data.heldout-fraction", "0.2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps whose last three are run again, from the recipe."""
    runs = tmp_path_factory.mktemp("runs")
    words = [str(RECIPE), *SMALL, "--runs", str(runs)]
    assert main(words) == 0
    (folder,) = (runs / "own_mixer").iterdir()
    shutil.copy(folder / "metrics.jsonl", folder / "first.jsonl")
    shutil.rmtree(folder / "checkpoints" / "6")
    assert main([*words, "--resume", "auto"]) == 0
    return folder


@pytest.mark.slow
class TestARun:
    def test_it_went_on_and_learnt_on_every_layer(self, run: Path):
        records = metrics.read(run / "metrics.jsonl")
        norms = {name for r in records for name in r if name.startswith("grad_norm/")}
        assert {"grad_norm/mamba-2", "grad_norm/sliding_window"} <= norms
        losses = [r["train/loss"] for r in records if "train/loss" in r]
        assert len(losses) == 6
        first = metrics.read(run / "first.jsonl")
        assert losses == [r["train/loss"] for r in first if "train/loss" in r]

    def test_its_config_names_the_kinds(self, run: Path):
        layers = json.loads((run / "config.json").read_text())["model"]["sublayers"]
        assert {name: layer["kind"] for name, layer in layers.items()} == {
            "ssm": "mamba2",
            "local": "sliding_window",
            "dense": "mlp",
        }
        assert config.load_recipe(run / "config.json").model == config.load(RECIPE)

    def test_without_the_recipe_it_is_refused_by_name(
        self, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.delitem(kinds._BY_NAME, "mamba2")
        assert main([str(run / "config.json")]) == 2
        said = capsys.readouterr().err
        assert "model.sublayers.ssm.kind='mamba2' is no registered kind" in said
        assert "go on with train.py RUN/config.json --recipe RECIPE.py" in said

    def test_its_config_goes_on_with_the_recipe_that_registers_its_kinds(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        """As the printed command has it after a stop, with all that the run's call had set."""
        stopped = [str(RECIPE), *SMALL, "--max-minutes", "1e-9", "--runs", str(tmp_path)]
        assert main(stopped) == 0
        *_, said, command = capsys.readouterr().out.splitlines()
        assert said.startswith("stopped by --max-minutes")
        words = shlex.split(command.partition("train.py ")[2])
        assert words[0].endswith("/config.json")
        assert words[1:] == ["--recipe", str(RECIPE)]
        monkeypatch.delitem(kinds._BY_NAME, "mamba2")
        # the recipe's modules are loaded and it registers their kinds anew
        assert main([*words, "--device", "cpu", "--threads", "1"]) == 0
        records = metrics.read(Path(words[0]).parent / "metrics.jsonl")
        assert [r["step"] for r in records if "train/loss" in r] == list(range(6))
        capsys.readouterr()
        assert main([str(RECIPE), "--resume", str(Path(words[0]).parent)]) == 2
        assert "config.json --recipe RECIPE.py alone goes on with it" in capsys.readouterr().err
        assert main([str(RECIPE), "--recipe", str(RECIPE)]) == 2
        assert "leave --recipe out" in capsys.readouterr().err

    def test_it_writes_text(self, run: Path, capsys: pytest.CaptureFixture[str]):
        words = ["--prompt", "def ", "--tokens", "4", "--device", "cpu"]
        assert sample.main([str(run), "--recipe", str(RECIPE), *words]) == 0
        assert capsys.readouterr().out.startswith("def ")

    def test_export_is_refused_by_name(self, run: Path, tmp_path: Path):
        cfg = config.load(RECIPE)
        weights = params.abstract(model.specs(cfg))
        with pytest.raises(ValueError, match=r"no place for layers of kind mamba2 \(model\.ssm\)"):
            hf.export(weights, model.init_balance(cfg), cfg, tmp_path / "out")

    def test_inspect_and_plot_show_their_names(
        self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        assert inspect.main([str(RECIPE), "--mesh.fsdp", "2"]) == 0
        shown = capsys.readouterr().out
        assert "attention   2 x (Mamba-2 sliding window)" in shown
        assert "layers.1.attn.w_q" in shown
        assert plot.main([str(run), "--out", str(tmp_path / "run.svg")]) == 0
        drawn = (tmp_path / "run.svg").read_text()
        assert "mamba-2" in drawn
        assert "sliding_window" in drawn


def test_a_config_of_no_registered_kind_is_an_error():
    """It is never filed under another kind."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        hidden_size: int = 128

    with pytest.raises(ValueError, match="is the config of no registered kind of layer"):
        config.load(RECIPE).with_sublayers(local=Config())
    with pytest.raises(ValueError, match="mlp is a channel mixer, not a token mixer"):
        kinds.token_mixer_of(config.load(RECIPE).sublayers["dense"])
    with pytest.raises(ValueError, match=r"is registered by k31fn\.layers\.kda\.Config"):
        kinds.register(dataclasses.replace(mamba2.KIND, name="kda"))
