"""Every operator without a token, or without a row: nothing comes out, and every weight has a
gradient of zeros. So a rank that no token is routed to goes on.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from k31fn import tree
from k31fn.autodiff import vjp
from k31fn.kernels.registry import OPS, load_all, record_impls, use_impl
from tests.kernels.fused import DEVICE

load_all()
SIZES = {"B": 2, "T": 0, "S": 0, "R": 0, "H": 2, "Hk": 2, "K": 64, "N": 48, "P": 16, "V": 64}
SIZES |= {"D": 128, "I": 32, "J": 4, "E": 4, "O": 16, "G": 2, "M": 3, "Z": 11, "F": 32, "W": 4}
SIZES |= {"ND": 512, "C": 24, "C2": 24, "channels": 64, "_": 64, "W-1": 3}
ROWS = {"N": 0}
STREAMS = {"N": 4}
OTHER: dict[str, dict[str, int]] = {
    "dispatch": ROWS,
    "combine": ROWS,
    "expert_mlp": ROWS,
    "required_bias_histogram": ROWS,
    "mhc_pre": STREAMS,
    "mhc_post": STREAMS,
    "mhc_head": {**STREAMS, "C": 4, "C2": 4},
    "scaled_matmul": {"M": 0, "K": 128, "N": 128},
    "fp8_encode": {"K": 128},
}
NUMBERS = {"eps": 1e-6, "scale": 0.3, "bound": -5.0, "iterations": 3, "num_bins": 10, "topk": 3}
NUMBERS |= {"k": 3, "top_k": 3, "rank": 48}
# A layer's own tokens, of which a rank always has some (a mesh that leaves one none is refused):
# their fused forms refuse to have none.
WITH_TOKENS = ("kda", "gdn", "short_conv")
# Of weights, which have no tokens; their own tests have parts without an element.
OF_WEIGHTS = ("adamw_step", "random_bits", "stochastic_round")
REFUSED = {"fp8_encode", "scaled_matmul"}  # by their contract, which has no scale for no number
WITHOUT_GRADIENT = {"topk", "index_topk", "required_bias_histogram", "max_logits", "fp8_encode"}
WITHOUT_GRADIENT |= {"max_chosen_logits", "scaled_matmul", "head_probs"}
WITHOUT_GRADIENT |= {"choose_experts", "latent_probs"}
OF_FLOAT32 = {"choose_experts", "required_bias_histogram"}


def made(annotation: str, sizes: dict[str, int], dtype: torch.dtype) -> torch.Tensor:
    kind, dims = re.search(r"(Float|Int|Bool)\[Tensor, ['\"]([^'\"]*)['\"]\]", annotation).groups()
    shape: list[int] = []
    for name in dims.split():
        if name == "*rows":
            shape += [2, 0]
        elif not name.startswith("*"):
            shape.append(int(name) if name.isdigit() else sizes[name])
    if kind == "Float":
        return (torch.randn(shape) * 0.1).to(dtype).to(DEVICE)
    return torch.zeros(shape, dtype=torch.bool if kind == "Bool" else torch.int64, device=DEVICE)


def arguments(name: str, dtype: torch.dtype, sizes: dict[str, int]) -> list[Any]:
    args: list[Any] = []
    for parameter in inspect.signature(inspect.unwrap(OPS[name].reference)).parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            break
        annotation = str(parameter.annotation)
        if parameter.name in NUMBERS and "Tensor" not in annotation:
            args.append(NUMBERS[parameter.name])
        elif annotation.startswith("tuple["):
            args.append((made(annotation, sizes, dtype), made(annotation, sizes, dtype)))
        else:
            args.append(made(annotation, sizes, dtype))
    return args


def cases() -> list[Any]:
    found = []
    for name, op in sorted(OPS.items()):
        if name in OF_WEIGHTS:
            continue
        here = ["reference"]
        for impl in op.implementations.values():
            if name.startswith(WITH_TOKENS):
                continue
            # one that is the reference itself, for arguments of a kind, has nothing to add
            if impl.fn is op.reference or impl.missing():
                continue
            if DEVICE in impl.devices + impl.on_request:
                here.append(impl.name)
        for impl in here:
            found += [(name, impl, "tokens"), (name, impl, "rows")]
    return found


@pytest.mark.parametrize(("name", "impl", "without"), cases())
def test_nothing_in_nothing_out(name: str, impl: str, without: str):
    op = OPS[name]
    sizes = {**SIZES, **OTHER.get(name, {})}
    if without == "rows":
        sizes |= {"B": 0, "T": 4, "S": 4}
    low = impl not in ("reference", "ragged", "buckets") and name not in OF_FLOAT32
    args = arguments(name, torch.bfloat16 if low else torch.float32, sizes)
    if name in REFUSED:
        with use_impl(**{name: impl}), pytest.raises(ValueError, match="is empty; at least one"):
            op(*args)
        return
    chosen = {} if impl == "reference" and not op.implementations else {name: impl}
    tensors = [x for x in tree.leaves(args) if isinstance(x, torch.Tensor)]
    floats = [x for x in tensors if x.is_floating_point()]
    with use_impl(**chosen), record_impls() as ran:
        if name in WITHOUT_GRADIENT:
            out = op(*args)
        else:
            out, pull = vjp(lambda xs: op(*with_floats(args, xs)), tuple(floats))
            (grads,) = pull(tree.map(torch.ones_like, out))
            for x, grad in zip(floats, grads, strict=True):
                assert grad.shape == x.shape
                assert not grad.any(), "a gradient of nothing"
    assert set(ran) >= {(name, impl)}
    for leaf in tree.leaves(out):
        assert isinstance(leaf, torch.Tensor)
        assert not leaf.is_floating_point() or not leaf.isnan().any()


def with_floats(args: list[Any], floats: tuple[torch.Tensor, ...]) -> list[Any]:
    """The arguments with their floating tensors replaced, in order."""
    left = list(floats)
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, tuple):
            found.append(tuple(left.pop(0) for _ in arg))
        elif isinstance(arg, torch.Tensor) and arg.is_floating_point():
            found.append(left.pop(0))
        else:
            found.append(arg)
    return found
