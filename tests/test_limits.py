"""Numbers of a config that no computation could take, refused in one line before any work."""

import dataclasses
import math
from dataclasses import dataclass, field

import pytest

from k31fn import trainer
from k31fn.config import Optimizer, load_recipe
from k31fn.config.overrides import override
from k31fn.layers import kda, kinds
from k31fn.limits import check_numbers, divisors, nearest
from k31fn.params import Normal, SoftplusInverse, Uniform
from tests import small
from tests.trainer import runs


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return runs.write_text(tmp_path_factory.mktemp("text"))


@dataclass(frozen=True)
class Inner:
    scale: float = 1.0
    most: float = field(default=math.inf, metadata={"infinite": True})


@dataclass(frozen=True)
class Outer:
    width: int = 3
    seed: int = field(default=0, metadata={"most": 1 << 64})
    inner: Inner = field(default_factory=Inner)
    weights: tuple[float, ...] = (1.0, 0.0)
    flag: bool = True
    text: str = "inf"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 1 << 31}, "width=2147483648 must be at most 2147483647"),
        ({"width": -(1 << 63)}, "width=-9223372036854775808 must be at most"),
        ({"seed": 1 << 65}, "seed=36893488147419103232 must be at most 18446744073709551616"),
        ({"inner": Inner(scale=math.nan)}, r"inner\.scale=nan must be finite"),
        ({"inner": Inner(scale=-math.inf)}, r"inner\.scale=-inf must be finite"),
        ({"inner": Inner(most=math.nan)}, r"inner\.most=nan must be finite"),
        ({"inner": Inner(scale=1e308)}, r"inner\.scale=1e\+308 must be 0 or of a size from"),
        ({"inner": Inner(scale=1e-310)}, r"inner\.scale=1e-310 must be 0 or of a size from"),
        ({"weights": (1.0, math.inf)}, r"weights\[1\]=inf must be finite"),
    ],
)
def test_what_is_refused(change, message):
    check_numbers(Outer())
    check_numbers(Outer(seed=1 << 64, width=-5, inner=Inner(scale=-1e18)))
    with pytest.raises(ValueError, match=message):
        check_numbers(dataclasses.replace(Outer(), **change))


def test_a_registered_kind_of_a_user_s_is_checked_before_its_own_functions(monkeypatch):
    """As a sublayer, whatever its ``specs`` would do with the number."""

    @dataclass(frozen=True)
    class Config:
        hidden_size: int
        temperature: float = 1.0

    def specs(cfg):
        raise AssertionError("called with a number that nothing can take")

    own = dataclasses.replace(
        kinds.kind_of(small.config(vocab_size=9, num_layers=1).sublayers["dense"]),
        name="own",
        label="own",
        config=Config,
        specs=specs,
    )
    monkeypatch.setitem(kinds._BY_NAME, "own", own)
    monkeypatch.setitem(kinds._BY_CONFIG, Config, own)
    with pytest.raises(ValueError, match=r"sublayers\['mine'\]: temperature=nan must be finite"):
        small.model.Sublayers(mine=Config(8, math.nan))


REFUSED = [
    (["--model.moe.scale", "nan"], "scale"),
    (["--model.moe.scale", "-1"], "router.Config.scale=-1.0"),
    (["--model.embedding-std", "inf"], "model.embedding_std=inf must be finite"),
    (["--model.embedding-std", "-1"], "model.Config.embedding_std=-1.0 must not be negative"),
    (["--model.moe.beta", "1e308"], "beta=1e+308 must be 0 or of a size"),
    (["--model.kda.dt-bias-init.low", "-1"], "SoftplusInverse.low=-1.0 must be positive"),
    (["--model.norm-eps", "0"], "model.Config.norm_eps=0.0"),
    (["--model.residual.eps", "nan"], "eps=nan"),
    (["--model.vocab-size", "9223372036854775807"], "vocab_size=9223372036854775807 must be at m"),
    (["--model.moe.num-experts", "2000000000"], "model.moe has 4.1e+12 parameters"),
    (["--batch-size", "1000000000001", "--micro-batches", "2"], "batch_size=1000000000001"),
    (["--batch-size", "16777215", "--micro-batches", "2"], "does not divide batch_size=16777215"),
    (["--batch-size", "16777216", "--length", "1024"], "a step of more than 4,294,967,296 tokens"),
    (["--length", "1000000007"], "length=1000000007 must be at most 134217728"),
    (["--mesh.fsdp", "2147483647"], "mesh: 2147483647 ranks are more than 1048576"),
    (["--mesh.fsdp", "1048575", "--mesh.ep", "2"], "mesh.ep=2 does not divide fsdp x cp x tp"),
    (["--threads", "1000000"], "threads=1000000 must be at least 0 and at most 1024"),
    (["--timeout", "1e300"], "timeout=1e+300 must be a positive number of seconds, at most"),
    (["--optimizer.weight-decay", "1e30"], "optimizer.weight_decay=1e+30 must be 0 or of a size"),
]


@pytest.mark.parametrize(("args", "message"), REFUSED, ids=lambda v: " ".join(v)[:40])
def test_on_the_command_line_in_one_line_before_a_folder_is_made(
    text, tmp_path, capsys, args, message
):
    config = runs.write_config(tmp_path / "small.py", runs.recipe(text))
    if message.startswith("model.moe has"):
        message = "parameters, more than 1e+15"
        args = [*args, "--model.moe.top-k", "2", "--model.moe.expert-size", "2000000"]
    assert trainer.main([config, "--runs", str(tmp_path / "runs"), *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("train.py: ")
    assert len(err.splitlines()) == 1
    assert message in err
    assert not (tmp_path / "runs").exists()


def test_norms_that_do_not_clip_and_seeds_of_64_bits_stay(text):
    made = runs.recipe(text, seed=(1 << 64) - 1, optimizer=Optimizer(max_norm=math.inf))
    again = override(made, ["--optimizer.max-norm", "inf"], prog="train.py")
    assert again == made


@pytest.mark.parametrize("name", ["tiny", "tiny_vision"])
def test_the_recipes_are_within_the_limits(name):
    check_numbers(load_recipe(runs.REPOSITORY / "configs" / f"{name}.py"))


def test_initial_values():
    for wrong in (
        lambda: Normal(-1.0),
        lambda: Normal(math.nan),
        lambda: Uniform(2.0, 1.0),
        lambda: SoftplusInverse(0.1, 0.01),
        lambda: kda.Config(8, 1, 8, dt_bias_init=SoftplusInverse(low=0.0)),
    ):
        with pytest.raises(ValueError, match=r"std|low"):
            wrong()


def test_divisors_of_large_numbers_come_at_once():
    for n in (1, 2, 36, 97, 360, 1024):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
    assert divisors(1_000_000_007) == [1, 1_000_000_007]
    assert nearest(5, divisors(36)) == "4, 6, 9"


def test_clipping_of_logits_that_a_model_does_not_have_is_refused(text):
    made = runs.recipe(text)
    layers = (("kda", "dense"), ("kda", "moe"))
    without = dataclasses.replace(made.model, layers=layers)
    clips = dataclasses.replace(made.optimizer, qk_clip=100.0)
    assert dataclasses.replace(made, optimizer=clips).clips_logits
    with pytest.raises(
        ValueError, match=r"optimizer\.qk_clip=100\.0: no layer of the model has attention logits"
    ):
        dataclasses.replace(made, model=without, optimizer=clips)
