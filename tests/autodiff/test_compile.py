"""torch.compile is refused in one line, with a break of the graph or without."""

import pytest
import torch
from torch import Tensor

from k31fn import tree
from k31fn.autodiff import custom_vjp, value_and_grad
from k31fn.kernels import situ  # noqa: F401 (registers the operator)
from k31fn.kernels.registry import OPS

REFUSED = "under torch.compile: .*k31fn.jit.jit"


def loss(p: dict[str, Tensor]) -> Tensor:
    return (p["w"] * p["b"]).sum()


def compiled(f, **options):
    # the tracer alone: no test waits for a compiler of C++
    return torch.compile(f, backend="eager", **options)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def test_a_gradient_of_a_tree_is_refused():
    """``unhashable type: 'list'`` it said."""
    p = {"w": torch.ones(3), "b": torch.ones(3)}
    f = compiled(value_and_grad(loss))
    for _ in range(2):  # and not run as it is when it is called again
        with pytest.raises(RuntimeError, match="value_and_grad " + REFUSED):
            f(p)


def test_an_operator_and_a_step_are_refused():
    """The tracer cannot read the shape checks that tests put around a layer; this is what is in
    one.
    """
    x = torch.ones(1, 2, 8)
    with pytest.raises(RuntimeError, match="op 'situ_glu' " + REFUSED):
        compiled(lambda x: OPS["situ_glu"](x, x, 4.0, 25.0))(x)

    gradient = value_and_grad(loss)

    def step(p):
        return loss(p) + tree.vdot(p, gradient(p)[1])

    with pytest.raises(RuntimeError, match="value_and_grad " + REFUSED):
        compiled(step)({"w": torch.ones(3), "b": torch.ones(3)})


def test_a_rule_of_ones_own_is_not_dropped():
    """Its backward is wrong on purpose: were it dropped, the gradient would be right."""
    wrong = custom_vjp(lambda x: (x * x, x), lambda x, ct: (7 * ct,), name="wrong")
    x = torch.tensor(3.0)
    assert torch.func.grad(wrong)(x) == 7
    with pytest.raises(RuntimeError, match="wrong " + REFUSED):
        compiled(torch.func.grad(wrong))(x)


def test_a_whole_graph_is_refused():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(value_and_grad(loss), fullgraph=True)({"w": torch.ones(3), "b": torch.ones(3)})
