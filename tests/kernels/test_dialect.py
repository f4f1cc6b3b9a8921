"""What the tests of fused kernels rest on: Triton's interpreter, and the dialect that all backends
have.
"""

import pytest
import torch

from k31fn.kernels.launch import INTERPRETED
from tests.kernels.fused import DEVICE
from tools.kernel_builds import dialect, files

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def product(a_ptr, b_ptr, c_ptr, N: tl.constexpr, WIDE: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    a, b = tl.load(a_ptr + tile), tl.load(b_ptr + tile)
    if WIDE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    tl.store(c_ptr + tile, tl.dot(a, b, input_precision="ieee"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_integer_product_is_exact(dtype: torch.dtype) -> None:
    """The interpreter multiplies the bit patterns of bfloat16 (seen in Triton 3.9), so kernels
    widen them for it.
    """
    a, b = (torch.randint(-8, 9, (16, 16), device=DEVICE).to(dtype) for _ in range(2))
    c = torch.full((16, 16), float("nan"), device=DEVICE)
    product[(1,)](a, b, c, N=16, WIDE=INTERPRETED)
    assert torch.equal(c, (a.double() @ b.double()).float())


@pytest.mark.parametrize("path", files(), ids=lambda p: p.parent.name)
def test_kernels_keep_to_the_dialect(path) -> None:
    assert dialect(path) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("    tl.atomic_add(p, 1.0)", "order"),
        ("    tl.dot(a, b)", "tf32"),
        ("    tl.dot(a, b, input_precision='tf32')", "tf32"),
        ("    x = tl.make_block_ptr(p)", "masks"),
        ("    x = tl.cumsum(a, 0)", "triangular"),
        ("    x = a\n    for _ in range(3):\n        x = a\n        a = b + p", "carry both"),
    ],
)
def test_what_is_not_in_the_dialect_is_found(line: str, reason: str) -> None:
    (found,) = dialect(files()[0], f"@triton.jit\ndef f(p, a, b):\n{line}\n")
    assert found.startswith("3: ")
    assert reason in found
