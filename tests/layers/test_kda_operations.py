"""How many operations a KDA layer issues, forward and backward: on a GPU each is a launch at least.

Counted in Triton's interpreter: a kernel is one, whatever the interpreter does for it; views and
new memory are none.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from k31fn import params, random, tree
from k31fn.kernels.launch import INTERPRETED
from k31fn.kernels.registry import use_impl
from k31fn.layers import kda
from k31fn.segments import whole

interpreter = pytest.importorskip("triton.runtime.interpreter")
KERNELS = ("short_conv", "kda_gated", "gated_norm")


class Operations(TorchDispatchMode):
    """Names of the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [a for a in tree.leaves(args, allow_none=True) if isinstance(a, torch.Tensor)]
        memory = {a.untyped_storage().data_ptr() for a in given}
        made = [a for a in tree.leaves(out, allow_none=True) if isinstance(a, torch.Tensor)]
        is_view = all(a.untyped_storage().data_ptr() in memory for a in made)
        if func._schema.is_mutable or not (is_view or "empty" in func._schema.name):
            self.names.append(func._schema.name)
        return out


@pytest.mark.skipif(not INTERPRETED, reason="counts in Triton's interpreter")
def test_a_layer_issues_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradients of all parameters and of the input; 24 are products, of 8 weights."""
    operations = Operations()
    launch = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        operations.names.append(self.fn.__name__)
        with _disable_current_modes():
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    cfg = kda.Config(32, 1, 16)
    p = params.init(kda.specs(cfg), random.key(0), dtype=torch.bfloat16)
    x = torch.randn(1, 4, 32).bfloat16()
    packing = whole(1, 4)
    values, structure = tree.flatten((p, x))
    leaves = [value.detach().requires_grad_() for value in values]
    with use_impl(**dict.fromkeys(KERNELS, "triton")), operations:
        y = kda.apply(*tree.unflatten(structure, leaves), cfg, segments=packing).y
        torch.autograd.grad(y, leaves, x)
    products = [name for name in operations.names if name in ("aten::mm", "aten::addmm")]
    assert len(products) == 24
    assert len(operations.names) <= 50, operations.names
    # Of five gradients of x, two are added by passes over memory, the others inside products.
    assert operations.names.count("aten::add") == 2
