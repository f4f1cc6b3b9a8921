import pytest
import torch

from k31fn.kernels.expert_choice import choose_experts
from k31fn.kernels.registry import record_impls, use_impl
from tests.kernels.fused import DEVICE, poisoned

IMPLS = ("reference", "triton")


def case(*rows: int, experts: int) -> tuple[torch.Tensor, ...]:
    """Scores of five values, so that every row is full of ties, and some padding."""
    scores = torch.randint(0, 5, (*rows, experts)).float() / 8
    bias = torch.randint(-2, 3, (experts,)).float() / 8
    return scores.to(DEVICE), bias.to(DEVICE), (torch.rand(rows) < 0.8).to(DEVICE)


def by_sorting(
    scores: torch.Tensor, bias: torch.Tensor, valid: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Python's stable sort, and a deal of cards."""
    chosen, following, turn = [], [], 0
    rows = (scores + bias).flatten(0, -2).tolist()
    for row, real in zip(rows, valid.flatten().tolist(), strict=True):
        ranked = sorted(range(len(row)), key=lambda e: (-row[e], e))
        dealt = [(turn + j) % len(row) for j in range(top_k)]
        turn += top_k
        chosen.append(ranked[:top_k] if real else dealt)
        following.append([ranked[top_k]])
    shape = scores.shape[:-1]
    return torch.tensor(chosen).view(*shape, -1), torch.tensor(following).view(*shape, 1)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "experts", "top_k"), [((2, 13), 7, 3), ((3,), 40, 1)], ids=str)
def test_ties_go_to_the_lowest_number_and_padding_goes_round(
    impl: str, rows: tuple[int, ...], experts: int, top_k: int
):
    args = (*case(*rows, experts=experts), top_k)
    with use_impl(choose_experts=impl), record_impls() as ran, poisoned():
        found = choose_experts(*args)
    assert ran["choose_experts", impl] == 1
    for one, expected in zip(found, by_sorting(*args), strict=True):
        assert one.dtype == torch.int64
        assert torch.equal(one.cpu(), expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_scores_that_are_not_finite_choose_experts_that_exist(impl: str):
    scores = torch.tensor([[torch.nan] * 5, [torch.inf, -torch.inf, 0.0, torch.nan, -1.0]])
    bias, valid = torch.zeros(5), torch.ones(2, dtype=torch.bool)
    with use_impl(choose_experts=impl):
        chosen, following = choose_experts(*(x.to(DEVICE) for x in (scores, bias, valid)), 3)
    assert chosen.tolist() == [[0, 1, 2], [0, 2, 3]]
    assert following.tolist() == [[3], [4]]


@pytest.mark.parametrize("impl", IMPLS)
def test_samples_of_vmap_choose_as_they_do_alone(impl: str):
    scores, bias, valid = case(3, 6, experts=9)
    biases = torch.stack([bias, bias.flip(0), -bias])
    with use_impl(choose_experts=impl):
        apart = [choose_experts(*args, 2) for args in zip(scores, biases, valid, strict=True)]
        both = torch.vmap(lambda s, b, v: choose_experts(s, b, v, 2))(scores, biases, valid)
    for i, together in enumerate(both):
        assert torch.equal(together, torch.stack([one[i] for one in apart]))


def test_more_experts_than_a_program_holds_are_refused():
    scores, bias, valid = case(1, experts=5000)
    with (
        use_impl(choose_experts="triton"),
        pytest.raises(ValueError, match="at most 4096 experts, got 5000"),
    ):
        choose_experts(scores, bias, valid, 2)


@pytest.mark.cuda
def test_the_kernel_chooses_as_the_reference_at_full_size():
    scores, bias, valid = torch.rand(4099, 896), torch.randn(896) * 0.1, torch.rand(4099) < 0.9
    args = [x.to(DEVICE) for x in (scores.round(decimals=2), bias.round(decimals=2), valid)]
    with record_impls() as ran:
        found = choose_experts(*args, 16)
    assert ran["choose_experts", "triton"] == 1
    with use_impl(choose_experts="reference"):
        expected = choose_experts(*args, 16)
    assert all(map(torch.equal, found, expected))
