"""The model as a pipeline, with and without other axes, against one device."""

from __future__ import annotations

import contextlib

import pytest
import torch

from k31fn import balance, model, params, random, tree
from k31fn.layers import mhc
from k31fn.model import stages
from k31fn.parallel.pipeline import engine, stage_ranges
from k31fn.testing import Ranks, assert_close_trees
from tests import small
from tests.parallel import cases_model
from tests.parallel.pipeline import model_cases as cases
from tests.parallel.pipeline.model_cases import Setup

SETUPS = {
    "cuts inside a block, the head alone": Setup(pp=4, cuts=(1, 3, 4), remat="layer"),
    "interleaved": Setup(kind="interleaved", chunks=2),
    "zero bubble fsdp2": Setup(fsdp=2, kind="zero_bubble", remat="layer"),
}
SLOW_SETUPS = {
    "pp2": Setup(),
    "mhc": Setup(name="mhc"),
    "mhc, interleaved fsdp2, carries rebuilt": Setup(
        name="mhc", fsdp=2, kind="interleaved", chunks=2, remat="cross_layer"
    ),
    "pp4": Setup(pp=4, micro_batches=4),
    "tp2 ep2": Setup(tp=2, ep=2),
    "fsdp2": Setup(fsdp=2, remat="layer"),
    "pp2 remat": Setup(remat="layer"),
    "plain residual": Setup(name="plain"),
    "one micro-batch": Setup(micro_batches=1),
    "four micro-batches": Setup(micro_batches=4),
    "a stage without MoE layer": Setup(name="dense half", micro_batches=4),
    "interleaved remat": Setup(kind="interleaved", chunks=2, micro_batches=4, remat="layer"),
    "interleaved fsdp2": Setup(fsdp=2, kind="interleaved", chunks=2, remat="layer"),
    "zero bubble, residuals kept": Setup(kind="zero_bubble", micro_batches=4),
    "zero bubble pp4": Setup(pp=4, kind="zero_bubble", micro_batches=4, remat="layer"),
    "zero bubble fsdp2, residuals kept": Setup(fsdp=2, kind="zero_bubble"),
    "zero bubble tp2 ep2": Setup(tp=2, ep=2, kind="zero_bubble", remat="layer"),
    "fsdp2, weights kept": Setup(fsdp=2),
    "tp2": Setup(tp=2),
    "cp2": Setup(cp=2, remat="layer"),
    "fsdp2 ep2": Setup(fsdp=2, ep=2),
    "mhc, a stage without layers": Setup(name="mhc", cuts=(0,), remat="cross_layer"),
    "mhc, interleaved": Setup(name="mhc", kind="interleaved", chunks=2),
    "mhc, zero bubble": Setup(name="mhc", kind="zero_bubble"),
    "mhc, zero bubble, carries rebuilt": Setup(name="mhc", kind="zero_bubble", remat="cross_layer"),
    "mhc, zero bubble fsdp2, carries rebuilt": Setup(
        name="mhc", fsdp=2, kind="zero_bubble", remat="cross_layer"
    ),
    "mhc, tp2 ep2": Setup(name="mhc", tp=2, ep=2, remat="cross_layer"),
    "mhc, cp2": Setup(name="mhc", cp=2, remat="intra_layer"),
    "carries rebuilt": Setup(remat="cross_layer"),
    "branches kept": Setup(remat="intra_layer"),
    "zero bubble fsdp2, branches kept": Setup(fsdp=2, kind="zero_bubble", remat="intra_layer"),
    "zero bubble fsdp2, carries rebuilt": Setup(fsdp=2, kind="zero_bubble", remat="cross_layer"),
}


def check(whole: cases.Whole, setup: Setup) -> None:
    assert_close_trees(tuple(whole), cases.dense(setup.name), rtol=1e-10, atol=1e-12)


def check_on_threads(setup: Setup) -> list[cases.OnRank]:
    results, _ = cases.on_threads(setup)
    check(cases.together(results, setup), setup)
    return results


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_loss_gradients_and_reports_equal_one_device(setup: Setup):
    """1e-10 in float64; the dense run takes all rows at once, the pipelines 2 or 4
    micro-batches.
    """
    check_on_threads(setup)


@pytest.mark.slow
@pytest.mark.parametrize("setup", SLOW_SETUPS.values(), ids=SLOW_SETUPS)
def test_more_of_them(setup: Setup):
    check_on_threads(setup)


# ---------------------------------------------------------------------------------------- processes
def check_processes(setup: Setup, ranks: Ranks) -> None:
    """float32, to 1e-5 of the largest entry of each tensor; the KL, a sum of differences of numbers
    near 1, to 1e-6 of its number of queries.
    """
    got, want = cases.on_processes(setup, ranks), cases.dense(setup.name, setup.double)
    num_queries = int(cases.micro_batches(1)[0].num_queries)
    for (path, a), b in zip(tree.flatten_with_paths(tuple(got)), tree.leaves(want), strict=True):
        if a.is_floating_point():
            assert (a - b).abs().max() <= (
                1e-6 * num_queries if path == "2.kl" else 1e-5 * b.abs().max()
            ), path
        else:
            assert torch.equal(a, b), path


@pytest.mark.slow
def test_fp32_on_two_processes(two_ranks: Ranks):
    check_processes(Setup(double=False), two_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["interleaved", "zero_bubble"])
def test_other_schedules_on_two_processes(kind: str, two_ranks: Ranks):
    check_processes(
        Setup(kind=kind, chunks=2 if kind == "interleaved" else 1, double=False), two_ranks
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zero_bubble"])
def test_hyper_connections_on_two_processes(kind: str, two_ranks: Ranks):
    chunks = 2 if kind == "interleaved" else 1
    check_processes(
        Setup(name="mhc", kind=kind, chunks=chunks, remat="cross_layer", double=False), two_ranks
    )


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"pp": 4}, {"fsdp": 2}, {"tp": 2, "ep": 2}, {"cp": 2}], ids=str)
def test_fp32_on_four_processes(axes: dict[str, int], four_ranks: Ranks):
    check_processes(Setup(double=False, **axes), four_ranks)


# ------------------------------------------------------------------------------------- what travels
@pytest.mark.parametrize(
    ("setup", "streams"),
    [
        # sent by each rank per micro-batch, in hidden states: the stream and the block that the
        # receiver lacks; back
        pytest.param(Setup(), [2, 2], marks=pytest.mark.slow),
        pytest.param(Setup(name="plain"), [1, 1], marks=pytest.mark.slow),
        pytest.param(Setup(name="mhc"), [2, 2], marks=pytest.mark.slow),  # both streams
        # into stage 1: stream and the embedding's block; 2: stream (rank 0 has made it), 3: stream
        # and its second block
        (Setup(kind="interleaved", chunks=2), [2 + 1 + 2, 2 + 1 + 2]),
        pytest.param(Setup(tp=2), [2, 2], marks=pytest.mark.slow),
    ],
    ids=["pp2", "plain", "mhc", "interleaved", "tp2"],
)
def test_bytes_on_the_wire(setup: Setup, streams: list[int]):
    _, record = cases.on_threads(setup)
    state = (
        cases.ROWS * cases.TOKENS * cases_model.D * 8 // setup.tp
    )  # of all micro-batches, float64; tp ranks share
    size = setup.mesh.world_size // setup.pp
    for rank, own in enumerate(record.ranks):
        assert own.nbytes["send"] == streams[rank // size] * state
        assert own.nbytes["recv"] == streams[1 - rank // size] * state


def check_rebuilt_early(setup: Setup) -> None:
    """A stage makes its carries again after it asked for the cotangent, and before it waits for
    it.
    """
    results, record = cases.on_threads(setup)
    check(cases.together(results, setup), setup)
    for own in record.ranks[: setup.fsdp]:  # the first stage
        events = [f"{e.what} {e.kind}" for e in own.events]
        for i in range(setup.micro_batches):
            backward = f"backward of micro-batch {i} on stage 0"
            start, end = (
                events.index(f"note rebuild for {backward}"),
                events.index(f"note {backward}"),
            )
            assert events[:start].count("issue recv") > i
            assert events[:start].count("wait recv") == i
            between = [e for e in events[start:end] if "psum" not in e]
            # the small weights of the first of its two layers, then the cotangent, then the rest
            assert between[1:] == ["issue all_gather", "wait all_gather", "wait recv"]


def test_carries_are_made_again_while_the_cotangent_travels():
    check_rebuilt_early(Setup(name="mhc", fsdp=2, remat="cross_layer"))


@pytest.mark.slow
def test_a_rebuild_that_waits_for_the_cotangent_is_found(monkeypatch):
    monkeypatch.setattr(engine, "rebuilds", lambda: contextlib.nullcontext([]))
    with pytest.raises(ValueError, match="rebuild for backward"):
        check_rebuilt_early(Setup(name="mhc", fsdp=2, remat="cross_layer"))


def test_residual_sets_and_work():
    results = check_on_threads(Setup(kind="zero_bubble", remat="layer", counted=True))
    assert [r.num_live for r in results] == [2, 2]
    for result in results:
        for work in result.work:
            assert work.input + work.weight == work.whole
            assert work.weight > 0.15 * work.whole


def test_a_rank_without_moe_layer():
    """Its state has no row; the last layer's biases update as those of the model."""
    setup = Setup(name="dense half")
    cfg, top_k = cases.CONFIGS[setup.name], cases.CFG.sublayers["moe"].top_k
    whole = balance.update(
        cases_model.biases(cfg), cases.dense(setup.name)[2].histogram, top_k=top_k
    )
    rows = []
    for result, own in zip(check_on_threads(setup), ((), (2, 3)), strict=True):
        state = cases.rows_of(cases_model.biases(cfg), own)
        rows.append(balance.update(state, result.sums[0].histogram, top_k=top_k).bias)
    assert rows[0].shape == (0, cfg.sublayers["moe"].num_experts)
    assert torch.equal(torch.cat(rows), whole.bias)


# ------------------------------------------------------------------------------------------ mutants
def drop_second(deposits, blocks, cotangents):
    for j, ct in zip(blocks, cotangents, strict=True):
        deposits.setdefault(j, ct)


def drop_arrived(deposits, blocks, cotangents):
    for j, ct in zip(blocks, cotangents, strict=True):
        deposits[j] = ct


@pytest.mark.parametrize(
    "mutant", [pytest.param(drop_second, marks=pytest.mark.slow), drop_arrived]
)
def test_a_dropped_gradient_of_a_block_is_found(mutant, monkeypatch):
    monkeypatch.setattr(engine, "_deposit", mutant)
    with pytest.raises(AssertionError, match="leaves differ"):
        check_on_threads(Setup(kind="interleaved", chunks=2))


def test_a_carry_of_one_stream_is_found(monkeypatch):
    """D27: what is sent and what the last stage reads are all streams."""
    leave = stages._leave
    monkeypatch.setattr(stages, "_leave", lambda state: leave(mhc.Carry(state.streams[:, :, :1])))
    with pytest.raises(ValueError, match="1 streams of width 16 need phi"):
        check_on_threads(Setup(name="mhc"))
    announced = lambda x: x if x.is_meta else x[:, :, :1]  # noqa: E731
    monkeypatch.setattr(stages, "_leave", lambda state: leave(mhc.Carry(announced(state.streams))))
    with pytest.raises(
        ValueError, match=r"stage 0 gives .*1, 16\].*the next stage takes .*2, 16\]"
    ):
        check_on_threads(Setup(name="mhc"))


def test_a_rescaled_running_sum_is_found(monkeypatch):
    def average(self, action, grads):
        total, new = self.grads[0], tree.leaves(grads)
        total[:] = [(a + b) / 2 for a, b in zip(total, new, strict=True)] if total else new

    monkeypatch.setattr(engine._Rank, "_accumulate", average)
    with pytest.raises(AssertionError, match="leaves differ"):
        check_on_threads(Setup())


def test_a_kl_that_a_stage_forgets_is_found(monkeypatch):
    def without(parts, batch, cfg):
        return model.weigh(parts._replace(kl=parts.kl * 0), batch, cfg)

    monkeypatch.setattr(stages, "weigh", without)
    with pytest.raises(AssertionError, match=r"layers\.1\.attn\.indexer"):
        check_on_threads(Setup())


# ------------------------------------------------------------------------------- parts of the model
def parts_of(num_stages: int, **options: object):
    return stages.stages(cases.CFG, stage_ranges(4, num_stages, **options))


def test_stages_have_the_parameters_of_the_model_once():
    specs = model.specs(cases.CFG)
    parts = parts_of(3)
    trees = [stages.select(specs, [p]) for p in parts]
    paths = [path for t in trees for path in tree.paths(t)]
    assert sorted(paths) == sorted(tree.paths(specs))
    assert tree.paths(trees[1]) == [p for p in tree.paths(specs) if p.startswith("layers.2.")]
    assert tree.flatten(stages.merge(trees)) == tree.flatten(specs)
    assert tree.flatten(stages.select(specs, parts)) == tree.flatten(specs)


def test_initial_values_do_not_depend_on_the_cuts():
    specs = model.specs(cases.CFG)
    whole = dict(tree.flatten_with_paths(params.init(specs, random.key(0))))
    for part in parts_of(2):
        own = params.init(stages.select(specs, [part]), random.key(0))
        assert all(torch.equal(w, whole[path]) for path, w in tree.flatten_with_paths(own))


def test_rows_of_the_balance_state_go_by_global_numbers():
    first, last = parts_of(2)
    assert stages.stage_moe_layers(cases.CFG, [last]) == (2, 3)
    assert stages.stage_moe_layers(cases.CFG, [first, last]) == model.moe_layers(cases.CFG)
    assert stages.stage_moe_layers(cases.CFG, [stages.Part(range(1), True, False)]) == ()


def test_what_a_stage_takes():
    (batch,) = cases.micro_batches(1)
    carries = stages.stage_carries(cases.CFG, parts_of(4), batch, torch.bfloat16)
    assert [len(c.blocks) for c in carries] == [0, 1, 1, 2]
    assert carries[0] == stages.StageCarry()
    shapes = {(tuple(x.shape), x.dtype) for c in carries[1:] for x in tree.leaves(c)}
    assert shapes == {((cases.ROWS, cases.TOKENS, cases_model.D), torch.bfloat16)}
    wide = stages.stage_carries(cases.CONFIGS["mhc"], parts_of(2), batch, torch.bfloat16)[1]
    assert [x.shape for x in tree.leaves(wide)] == [(cases.ROWS, cases.TOKENS, 2, cases_model.D)]


def test_what_is_no_pipeline_is_refused():
    with pytest.raises(ValueError, match=r"ranges \[range\(0, 3\)\] are not the layers 0..3"):
        stages.stages(cases.CFG, [range(3)])
    with pytest.raises(
        ValueError,
        match=r"mtp=.* with 2 pipeline stages.*set mtp=\(\) or mesh.pp=1",
    ):
        stages.stages(small.replace(cases.CFG, num_mtp_layers=1), stage_ranges(4, 2))
