from __future__ import annotations

import dataclasses
from typing import Any, Generic, NamedTuple

import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor
from torch.func import functional_call, grad, vmap

from k31fn import tree
from k31fn.typing import Leaf


@tree.dataclass
class Layer(Generic[Leaf]):
    w: Leaf
    b: Any
    name: str = tree.static(default="layer")


class Both(NamedTuple):
    first: Any
    second: Any


def nested() -> dict[str, Any]:
    return {"z": [Layer(1, ()), Layer(2, (3, 4), "second")], "a": Both(5, {"k": 6})}


def test_paths_read_like_attribute_access():
    pairs = tree.flatten_with_paths(nested())
    assert pairs == [
        ("a.first", 5),
        ("a.second.k", 6),
        ("z.0.w", 1),
        ("z.1.w", 2),
        ("z.1.b.0", 3),
        ("z.1.b.1", 4),
    ]
    assert tree.paths(7) == [""]
    assert tree.paths(()) == []


def test_flatten_and_unflatten_are_inverse_and_keep_types():
    values, structure = tree.flatten(nested())
    again = tree.unflatten(structure, [10 * v for v in values])
    assert again == {"z": [Layer(10, ()), Layer(20, (30, 40), "second")], "a": Both(50, {"k": 60})}
    assert isinstance(again["a"], Both)
    assert list(again) == ["z", "a"], "dict order survives although leaves come by sorted key"


def test_arithmetic():
    a = {"x": torch.tensor([1.0, 2.0]), "y": (torch.tensor(3.0),), "z": ()}
    b = tree.scale(2, a)
    assert tree.vdot(a, b) == 2 * (1 + 4 + 9)
    assert tree.vdot(tree.add(a, b), tree.zeros_like(a)) == 0
    assert tree.leaves(tree.add(a, tree.scale(torch.tensor(-0.5, dtype=torch.float64), b)))[1] == 0
    narrow = {"x": torch.full((1000,), 1.0, dtype=torch.bfloat16)}
    assert tree.vdot(narrow, narrow) == 1000  # in bfloat16 the sum would stop at 256
    assert tree.scale(torch.tensor(2.0), narrow)["x"].dtype == torch.bfloat16
    assert tree.vdot(torch.tensor([1j]), torch.tensor([1j])) == 1
    with pytest.raises(ValueError, match="the tree comes second"):
        tree.scale(torch.ones(2), a)
    with pytest.raises(ValueError, match="only in the first: "):
        tree.add(a, {"x": a["x"]})
    with pytest.raises(ValueError, match="no leaf"):
        tree.vdot((), ())
    with pytest.raises(ValueError, match=r"leaves of shapes \[2\] and \[1\]"):
        tree.vdot(torch.ones(2), torch.ones(1))


def test_rebuilding_skips_init():
    @tree.dataclass
    class Checked:
        value: Any

        def __post_init__(self) -> None:
            raise AssertionError("ran")

    checked = object.__new__(Checked)
    object.__setattr__(checked, "value", 1)
    assert tree.map(lambda v: v + 1, checked).value == 2


def test_static_fields_are_structure():
    assert tree.leaves(Layer(1, 2, "x")) == [1, 2]
    assert tree.map(lambda v: -v, Layer(1, 2, "x")) == Layer(-1, -2, "x")
    assert tree.flatten(Layer(1, 2, "x"))[1] != tree.flatten(Layer(1, 2, "y"))[1]
    with pytest.raises(ValueError, match=r"same paths.*'x'.*against.*'y'"):
        tree.map(lambda a, b: a, Layer(1, 2, "x"), Layer(1, 2, "y"))


def test_dataclasses_are_frozen_generic_and_replaceable():
    layer = Layer[int](1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.w = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert dataclasses.replace(layer, w=3) == Layer(3, 2)


def test_both_pytree_libraries_know_a_dataclass():
    layer = Layer(torch.ones(2), {"k": torch.zeros(3)})
    ours, theirs = tree.leaves(layer), torch_pytree.tree_leaves(layer)
    assert all(a is b for a, b in zip(ours, theirs, strict=True))
    assert isinstance(torch_pytree.tree_map(lambda t: t + 1, layer), Layer)
    names = [torch_pytree.keystr(path) for path, _ in torch_pytree.tree_flatten_with_path(layer)[0]]
    assert names == [".w", ".b['k']"]


def test_dataclasses_pass_through_torch_func():
    layer = Layer(torch.tensor([1.0, 2.0]), {"k": torch.tensor([3.0, 4.0])}, "kept")
    gradient = grad(lambda p: (p.w * p.b["k"]).sum())(layer)
    assert isinstance(gradient, Layer)
    assert gradient.name == "kept"
    assert torch.equal(gradient.w, layer.b["k"])
    stacked = tree.map(lambda t: torch.stack([t, 2 * t]), layer)
    samples = vmap(grad(lambda p: (p.w * p.b["k"]).sum()))(stacked)
    assert torch.equal(samples.b["k"], torch.stack([layer.w, 2 * layer.w]))


def test_torch_modules_take_their_parameters_from_paths():
    """functional_call names parameters with dots, as paths do."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    weights = {"0": Layer(torch.eye(2), ())}
    named = {path.replace(".w", ".weight"): w for path, w in tree.flatten_with_paths(weights)}
    assert torch.equal(functional_call(module, named, torch.ones(2)), torch.ones(2))


def test_map_needs_the_same_structure_and_names_the_difference():
    a, b = {"x": 1, "y": {"k": 2}}, {"x": 10, "y": {"k": 20}}
    assert tree.map(lambda p, q: p + q, a, b) == {"x": 11, "y": {"k": 22}}
    with pytest.raises(
        ValueError, match=r"2 against 3 leaves; only in the first: \['y.k'\].*\['y.m', 'z'\]"
    ):
        tree.map(lambda p, q: p, a, {"x": 1, "y": {"m": 2}, "z": 3})
    with pytest.raises(ValueError, match=r"same paths: .*against"):
        tree.map(lambda p, q: p, [1], (1,))


def test_map_with_path_and_is_leaf():
    assert tree.map_with_path(lambda p, v: f"{p}={v}", {"a": [1, 2]}) == {"a": ["a.0=1", "a.1=2"]}
    pairs = lambda v: isinstance(v, Both)  # noqa: E731
    assert tree.map(
        lambda v: v.first if isinstance(v, Both) else v, [Both(1, 2), 3], is_leaf=pairs
    ) == [1, 3]
    assert tree.paths([Both(1, 2), 3], is_leaf=pairs) == ["0", "1"]


@pytest.mark.parametrize(
    "flatten",
    [
        tree.flatten,
        tree.leaves,
        tree.paths,
        tree.flatten_with_paths,
        lambda t: tree.map(lambda v: v, t),
        lambda t: tree.map(lambda v, w: v, {"a": [1, 2]}, t),
        lambda t: tree.map_with_path(lambda p, v: v, t),
    ],
)
def test_none_is_refused_with_its_path(flatten: Any):
    with pytest.raises(
        ValueError, match=r"tree leaf 'a\.1' is None: None is not a leaf; write \(\) for an absent"
    ):
        flatten({"a": [1, None]})


def test_none_is_allowed_where_gradients_may_be_absent():
    assert tree.leaves({"a": None, "b": 1}, allow_none=True) == [None, 1]
    assert tree.flatten_with_paths({"a": None}, allow_none=True) == [("a", None)]


def test_absent_parts_have_no_leaf():
    assert tree.leaves(Layer((), ())) == []
    assert tree.map(lambda v: v, Layer((), {"k": ()})) == Layer((), {"k": ()})


def test_tensors_of_any_kind_are_leaves():
    parameter = torch.nn.Parameter(torch.ones(1))
    assert tree.leaves([parameter, torch.ones(()), torch.Size([1])])[0] is parameter
    assert isinstance(tree.leaves(Layer(torch.ones(2), ()))[0], Tensor)
