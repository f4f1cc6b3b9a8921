"""Steps that are captured have the bits of eager ones: over the recorder for the CPU."""

import dataclasses
import signal
from types import SimpleNamespace

import pytest
import torch

from k31fn import config, jit, lora, trainer, tree
from k31fn import device as devices
from k31fn.kernels import registry
from k31fn.parallel import Mesh
from k31fn.testing import captures_on_cpu
from k31fn.trainer import current_phase
from k31fn.trainer.console import View
from k31fn.trainer.current_phase import begin_phase, check_jit
from k31fn.trainer.ranks.stop import Stop
from tests.trainer import runs

CPU = torch.device("cpu")
ADAMW = config.Optimizer(kind="adamw", peak_lr=0.01, warmup_steps=0)
MUON = config.Optimizer(kind="muon", peak_lr=0.02, warmup_steps=0)
CASES = {
    "muon, remat": {"optimizer": MUON, "remat": "layer", "micro_batches": 2},
    "master bfloat16": {"optimizer": ADAMW, "compute": "bfloat16", "master": "bfloat16"},
    "clip, spikes": {
        "optimizer": dataclasses.replace(ADAMW, qk_clip=0.01, spike=0.5),
        "remat": "cross_layer",
    },
}


@pytest.fixture(autouse=True)
def on_cpu(request):
    # the default product of the experts on a CPU reads their counts
    names = {} if request.node.get_closest_marker("cuda") else {"grouped_matmul": "reference"}
    with captures_on_cpu(), registry.use_impl(**names):
        yield


def steps(recipe, mode, count=5, device=CPU):
    """State and metrics of some steps, of which one is skipped."""
    layout = trainer.lay_out(recipe)
    lines: list[str] = []
    phase = begin_phase(layout, 0, device, mode, lines.append)
    state = trainer.init_state(layout, device)
    dataset = trainer.load_corpus(recipe).dataset
    numbers = []
    for i in range(count):
        rows = dataset.batch_at(i)
        if i == 3:
            rows = dataclasses.replace(rows, labels=torch.full_like(rows.labels, -100))
        lr = devices.number(0.01 / (i + 1), device)
        state, metrics = phase.step(state, trainer.make_batches(recipe, rows, device), lr)
        numbers.append(metrics.flat())
    return state, numbers, lines


def test_what_is_known_before_a_step():
    recipe = config.load_recipe("configs/tiny.py")
    check_jit(recipe, CPU, "on")
    with pytest.raises(ValueError, match="jit='yes' must be 'auto', 'on' or 'off'"):
        check_jit(recipe, CPU, "yes")
    with pytest.raises(ValueError, match="jit='on' on meta, which has no graphs; use 'auto'"):
        check_jit(recipe, torch.device("meta"), "on")
    for change, reason in (
        ({"mesh": Mesh(fsdp=2, ep=2)}, "mesh.ep=2: the rows of each expert are counted"),
        (
            {"mesh": Mesh(pp=2), "micro_batches": 2},
            "mesh.pp=2: the schedule of a pipeline runs on the host",
        ),
        ({"optimizer": dataclasses.replace(ADAMW, offload=True)}, "optimizer.offload: a step"),
    ):
        changed = dataclasses.replace(recipe, **change)
        check_jit(changed, CPU, "auto")
        with pytest.raises(ValueError, match=reason):
            check_jit(changed, CPU, "on")


def same(a, b):
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "case",
    [
        "clip, spikes",
        *(pytest.param(c, marks=pytest.mark.slow) for c in ("muon, remat", "master bfloat16")),
    ],
)
def test_bits_of_eager_steps(text, case):
    recipe = runs.recipe(text, **CASES[case])
    state, numbers, lines = steps(recipe, "on")
    eager_state, eager_numbers, _ = steps(recipe, "off")
    assert same(state, eager_state)
    assert same(numbers, eager_numbers)
    assert len(lines) == 1
    assert "is captured" in lines[0]


@pytest.mark.usefixtures("unchecked")
def test_auto_says_why_it_is_eager(text):
    recipe = runs.recipe(text, optimizer=dataclasses.replace(ADAMW, offload=True))
    _, _, lines = steps(recipe, "auto", 1)
    assert lines == [
        "jit: steps are not captured: optimizer.offload: a step waits for the copies to the host's "
        "memory"
    ]
    with registry.use_impl(grouped_matmul="ragged"):
        _, _, lines = steps(runs.recipe(text, optimizer=ADAMW), "auto", 3)
    assert len(lines) == 1
    assert "implementation ragged: the number of rows per expert is read on the host" in lines[0]


@pytest.mark.usefixtures("unchecked")
def test_auto_leaves_npus_alone(text, monkeypatch):
    monkeypatch.setattr(current_phase, "recorder_of", lambda kind: object())
    monkeypatch.setattr(current_phase, "label", lambda *_: None)
    lines: list[str] = []
    layout = trainer.lay_out(runs.recipe(text))
    begin_phase(layout, 0, SimpleNamespace(type="npu"), "auto", lines.append)
    (line,) = lines
    assert line.startswith("jit: steps are not captured: on an NPU, where nobody has run it, only")


@pytest.mark.usefixtures("unchecked")
def test_a_gpu_run_says_what_runs_by_its_reference(text, monkeypatch):
    monkeypatch.setattr(current_phase, "label", lambda *_: None)
    recipe = runs.recipe(text, optimizer=ADAMW)
    layout = trainer.lay_out(recipe)
    lines: list[str] = []
    phase = begin_phase(layout, 0, torch.device("cuda"), "off", lines.append)
    state = trainer.init_state(layout, CPU)  # all that is of that device is the phase
    batches = trainer.make_batches(recipe, trainer.load_corpus(recipe).dataset.batch_at(0), CPU)
    with registry.record_impls() as impls:
        state, _ = phase.step(state, batches, 0.01)
    said = list(lines)
    by_reference = {op for op, name in impls if name == "reference"}
    assert {line.partition(" runs by its reference, ")[0] for line in said} == by_reference
    calls = impls["attn_res", "reference"]
    first = f"attn_res runs by its reference, {calls} calls, the first of [4, 24, 16]: "
    assert any(line.startswith(first) for line in said)
    phase.step(state, batches, 0.01)
    assert lines == said


class StopAfter(Stop):
    """As if a signal came after so many looks at it; -1: never."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.left = looks

    def agree(self, ranks, error):
        self._number = signal.SIGTERM if self.left == 0 else self._number
        self.left -= 1
        super().agree(ranks, error)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_runs_with_phases_end_and_go_on(text, tmp_path, monkeypatch):
    """Eager or captured, or one after the other: the same records and the same checkpoint."""
    monkeypatch.setattr(trainer.run.plot, "save_loss_plot", lambda folder: None)
    phases = (config.Phase(steps=5), config.Phase(length=48, batch_size=2))
    recipe = runs.recipe(text, optimizer=ADAMW, phases=phases, eval_every=4, checkpoint_every=5)
    corpus = trainer.load_corpus(recipe)

    def go(name, mode, looks=-1):
        view = View.silent()
        monkeypatch.setattr(view, "note", lines.append)
        (tmp_path / name).mkdir(exist_ok=True)
        stop = StopAfter(looks)
        trainer.train(recipe, corpus, tmp_path / name, device=CPU, view=view, stop=stop, jit=mode)

    lines: list[str] = []
    go("eager", "off")
    assert not [line for line in lines if line.startswith("jit")]
    go("captured", "on")
    assert len([line for line in lines if "is captured" in line]) == 2
    go("both", "on", looks=8)
    go("both", "off")
    for name in ("captured", "both"):
        assert runs.records(tmp_path / name) == runs.records(tmp_path / "eager")
        assert runs.saved(tmp_path / name, 10) == runs.saved(tmp_path / "eager", 10)


@pytest.mark.usefixtures("unchecked")
def test_on_stops_before_a_step_that_cannot_be_captured(text, tmp_path):
    recipe = runs.recipe(text, optimizer=ADAMW, checkpoint_every=10)
    corpus = trainer.load_corpus(recipe)
    with (
        registry.use_impl(grouped_matmul="ragged"),
        pytest.raises(jit.CaptureError, match="implementation ragged"),
    ):
        trainer.train(
            recipe, corpus, tmp_path, device=CPU, view=View.silent(), stop=Stop(), jit="on"
        )
    # the first two steps are saved: the third has not begun
    assert runs.saved(tmp_path, 2)
    assert [r["step"] for r in runs.records(tmp_path)] == [0, 1]


TINY = {
    "adamw float32": {"optimizer": ADAMW},
    "adamw": {"optimizer": ADAMW, "compute": "bfloat16"},
    "muon, remat": {"compute": "bfloat16", "remat": "layer", "micro_batches": 2},
    "master bfloat16": {"optimizer": ADAMW, "compute": "bfloat16", "master": "bfloat16"},
    "clip, spikes": {
        "optimizer": dataclasses.replace(ADAMW, qk_clip=0.5, spike=3.0),
        "compute": "bfloat16",
        "remat": "cross_layer",
    },
    "adapters": {"optimizer": ADAMW, "compute": "bfloat16", "lora": lora.Config(rank=2)},
}


@pytest.mark.cuda
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", TINY)
def test_bits_of_eager_steps_on_a_gpu(case):
    tiny = dataclasses.replace(config.load_recipe("configs/tiny.py"), batch_size=8)
    recipe = dataclasses.replace(tiny, **TINY[case])
    device = torch.device("cuda")
    # in float32, also that of adapters, the device's product of the experts reads their counts
    wide = case in ("adamw float32", "adapters")
    with registry.use_impl(**({"grouped_matmul": "reference"} if wide else {})):
        state, numbers, lines = steps(recipe, "on", 8, device)
        eager_state, eager_numbers, _ = steps(recipe, "off", 8, device)
    assert same(state, eager_state)
    assert same(numbers, eager_numbers)
    (line,) = [line for line in lines if line.startswith("jit")]
    assert "is captured" in line
