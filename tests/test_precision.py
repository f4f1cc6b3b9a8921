"""Dtype rules, and what breaks without them."""

import math

import pytest
import torch

from k31fn.precision import Precision, island, storage_dtype, upcast

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def test_defaults_and_good_combinations() -> None:
    assert Precision() == Precision(param=F32, compute=BF16, reduce=F32)
    for param, compute, reduce in [
        (BF16, BF16, BF16),
        (BF16, BF16, F32),
        (F32, F32, F32),
        (F64, F64, F64),
    ]:
        assert Precision(param, compute, reduce).compute == compute
    assert (
        len({Precision(), Precision(), Precision(reduce=BF16)}) == 2
    )  # hashable: it may be part of a tree's structure


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute": torch.float16}, "precision.compute=torch.float16 must be one of"),
        ({"param": torch.int64}, "precision.param=torch.int64 must be one of"),
        ({"reduce": torch.float8_e4m3fn}, "precision.reduce=torch.float8_e4m3fn must be one of"),
        (
            {"compute": F64},
            "precision.param=torch.float32 is narrower than precision.compute=torch.float64; set "
            "param",
        ),
        ({"param": BF16, "compute": F32}, "precision.param=torch.bfloat16 is narrower"),
        (
            {"compute": F32, "reduce": BF16},
            "precision.reduce=torch.bfloat16 is narrower.*set reduce to torch.float32",
        ),
    ],
)
def test_bad_combinations_are_refused(fields: dict[str, torch.dtype], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Precision(**fields)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(BF16, F32), (torch.float16, F32), (F32, F32), (F64, F64)]
)
def test_islands(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert island(dtype) == expected
    x = torch.ones(3, dtype=dtype)
    assert upcast(x).dtype == expected
    assert (upcast(x) is x) == (dtype == expected)


def test_gradient_of_upcast_keeps_the_dtype() -> None:
    grad = torch.func.grad(lambda x: upcast(x).square().sum())(torch.ones(3, dtype=BF16))
    assert grad.dtype == BF16
    assert grad.tolist() == [2, 2, 2]


def test_upcast_keeps_float64_digits() -> None:
    """The fault it exists for: with ``.float()`` a finite difference of step 1e-6 is off by a
    percent or more.
    """
    x, step = torch.tensor(1.0, dtype=F64), 1e-6

    def difference(cast) -> float:
        return float((cast(x + step).square() - cast(x - step).square()) / (2 * step))

    assert abs(difference(upcast) - 2) < 1e-8
    assert abs(difference(lambda t: t.float()) - 2) > 1e-2


@pytest.mark.parametrize(
    ("declared", "requested", "expected"),
    [
        (BF16, BF16, BF16),
        (BF16, F32, F32),
        (BF16, F64, F64),
        (F32, BF16, F32),
        (F32, F32, F32),
        (F32, F64, F64),
        (F64, BF16, F64),
        (torch.uint8, BF16, torch.uint8),
        (torch.float8_e4m3fn, F32, torch.float8_e4m3fn),
    ],
)
def test_storage_dtype(
    declared: torch.dtype, requested: torch.dtype, expected: torch.dtype
) -> None:
    assert storage_dtype(declared, requested) == expected


def test_storage_dtype_refuses_other_requests() -> None:
    with pytest.raises(ValueError, match=r"requested=torch.float16 must be one of"):
        storage_dtype(F32, torch.float16)


def test_decay_parameters_in_a_bf16_model_d03() -> None:
    """Declared float32, A_log keeps the decay rate; rounded to bfloat16 the rate is off by
    0.65%.
    """
    a_log = torch.tensor(math.log(15.3), dtype=F32)
    stored = a_log.to(storage_dtype(F32, BF16))
    assert abs(float(stored.double().exp()) / 15.3 - 1) < 1e-6
    rounded = a_log.to(storage_dtype(BF16, BF16))
    assert abs(abs(float(rounded.double().exp()) / 15.3 - 1) - 0.0065) < 1e-4
