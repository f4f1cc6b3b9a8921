import ast
from pathlib import Path

import pytest

from tools import density, house_rules

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


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("from k31fn import tree", True),
        ("from k31fn.parallel import Mesh, fsdp", True),
        ("from k31fn.layers.linear import linear", True),
        ("from k31fns.a.b import c", True),
        ("import k31fn.parallel", True),
        ("from k31fn.parallel.mesh import Mesh", False),
        ("import k31fn.parallel.mesh", False),
        ("from k31fn.layers.linear.inner import linear", False),
    ],
)
def test_user_code_imports_from_doors(code: str, allowed: bool):
    findings = house_rules.check_user_code("examples/scratch.py", f"\n{code}\n")
    if allowed:
        assert findings == []
    else:
        ((_, line, rule, _),) = findings
        assert line == 2
        assert "lies behind a door" in rule


def test_the_library_imports_from_where_a_name_is_defined():
    door = "from k31fn.parallel.mesh import Mesh\nfrom k31fn import tree\nAXIS = 1\n"
    doors = house_rules.doors_of({"k31fn/parallel/__init__.py": door, OTHER: "from x import y"})
    assert doors == {"k31fn.parallel": {"Mesh": "k31fn.parallel.mesh"}}
    (finding,) = house_rules.check(OTHER, "from k31fn.parallel import AXIS, Mesh, fsdp\n", doors)
    assert str(finding) == (
        f"{OTHER}:1: k31fn.parallel only hands Mesh on, import it from k31fn.parallel.mesh"
    )
    assert house_rules.check(OTHER, "from k31fn.parallel.mesh import Mesh\n", doors) == []
    assert house_rules.check("k31fn/parallel/__init__.py", door, doors) == []


def function(lines: int, docstring: int = 0) -> str:
    """A function whose body has ``lines`` lines, ``docstring`` more of them its docstring."""
    doc = ['    """' + "\n" * (docstring - 1) + '    """'] if docstring else []
    return "\n".join(["def f():", *doc, *["    x = 1"] * lines]) + "\n"


@pytest.mark.parametrize(
    ("path", "most"), [(OTHER, 80), (LAYER, 80), ("k31fn/kernels/kda/triton.py", 120)]
)
def test_function_length_limit(path: str, most: int):
    assert rules(path, function(most)) == []
    assert rules(path, function(most, docstring=30)) == []
    assert rules(path, function(most + 1)) == [
        (1, f"function f has {most + 1} lines in its body, at most {most}")
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
    file.write_text("y = 1  # a reason: comments are counted too\n")
    assert house_rules.main(["k31fn"]) == 0
    (tmp_path / "train.py").write_text("from k31fn.trainer.cli import main\n")
    assert house_rules.main(["k31fn"]) == 1, "user code is checked whatever is given"
    (tmp_path / "train.py").unlink()
    file.write_text("y = x.float()  # no reason\n")
    capsys.readouterr()
    assert house_rules.main(["k31fn"]) == 1
    assert capsys.readouterr().out.endswith(
        "k31fn/layers/scratch.py:1: .float() in a layer or reference, "
        "compute in torch.promote_types(x.dtype, torch.float32), so that a float64 run stays "
        "float64\n"
    )


PLAIN = """
def public(xs):  # a comment that counts
    # noqa: a comment that does not
    ys = [x for x in xs]
    if (n := len(ys)) > 1:
        return n
    return [[y for y in ys] for x in xs]
"""


def test_counts():
    """By hand: 5 statements, 5 lines of code, the outer comprehension is the nested one."""
    counts = density.count(PLAIN)
    assert counts == density.Counts(
        files=1,
        lines=7,
        code=5,
        comments=1,
        statements=5,
        comprehensions=3,
        nested=1,
        walruses=1,
        public=1,
    )
    rates = counts.plus(counts).rates()
    assert rates["comments"] == 20.0
    assert rates["walruses"] == 200.0


@pytest.mark.parametrize(
    ("decorator", "public"),
    [
        ("@triton.jit", 0),
        ("@triton.jit(do_not_specialize=['n'])", 0),
        ("@triton.autotune([], key=[])\n@triton.jit", 0),
        ("@functools.cache", 1),
        ("@torch.jit.script", 1),
    ],
)
def test_device_code_is_no_public_name(decorator: str, public: int):
    assert density.count(f"{decorator}\ndef kernel(n):\n    pass\n").public == public


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("a = [y for x in xs if (y := f(x))]", "walrus inside a comprehension"),
        (
            "a = [function_of(first, second) for first in rows for second in columns_of(first)]",
            "several `for` in a comprehension of over 60 characters",
        ),
        ("a, b = f(x), 1", "tuple-to-tuple assignment of calls"),
    ],
)
def test_plain_lines(code: str, rule: str):
    (finding,) = density.plain_lines(ast.parse(code))
    assert finding[:2] == (1, rule)


def test_lines_that_are_plain():
    code = "a = [x for y in ys for x in y]\na, b = b, a\nif (x := f()) is None:\n    pass\n"
    assert list(density.plain_lines(ast.parse(code))) == []


def test_json_of_files_is_read_by_one_reader():
    source = "import json\n\nvalue = json.loads(text)\n"
    (found,) = house_rules.check("k31fn/data/other.py", source)
    assert "json.loads is banned" in str(found)
    assert "k31fn.strict_json" in str(found)
    # What a process of the same run wrote is its own.
    assert not house_rules.check("k31fn/checkpoint/writer.py", source)
    assert not house_rules.check("benchmarks/other.py", source)
