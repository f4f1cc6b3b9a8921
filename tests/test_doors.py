"""What a user finds behind ``import k31fn``: names, a version, checks, and nothing heavy."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import k31fn
from k31fn import layers, params, random, segments, tree
from k31fn.layers import arguments, embedding, kda, mlp
from k31fn.parallel.collectives import pvary

ROOT = Path(__file__).parents[1]
# pair and kernels hand nothing on: the first is a command, each operator has a door of its own.
WITHOUT_NAMES = {"kernels", "pair"}
DOORS = [n for n in k31fn.__all__ if n not in {"__version__", "checked", *WITHOUT_NAMES}]


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "", **environment},
    )
    return done.stdout + done.stderr


def test_an_import_is_light_and_finds_the_rest():
    code = """
import sys, k31fn
print(sorted(m for m in sys.modules if m.startswith(("k31fn", "torch"))), k31fn.__version__)
print(k31fn.layers.mlp.Config(1, 1).beta, "torch" in sys.modules)
k31fn.layer"""
    said = run(code)
    assert said.startswith(f"['k31fn'] {k31fn.__version__}\n4.0 True\n"), said
    assert "module 'k31fn' has no attribute 'layer'" in said


def test_every_module_is_behind_the_door():
    files = {p.stem for p in (ROOT / "k31fn" / "layers").glob("[a-z]*.py")} - {"arguments"}
    assert files == set(layers.__all__)
    missing = {"commands", "limits", "regular_files", "strict_json", "annotations", "hf_format"}
    files = {p.stem for p in (ROOT / "k31fn").iterdir() if re.fullmatch(r"[a-z]\w*(\.py)?", p.name)}
    assert files - missing == set(DOORS) | WITHOUT_NAMES


@pytest.mark.parametrize("name", [*DOORS, *(f"layers.{name}" for name in layers.__all__)])
def test_dir_is_what_is_public(name: str):
    module = importlib.import_module(f"k31fn.{name}")
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


CHECKED = """
import k31fn
{call}
import torch
from k31fn.layers import mlp
from k31fn import random
cfg = mlp.Config(4, 6)
mlp.inner(mlp.init(cfg, random.key(0), dtype=torch.float32), torch.ones(2, 4), cfg)
"""


def test_checks_of_annotations_are_switched_on():
    wrong = "Type-check error .* k31fn.layers.mlp.inner"
    assert re.search(wrong, run(CHECKED.format(call="k31fn.checked()")))
    assert re.search(wrong, run(CHECKED.format(call=""), K31FN_CHECK="1"))
    assert "Type-check" not in run(CHECKED.format(call=""), K31FN_CHECK="0")
    late = run("import k31fn.tree\nk31fn.checked()")
    assert "k31fn.tree is imported already and would go unchecked; call k31fn.checked()" in late


CFG = mlp.Config(4, 6)
X = torch.ones(2, 3, 4)


def weights() -> mlp.Params[torch.Tensor]:
    return mlp.init(CFG, random.key(0), dtype=torch.float32)


# By hand, since the checks of the annotations would be first in these tests.
WRONG = {
    "cfg": (lambda: (weights(), X, kda.Config(4, 1, 4)), "mlp.apply: cfg is a kda.Config; give a"),
    "a dict": (lambda: ({"w": X}, X, CFG), r"params is a dict; give the mlp.Params of mlp.init"),
    "specs": (lambda: (mlp.specs(CFG), X, CFG), "params holds ParamSpecs, .* draw them with mlp.i"),
    "rank": (
        lambda: (weights(), X[0], CFG),
        r"x is \[3, 4\] in torch.float32; give \[B, T, hidden",
    ),
    "width": (lambda: (weights(), X[..., :2], CFG), r"x is \[2, 3, 2\] .*hidden_size=4\]"),
    "tokens": (lambda: (weights(), X.long(), CFG), "in torch.int64; give hidden states in a floa"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_of_a_layer_is_named(case: str):
    make, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        arguments.check_call(*make(), (mlp.Params, mlp.Config))


def test_segments_of_another_length_are_named():
    p = kda.init(kda.Config(4, 1, 4), random.key(0), dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"kda.apply: segments have shape \[2, 5\], x is \[2, 3, 4\]"
    ):
        kda.apply(p, X, kda.Config(4, 1, 4), segments=segments.whole(2, 5))
    classes = (kda.Params, kda.Config)
    with pytest.raises(ValueError, match=r"segments is a list; make it with segments.from_le"):
        arguments.check_call(p, X, kda.Config(4, 1, 4), classes, segments=[[3], [3]])


def test_an_init_is_that_of_the_specs():
    expected = params.init(mlp.specs(CFG), random.key(0), dtype=torch.float32)
    assert all(tree.leaves(tree.map(torch.equal, weights(), expected)))


def test_a_seed_in_the_place_of_a_key_is_named():
    code = "import k31fn; k31fn.layers.mlp.init(k31fn.layers.mlp.Config(2, 2), 7)"
    assert "key=7 is a int; a seed becomes a key by k31fn.random.key" in run(code)


def test_a_token_outside_of_the_vocabulary_is_named():
    cfg = embedding.Config(5, 2)
    p = embedding.init(cfg, random.key(0), dtype=torch.float32)
    tokens = torch.tensor([[0, 4], [5, 1]])
    with pytest.raises(ValueError, match=r"tokens\[1, 0\]=5: must be in \[0, 5\)"):
        embedding.apply(p, tokens, cfg)
    with pytest.raises(ValueError, match=r"outside of the vocabulary, \[0, 5\)"):
        torch.func.vmap(lambda row: embedding.apply(p, row[None], cfg))(tokens)


def test_pvary_of_a_tree_says_what_it_wants():
    code = "from k31fn.parallel import pvary; pvary({'w': 1}, ())"
    assert "pvary takes one tensor, got a dict; of a tree: tree.map(lambda w: pvary(w, ax" in run(
        code
    )
    assert pvary(X, ()) is X
