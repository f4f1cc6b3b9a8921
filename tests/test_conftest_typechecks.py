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


def test_a_wrong_shape_or_dtype_raises():
    for x, weight in (
        (torch.ones(2, 1), torch.ones(3)),  # a size that broadcasting would hide
        (torch.ones(2, 3), torch.ones(1, 3)),  # a dimension too many
        (torch.ones(2, 3, dtype=torch.int32), torch.ones(3)),  # integers for floats
    ):
        with pytest.raises(jaxtyping.TypeCheckError, match="rms_norm"):
            reference.rms_norm(x, weight, 1e-6)


def test_a_wrong_type_raises():
    with pytest.raises(jaxtyping.TypeCheckError, match="eps"):
        reference.rms_norm(torch.ones(2, 3), torch.ones(3), "small")


CASES: list[str] = []  # that this process has run


@pytest.mark.parametrize("case", ["first", "second"])
def test_the_first_case_of_a_test_is_checked(case: str):
    assert jaxtyping.config.jaxtyping_disable == bool(CASES)
    CASES.append(case)
