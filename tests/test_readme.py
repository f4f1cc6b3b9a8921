"""The README's first example runs, and what it names exists."""

import re
from pathlib import Path

from benchmarks import table

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_first_example_runs(capsys):
    example = README.split("```python\n")[1].split("```")[0]
    assert len(example.strip().splitlines()) <= 20
    exec(compile(example, "README.md", "exec"), {})
    assert "torch.Size([2, 64, 64])" in capsys.readouterr().out


def test_sharding_example_runs(capsys):
    example = README.split("## Sharding")[1].split("```python\n")[1].split("```")[0]
    exec(compile(example, "README.md", "exec"), {})
    simulated, threads = (line.split() for line in capsys.readouterr().out.strip().splitlines())
    assert simulated[1:] == threads[1:]


def test_links_and_commands_exist():
    root = Path(__file__).parents[1]
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (root / target).exists(), target
    for module in re.findall(r"python -m (k31fn[\w.]*)", README):
        path = root / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    for goal in re.findall(r"^make (\S+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{goal}:", makefile, flags=re.MULTILINE), goal


def test_the_table_of_benchmarks_is_that_of_their_results(monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["table", str(Path(__file__).parents[1] / "README.md"), "--check"]
    )
    assert table.main() == 0
