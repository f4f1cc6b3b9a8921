from pathlib import Path

import pytest

from tools import house_rules

LAYER = "k31fn/layers/scratch.py"
REFERENCE = "k31fn/kernels/scratch/reference.py"
OTHER = "k31fn/scratch.py"


def rules(path: str, source: str) -> list[tuple[int, str]]:
    return [(f.line, f.rule) for f in house_rules.check(path, source)]


@pytest.mark.parametrize("path", [LAYER, REFERENCE, "k31fn/kernels/a/b/reference.py"])
@pytest.mark.parametrize(
    "code",
    [
        "x.float()",
        "f(x).float()",
        "x.to(torch.float32)",
        "x.to(dtype=torch.float32)",
        "x.to('cpu', torch.float)",
    ],
)
def test_a_hard_float32_in_a_layer_or_reference_is_found(path: str, code: str):
    ((line, rule),) = rules(path, f"\ny = {code}\n")
    assert line == 2
    assert "in a layer or reference" in rule


@pytest.mark.parametrize(
    "path", [OTHER, "k31fn/kernels/scratch/triton.py", "k31fn/kernels/reference/npu.py"]
)
def test_float32_elsewhere_is_no_finding(path: str):
    assert rules(path, "y = x.float() + x.to(torch.float32)\n") == []


def test_promoting_is_no_finding_in_a_layer():
    assert (
        rules(LAYER, "y = x.to(torch.promote_types(x.dtype, torch.float32))\nz = float(3)\n") == []
    )


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import torch.utils.checkpoint", "torch.utils.checkpoint is banned"),
        ("from torch.utils import checkpoint", "torch.utils.checkpoint is banned"),
        ("from torch.utils.checkpoint import checkpoint as c", "torch.utils.checkpoint is banned"),
        ("y = torch.utils.checkpoint.checkpoint(f, x)", "torch.utils.checkpoint is banned"),
        ("import pickle as p", "pickle is banned"),
        ("from pickle import loads", "pickle is banned"),
        ("torch.load(path)", "torch.load is banned"),
        ("y = eval('1')", "eval() is banned"),
        ("exec(code)", "exec() is banned"),
        ("subprocess.run('ls', shell=True)", "shell=True is banned"),
        ("subprocess.run('ls', shell=flag)", "shell=True is banned"),
        ("x = 1  # TODO later", "TODO in a file"),
        ("'''FIXME'''", "FIXME in a file"),
        ("from torch.utils.tensorboard import SummaryWriter", "torch.utils.tensorboard is banned"),
    ],
)
def test_banned_code_is_found(code: str, rule: str):
    assert rules(OTHER, f"\n\n{code}\n") == [(3, rule)]


@pytest.mark.parametrize(
    "code",
    [
        "'''Never torch.utils.checkpoint, pickle or eval().'''",
        "import torch.utils._pytree",
        "from k31fn import checkpoint",
        "model.eval()",
        "subprocess.run(['ls'], shell=False)",
        "TODOS = unpickled = 0",
    ],
)
def test_allowed_code_is_no_finding(code: str):
    assert rules(OTHER, code) == []


def test_tensorboard_is_allowed_in_trackers():
    assert rules("k31fn/trackers.py", "from torch.utils.tensorboard import SummaryWriter") == []


def function(lines: int, docstring: int = 0) -> str:
    """A function of ``lines`` lines, ``docstring`` more of them its docstring."""
    doc = ['    """' + "\n" * (docstring - 1) + '    """'] if docstring else []
    return "\n".join(["def f():", *doc, *["    x = 1"] * (lines - 1)]) + "\n"


@pytest.mark.parametrize(
    ("path", "most"), [(OTHER, 60), (LAYER, 60), ("k31fn/kernels/kda/triton.py", 120)]
)
def test_function_length_limit(path: str, most: int):
    assert rules(path, function(most)) == []
    assert rules(path, function(most, docstring=30)) == []
    assert rules(path, function(most + 1)) == [
        (1, f"function f has {most + 1} lines without its docstring, at most {most}")
    ]


@pytest.mark.parametrize(("path", "most"), [(OTHER, 400), ("k31fn/kernels/kda/triton.py", 500)])
def test_file_length_limit(path: str, most: int):
    assert rules(path, "x = 1\n" * most) == []
    assert rules(path, "x = 1\n" * (most + 1)) == [
        (most + 1, f"file of {most + 1} lines, at most {most}")
    ]


def test_command_prints_file_line_rule_fix_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert house_rules.main(["k31fn"]) == 1, "a check that looked at nothing must not pass"
    file = tmp_path / "k31fn" / "layers" / "scratch.py"
    file.parent.mkdir(parents=True)
    file.write_text("y = 1\n")
    assert house_rules.main(["k31fn"]) == 0
    file.write_text("y = x.float()\n")
    capsys.readouterr()
    assert house_rules.main(["k31fn"]) == 1
    assert capsys.readouterr().out == (
        "k31fn/layers/scratch.py:1: .float() in a layer or reference, "
        "compute in torch.promote_types(x.dtype, torch.float32), so that a float64 run stays "
        "float64\n"
    )
