"""README and docs: examples run, what they name exists, the Chinese twin keeps step."""

import re
from pathlib import Path

import pytest

from benchmarks import table

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "README.zh.md", *(f"docs/{p.name}" for p in sorted(ROOT.glob("docs/*.md")))]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str) -> list[str]:
    return re.findall(r"^```.*?^```$", text, flags=re.MULTILINE | re.DOTALL)


def example(page: str, section: str = "") -> str:
    """The first Python block of a page, or of its section of that title."""
    text = read(page).split(section)[1] if section else read(page)
    return text.split("```python\n")[1].split("```")[0]


def test_first_example_runs(capsys):
    code = example("README.md")
    assert len(code.strip().splitlines()) <= 20
    exec(compile(code, "README.md", "exec"), {})
    assert "torch.Size([2, 64, 64])" in capsys.readouterr().out


def test_sharding_example_runs(capsys):
    exec(compile(example("docs/meshes.md", "## Sharding"), "docs/meshes.md", "exec"), {})
    simulated, threads = (line.split() for line in capsys.readouterr().out.strip().splitlines())
    assert simulated[1:] == threads[1:]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_commands_exist(page: str):
    text = read(page)
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (folder / target).exists(), target
    for module in re.findall(r"python -m ((?:k31fn|benchmarks|examples)[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for config in re.findall(r"\bconfigs/\w+\.py", text):
        assert (ROOT / config).exists(), config
    makefile = read("Makefile")
    for goal in re.findall(r"^make (\S+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{goal}:", makefile, flags=re.MULTILINE), goal


@pytest.mark.parametrize("page", PAGES)
def test_links_to_sections_exist(page: str):
    """An anchor is the heading in lower case with dashes, as the usual hosts make it."""
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", read(page)):
        linked = ((ROOT / page).parent / target) if target else ROOT / page
        headings = re.findall(r"^#+ (.+)$", linked.read_text("utf-8"), flags=re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
        assert anchor in anchors, f"{page}: {target}#{anchor}"


def test_readme_is_short():
    assert len(read("README.md").splitlines()) <= 180


@pytest.mark.parametrize("page", [p for p in PAGES if p != "README.zh.md"])
def test_sentences_are_short(page: str):
    """At most 25 words on average, without code blocks, tables and headings."""
    lines = prose(read(page)).splitlines()
    kept = [line for line in lines if not re.match(r"\s*(\||#|!\[|<!--)", line)]
    sentences = re.split(r"(?<=[.:;!?])\s+|\n\s*\n", "\n".join(kept))
    lengths = [len(s.split()) for s in sentences if len(s.split()) > 1]
    assert lengths, page
    assert sum(lengths) / len(lengths) <= 25


def test_the_chinese_twin_keeps_step():
    """Same levels of headings, code and commands, links and numbers."""
    english, chinese = read("README.md"), read("README.zh.md")
    assert blocks(english) == blocks(chinese)
    assert heading_levels(english) == heading_levels(chinese)
    assert linked_files(english) == linked_files(chinese)
    assert numbers(english) == numbers(chinese)


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def heading_levels(text: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(text), flags=re.MULTILINE)]


def linked_files(text: str) -> set[str]:
    """All linked files but the two that name each other."""
    return set(re.findall(r"\]\(([^)#]+)\)", text)) - {"README.md", "README.zh.md"}


def numbers(text: str) -> list[str]:
    """Numbers of two digits or more, sorted: the order of words differs."""
    return sorted(re.findall(r"\d[\d,.]*\d", prose(text)))


def test_the_table_of_benchmarks_is_that_of_their_results(monkeypatch):
    monkeypatch.setattr("sys.argv", ["table", str(ROOT / "docs" / "results.md"), "--check"])
    assert table.main() == 0
