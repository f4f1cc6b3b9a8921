"""Sampling: exact probabilities, decoding equal to the full forward, and what the command line
prints.
"""

import dataclasses
import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch

from k31fn import balance, config, data, model, random, sample, trainer, tree
from k31fn.checkpoint import Checkpointer, DamagedCheckpointError
from k31fn.trainer import folder
from tests import small

CPU = torch.device("cpu")
PROBS = torch.tensor([0.02, 0.4, 0.08, 0.25, 0.0, 0.05, 0.2], dtype=torch.float64)
N = 20_000


def draw(key, **kwargs):
    """How often each of the tokens comes in N rows."""
    logits = PROBS.log().expand(N, -1)
    return torch.bincount(sample._choose(logits, random.key(key), **kwargs), minlength=len(PROBS))


def chi_square(counts, probs):
    kept = probs > 0
    assert not counts[~kept].any()
    return float(((counts - N * probs)[kept].square() / (N * probs[kept])).sum()), int(
        kept.sum()
    ) - 1


def test_a_prompt_of_tokens_that_the_model_has_not():
    """A run whose tokenizer has more tokens than its model: a line, before anything is drawn."""
    cfg = small.config()
    state = model.init_balance(cfg)
    with pytest.raises(ValueError, match="prompt has token 19, the model's vocab_size is 19: the"):
        sample.generate(
            small.weights(cfg),
            cfg,
            state,
            torch.tensor([[3, 19]]),
            num_tokens=1,
            key=random.key(0),
            emit=lambda tokens: pytest.fail("drawn"),
        )


class TestChoose:
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
    def test_probabilities(self, temperature):
        """The statistic has mean k and variance 2 k; six standard deviations come by chance once in
        some 10^5.
        """
        expected = PROBS ** (1 / temperature) / (PROBS ** (1 / temperature)).sum()
        statistic, k = chi_square(draw(1, temperature=temperature), expected)
        assert statistic < k + 6 * math.sqrt(2 * k)
        wrong, k = chi_square(draw(1, temperature=temperature * 1.1), expected)
        assert wrong > k + 6 * math.sqrt(2 * k)

    @pytest.mark.parametrize(
        ("top_p", "support"),
        [
            (1e-9, [1]),
            (0.39, [1]),
            (0.41, [1, 3]),
            (0.64, [1, 3]),
            (0.66, [1, 3, 6]),
            (0.84, [1, 3, 6]),
            (0.86, [1, 2, 3, 6]),
            (0.99, [0, 1, 2, 3, 5, 6]),
            (1.0, [0, 1, 2, 3, 5, 6]),
        ],
    )
    def test_top_p_keeps_the_fewest_tokens(self, top_p, support):
        counts = draw(2, top_p=top_p)
        assert counts.nonzero().flatten().tolist() == support
        kept = torch.zeros_like(PROBS)
        kept[support] = PROBS[support] / PROBS[support].sum()
        statistic, k = chi_square(counts, kept)
        assert statistic <= k + 6 * math.sqrt(2 * k)

    def test_a_sum_that_hits_top_p_exactly(self):
        logits = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log().expand(N, -1)
        assert sample._choose(logits, random.key(0), top_p=0.75).unique().tolist() == [0, 1]

    def test_temperature_zero_and_nearly_zero(self):
        logits = torch.randn(50, 9)
        for temperature in (0.0, 1e-6):
            chosen = sample._choose(logits, random.key(0), temperature=temperature)
            assert torch.equal(chosen, logits.argmax(-1))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_temperatures_that_no_number_survives(self, dtype):
        """Divided by it, logits are infinite: a difference of two is none."""
        logits = torch.tensor([[1.0, 2.0, 3.0, 0.0], [-3e38, 3e38, 0.0, 1.0]]).to(dtype)
        for temperature in (5e-324, 1e-310, 1e-200):
            chosen = sample._choose(logits, random.key(0), temperature=temperature)
            assert chosen.tolist() == [2, 1]

    def test_keys_and_rows(self):
        """The same key gives the same draw; a row's depends on its number and its logits alone."""
        logits = torch.randn(40, 30)
        first = sample._choose(logits, random.key(3))
        assert torch.equal(first, sample._choose(logits, random.key(3)))
        assert not torch.equal(first, sample._choose(logits, random.key(4)))
        assert torch.equal(first[:7], sample._choose(logits[:7], random.key(3)))
        changed = torch.cat([torch.randn(20, 30), logits[20:]])
        assert torch.equal(first[20:], sample._choose(changed, random.key(3))[20:])
        assert (
            len(sample._choose(torch.zeros(40, 30), random.key(3)).unique()) > 10
        )  # rows do not share a draw

    @pytest.mark.parametrize(
        "bad", [{"temperature": -0.1}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.1}]
    )
    def test_bad_numbers(self, bad):
        with pytest.raises(ValueError, match="must be at least 0 and top_p="):
            sample._choose(torch.zeros(1, 3), random.key(0), **bad)


@pytest.fixture(scope="module")
def parts():
    cfg = small.config()
    state = dataclasses.replace(
        model.init_balance(cfg), bias=torch.linspace(-0.1, 0.1, 15).view(3, 5)
    )
    return small.weights(cfg), cfg, state


@pytest.mark.usefixtures("unchecked")
class TestGenerate:
    def test_equals_the_full_forward_at_every_length(self, parts):
        """Longer than the top-k of 4 and than a tile of 16."""
        weights, cfg, state = parts
        prompt = small.tokens(2, 3)
        drawn = sample.generate(
            weights, cfg, state, prompt, num_tokens=18, key=random.key(0), temperature=0.0
        )
        whole = torch.cat([prompt, drawn], dim=1)
        for length in range(prompt.shape[1], whole.shape[1]):
            out = model.apply(weights, whole[:, :length], cfg, balance=state)
            assert torch.equal(
                model.logits(weights, out.hidden)[:, -1].argmax(-1), whole[:, length]
            )
        assert len(drawn.unique()) > 1

    def test_the_draws_are_those_of_choose(self, parts):
        weights, cfg, state = parts
        prompt, key = small.tokens(2, 4), random.key(5)
        drawn = sample.generate(
            weights, cfg, state, prompt, num_tokens=4, key=key, temperature=0.7, top_p=0.9
        )
        whole = torch.cat([prompt, drawn], dim=1)
        for i in range(4):
            scores = model.logits(
                weights, model.apply(weights, whole[:, : 4 + i], cfg, balance=state).hidden
            )[:, -1]
            expected = sample._choose(scores, random.fold_in(key, i), temperature=0.7, top_p=0.9)
            assert torch.equal(expected, drawn[:, i])

    def test_emits_each_column_and_ends_after_the_end_token(self, parts):
        weights, cfg, state = parts
        prompt, columns = small.tokens(3, 4), []
        free = sample.generate(
            weights, cfg, state, prompt, num_tokens=12, key=random.key(1), emit=columns.append
        )
        assert torch.equal(torch.stack(columns, dim=1), free)
        assert free.shape == (3, 12)
        end = int(free[0, 2])
        ended = sample.generate(
            weights, cfg, state, prompt, num_tokens=12, key=random.key(1), end_token=end
        )
        for before, after in zip(free.tolist(), ended.tolist(), strict=True):
            stop = before.index(end) if end in before else 12
            assert after[: stop + 1] == before[: min(stop + 1, len(after))]
            assert set(after[stop:]) <= {end}
        alone = sample.generate(
            weights, cfg, state, prompt[:1], num_tokens=12, key=random.key(1), end_token=end
        )
        assert alone.shape[1] == free[0].tolist().index(end) + 1

    def test_padded_rows_of_the_vocabulary_are_never_drawn(self, parts):
        weights, cfg, state = parts
        prompt = small.tokens(3, 4) % 5
        few = {"num_tokens": 12, "key": random.key(1), "temperature": 5.0}
        assert sample.generate(weights, cfg, state, prompt, **few).amax() >= 5
        assert sample.generate(weights, cfg, state, prompt, vocab_size=5, **few).amax() < 5

    def test_bad_calls(self, parts):
        for prompt, num_tokens in ((small.tokens(1, 3)[:, :0], 2), (small.tokens(1, 3), 0)):
            with pytest.raises(ValueError, match="both must be at least 1"):
                sample.generate(*parts, prompt, num_tokens=num_tokens, key=random.key(0))


needs_orbax = pytest.mark.skipif(
    not importlib.util.find_spec("orbax"), reason="no orbax-checkpoint"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with two checkpoints of a model that was never trained."""
    cfg = small.config(vocab_size=257, num_layers=2, full_attention_layers=(1,))
    recipe = config.Recipe(name="small", model=cfg, data=data.Config(path="stdlib"))
    where = folder.new(tmp_path_factory.mktemp("runs"), recipe)
    with Checkpointer(where / "checkpoints") as checkpoints:
        for step in (3, 8):
            state = trainer.init_state(trainer.lay_out(dataclasses.replace(recipe, seed=step)), CPU)
            bias = torch.full_like(state.balance.bias, 0.01 * step)
            checkpoints.save(
                step, dataclasses.replace(state, balance=balance.State(bias, state.balance.layers))
            )
    return where


@pytest.fixture(scope="module")
def once_loaded(run):
    return sample.load(run, where=CPU)


@pytest.fixture
def loaded(once_loaded, monkeypatch):
    """Loads the run once for many tests: a reader of checkpoints takes a second to start."""
    recipe, *state = once_loaded
    monkeypatch.setattr(
        sample, "load", lambda run, *, where: (recipe, *tree.map(lambda x: x.to(where), state))
    )


@needs_orbax
@pytest.mark.usefixtures("unchecked")
class TestCommandLine:
    def call(self, capsys, *args, status=0):
        assert sample.main([str(a) for a in args]) == status
        captured = capsys.readouterr()
        assert not (captured.out if status else captured.err)
        return captured.err if status else captured.out

    def test_load_takes_the_newest(self, run):
        recipe, weights, state = sample.load(run, where=CPU)
        expected = trainer.init_state(trainer.lay_out(dataclasses.replace(recipe, seed=8)), CPU)
        assert torch.equal(weights.head, expected.params.head)
        assert torch.equal(state.bias, torch.full((1, 5), 0.08))

    def test_prints_the_prompt_and_the_same_text_for_a_seed(self, run, capsys, loaded):
        command = [run, "--prompt", "dé", "--tokens", 12]
        first = self.call(capsys, *command)
        assert first.startswith("dé")
        assert self.call(capsys, *command) == first
        assert self.call(capsys, *command, "--seed", 1) != first

    def test_several_samples_are_saved(self, run, capsys, loaded):
        args = ["--prompt", "x", "--tokens", 5]
        out = self.call(capsys, run.parent, *args, "--count", 2, "--seed", 4, "--save")
        alone = [self.call(capsys, run, *args, "--seed", s) for s in (4, 5)]
        expected = "".join(f"--- seed {s}\n{text}" for s, text in zip((4, 5), alone, strict=True))
        assert out == f"{expected}samples: {run / 'samples.txt'}\n"
        assert (run / "samples.txt").read_text() == expected

    def test_a_users_message_is_answered(self, run, capsys, once_loaded, monkeypatch):
        """Read as in training; what is printed ends with the text of the answer."""
        recipe, *state = once_loaded
        talking = dataclasses.replace(recipe, data=data.Config(tokenizer="bytes+chat"))
        monkeypatch.setattr(sample, "load", lambda run, *, where: (talking, *state))
        asked = []

        def generated(params, cfg, state, prompt, *, end_token, emit, **kwargs):
            asked.append((prompt[0].tolist(), end_token))
            for token in (*b"ok", end_token):
                emit(torch.tensor([token]))

        monkeypatch.setattr(sample, "generate", generated)
        assert self.call(capsys, run, "--chat", "--prompt", "why?") == "why?\nok\n"
        special = {
            name: i
            for i, name in enumerate(("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), 257)
        }
        text = '<|open|>message role="user"<|sep|>why?<|close|>message<|sep|><|end_of_msg|>'
        text += '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
        parts = re.split(r"(<\|\w+\|>)", text)
        expected = [
            t for part in parts for t in ([special[part]] if part in special else part.encode())
        ]
        assert asked == [(expected, special["<|close|>"])]
        monkeypatch.setattr(sample, "load", lambda run, *, where: (recipe, *state))
        assert "the tokenizer has no <|open|>" in self.call(capsys, run, "--chat", status=2)

    def test_a_character_is_printed_when_its_last_byte_has_come(
        self, run, capsys, monkeypatch, loaded
    ):
        pieces = []

        def generated(*args, emit, **kwargs):
            for byte in "a€b".encode()[:-1] + b"\xe2\x82":
                emit(torch.tensor([byte]))
                pieces.append(capsys.readouterr().out)
            emit(torch.tensor([256]))

        monkeypatch.setattr(sample, "generate", generated)
        assert sample.main([str(run), "--prompt", ">"]) == 0
        assert pieces == [">a", "", "", "€", "", ""]
        assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}\n"

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--prompt", ""], "prompt of 0 tokens, num_tokens=400: both must be at least 1"),
            (["--tokens", "0"], "tokens=0 must be at least 1"),
            (["--temperature", "-1"], "temperature=-1.0 must be at least 0"),
            (["--top-p", "0"], "top_p=0.0 in (0, 1]"),
            (["--seed", "-1"], "seed=-1 must be in"),
            (["--count", "0"], "count=0 must be at least 1"),
            (["--device", "gpu"], "device='gpu' must be one of"),
        ],
    )
    def test_wrong_calls(self, run, capsys, loaded, args, message):
        err = self.call(capsys, run, *args, status=2)
        assert err.startswith("k31fn.sample: ")
        assert message in err
        assert err.count("\n") == 1

    def test_no_run(self, tmp_path, capsys, run):
        assert "neither a run folder nor a folder of runs" in self.call(capsys, tmp_path, status=2)
        (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
        assert "has no complete checkpoint yet; train it first" in self.call(
            capsys, tmp_path, status=2
        )
        assert not (tmp_path / "checkpoints").exists()

    @pytest.mark.slow
    def test_a_damaged_checkpoint_is_refused(self, run, tmp_path, capsys):
        broken = tmp_path / "broken"
        for file in [p for p in run.rglob("*") if p.is_file()]:
            target = broken / file.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
        weights = trainer.init_state(
            trainer.lay_out(dataclasses.replace(folder.recipe_of(run), seed=8)), CPU
        ).params.head
        pattern = weights.numpy().tobytes()[:64]
        (hit,) = [
            p
            for p in (broken / "checkpoints" / "8").rglob("*")
            if p.is_file() and pattern in p.read_bytes()
        ]
        contents = bytearray(hit.read_bytes())
        contents[contents.index(pattern) + 5] ^= 1
        hit.write_bytes(contents)
        with pytest.raises(DamagedCheckpointError, match=r"damaged: 'params\.head'"):
            sample.load(broken, where=CPU)
        assert "damaged: 'params.head'" in self.call(capsys, broken, status=2)

    def test_no_code_of_a_run_is_executed(self, run, monkeypatch):
        monkeypatch.setattr("runpy.run_path", None)
        assert isinstance(sample.load(run, where=CPU)[0], config.Recipe)


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        sample.main(["--help"])
    assert end.value.code == 0
    assert "same seed, same text (default: 0)" in capsys.readouterr().out
    assert Path(sample.__file__).name == "sample.py"
