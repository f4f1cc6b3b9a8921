"""The import hook of conftest.py is on: without it every shape annotation would be a comment."""

import jaxtyping
import pytest
import torch

from k31fn.kernels.norm import reference


def test_matching_shapes_pass():
    reference.rms_norm(torch.ones(2, 3), torch.ones(3), 1e-6)


def test_matching_shapes_pass_under_transforms():
    x, weight = torch.ones(5, 2, 3), torch.ones(3)
    torch.func.vmap(torch.func.grad(lambda x: reference.rms_norm(x, weight, 1e-6).sum()))(x)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        pytest.param(torch.ones(2, 1), torch.ones(3), id="a size that broadcasting would hide"),
        pytest.param(torch.ones(2, 3), torch.ones(1, 3), id="a dimension too many"),
        pytest.param(torch.ones(2, 3, dtype=torch.int32), torch.ones(3), id="integers for floats"),
    ],
)
def test_a_wrong_shape_or_dtype_raises(x: torch.Tensor, weight: torch.Tensor):
    with pytest.raises(jaxtyping.TypeCheckError, match="rms_norm"):
        reference.rms_norm(x, weight, 1e-6)


def test_a_wrong_type_raises():
    with pytest.raises(jaxtyping.TypeCheckError, match="eps"):
        reference.rms_norm(torch.ones(2, 3), torch.ones(3), "small")
