"""Single properties of training on a mesh: data, initial values, losses' scale, norms, balance,
evaluation.
"""

import dataclasses

import pytest
import torch

from k31fn import config, model, optim, trainer, tree
from k31fn.layers import losses
from k31fn.parallel import Mesh, each_rank, fsdp
from k31fn.parallel.collectives import own_index
from k31fn.testing import assert_close_trees
from k31fn.trainer import gradient, step
from k31fn.trainer.layout import lay_out
from tests import small
from tests.trainer import meshes

pytestmark = pytest.mark.usefixtures("unchecked")

CPU = torch.device("cpu")
ADAMW = config.Optimizer(kind="adamw", peak_lr=0.01, warmup_steps=0, max_norm=float("inf"))


@pytest.fixture(scope="module")
def recipe(text):
    return meshes.recipe(text, compute="float64", optimizer=ADAMW)


def gradients(state):
    """AdamW's first moment after one step that was not clipped."""
    return tree.map(lambda m: m / (1 - ADAMW.beta1), state.opt_state.mu)


class TestBeforeTheFirstStep:
    @pytest.mark.parametrize(
        "mesh",
        [
            Mesh(fsdp=2, tp=2, ep=4),
            Mesh(pp=2, tp=2),
            *(
                pytest.param(m, marks=pytest.mark.slow)
                for m in (Mesh(dp=2, fsdp=2), Mesh(cp=2, ep=2))
            ),
        ],
        ids=str,
    )
    def test_the_same_initial_values_on_every_mesh(self, recipe, mesh):
        """Bit for bit."""
        made = dataclasses.replace(recipe, mesh=mesh)
        run = each_rank(
            lambda axes: meshes.whole_state(
                axes, made, trainer.init_state(trainer.lay_out(made, axes), CPU)
            ),
            mesh,
            lambda _: (),
        )
        expected = trainer.init_state(trainer.lay_out(recipe), CPU)
        assert tree.paths(run[0]) == tree.paths(expected)
        pairs = zip(tree.leaves(run[0]), tree.leaves(expected), strict=True)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)

    def test_the_same_rows_in_the_same_order(self, recipe):
        mesh = Mesh(dp=2, fsdp=2, cp=2)
        made = dataclasses.replace(recipe, mesh=mesh, batch_size=8, micro_batches=2)
        dataset = trainer.load_corpus(made).dataset

        def go(axes):
            rows = trainer.rows_at(dataset, 5, axes)
            return rows, trainer.make_batches(made, rows, CPU, axes)

        whole = dataset.batch_at(5)
        ranks = each_rank(go, mesh, lambda _: ())
        for r, (rows, batches) in enumerate(ranks):
            assert len(rows.tokens) == 2  # of its own
            mine, half = slice(r // 2 * 2, r // 2 * 2 + 2), slice(r % 2 * 12, r % 2 * 12 + 12)
            for name in ("tokens", "labels"):
                got = torch.cat([getattr(b, name) for b in batches])
                assert torch.equal(got, getattr(whole, name)[mine, half])
            positions = torch.cat([b.segments.position for b in batches])
            assert torch.equal(positions, whole.segments.position[mine, half])
            assert {int(b.num_labels) for b in batches} == {int((whole.labels >= 0).sum())}
            assert {int(b.num_queries) for b in batches} == {int((whole.segments.ids > 0).sum())}

    def test_case_d17_the_label_at_the_cut(self, recipe):
        """The last token of a slice predicts the first token of the next one."""
        mesh = Mesh(cp=2)
        made = dataclasses.replace(recipe, mesh=mesh)
        rows = trainer.load_corpus(made).dataset.batch_at(0)
        (left,), (right,) = each_rank(
            lambda axes: trainer.make_batches(made, rows, CPU, axes), mesh, lambda _: ()
        )
        inside = rows.segments.ids[:, 11] == rows.segments.ids[:, 12]
        assert inside.any()
        assert torch.equal(left.labels[inside, -1], right.tokens[inside, 0])


@pytest.mark.parametrize(
    ("mesh", "micro_batches"),
    [(Mesh(), 1), (Mesh(), 2), (Mesh(dp=2), 1), (Mesh(fsdp=2), 1)],
    ids=str,
)
def test_case_d13_losses_1_1_1_and_5(recipe, monkeypatch, mesh, micro_batches):
    """Four labels in two rows: the mean is 2, and so is the gradient of a factor of all losses."""

    def loss(params, batch, cfg, *, balance, placements, **how):
        each = torch.where(batch.tokens == 5, 5.0, 1.0).to(torch.float64)
        head = fsdp.gather(params.head, placements.head)  # its first element is the factor
        lm = torch.where(batch.labels >= 0, each, 0).sum() * head[0, 0]
        none = torch.zeros(1, cfg.sublayers["moe"].num_experts, dtype=torch.int64)
        kl = lm.new_zeros(1)
        parts = model.Losses(lm, lm * 0, kl, none, none[..., None].repeat(1, 1, 1000))
        return losses.mean(lm, batch.num_labels), parts

    monkeypatch.setattr(model, "loss", loss)
    made = dataclasses.replace(recipe, mesh=mesh, batch_size=2, micro_batches=micro_batches)
    rows = trainer.load_corpus(made).dataset.batch_at(0)
    tokens, labels = torch.zeros_like(rows.tokens), torch.full_like(rows.labels, -100)
    labels[0, :3], labels[1, 0], tokens[1, 0] = 7, 7, 5
    rows = dataclasses.replace(rows, tokens=tokens, labels=labels)

    def go(axes):
        state = trainer.init_state(trainer.lay_out(made, axes), CPU)
        head = torch.ones_like(state.params.head)
        state = dataclasses.replace(state, params=dataclasses.replace(state.params, head=head))
        rank = own_index(axes.data)
        own = tree.map(lambda x: x[rank : rank + 1], rows) if axes.data else rows
        return trainer.make_step(trainer.lay_out(made, axes))(
            state, trainer.make_batches(made, own, CPU, axes), 0.0
        )[1]

    for numbers in each_rank(go, mesh, lambda _: ()):
        assert float(numbers.loss) == pytest.approx(2.0, rel=1e-12)
        assert float(numbers.grad_norm) == pytest.approx(2.0, rel=1e-12)


SAME_SAMPLES = [
    (Mesh(fsdp=2), {"micro_batches": 3}),
    (Mesh(dp=2, fsdp=2), {"micro_batches": 1}),
    (Mesh(pp=2), {"micro_batches": 4, "pipeline": config.Pipeline("zero_bubble")}),
]
MORE_SAME_SAMPLES = [
    (Mesh(dp=2), {"micro_batches": 1}),
    (Mesh(dp=2), {"micro_batches": 3}),
    (Mesh(pp=2), {"micro_batches": 1}),
    (Mesh(pp=2), {"micro_batches": 4}),
    (Mesh(fsdp=2), {"micro_batches": 1}),
    (Mesh(dp=2, fsdp=2), {"micro_batches": 3}),
    (Mesh(pp=2), {"micro_batches": 2}),
    (Mesh(pp=2, fsdp=2), {"micro_batches": 2, "pipeline": config.Pipeline("zero_bubble")}),
]


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [*SAME_SAMPLES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_SAME_SAMPLES)],
    ids=str,
)
def test_cases_d14_and_d19_the_same_samples_however_they_are_cut(recipe, mesh, changes):
    """DDP, FSDP, HSDP and pipelines, with accumulation: the same gradient and norm, on every
    rank.
    """
    of_all = dataclasses.replace(recipe, batch_size=12)
    expected, state = meshes.on_one_device(of_all, 1)
    made = dataclasses.replace(of_all, mesh=mesh, **changes)
    metrics, _, whole = meshes.on_threads(made, 1)
    assert_close_trees(gradients(whole), gradients(state), rtol=1e-10, atol=1e-12)
    for numbers in metrics:
        torch.testing.assert_close(numbers, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_interleaved_stages(recipe):
    cfg = small.replace(recipe.model, num_layers=4, full_attention_layers=(1, 3))
    deep = dataclasses.replace(recipe, model=cfg, batch_size=8, micro_batches=4)
    expected, state = meshes.on_one_device(deep, 2)
    made = dataclasses.replace(
        deep, mesh=Mesh(pp=2, fsdp=2), pipeline=config.Pipeline("interleaved", num_chunks=2)
    )
    metrics, _, whole = meshes.on_threads(made, 2)
    torch.testing.assert_close(metrics[0], expected, rtol=1e-10, atol=1e-12)
    assert_close_trees(whole, state, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("p", [2, float("inf")])
def test_case_d21_the_norm_over_stages(recipe, p):
    """The single-process value, the same on every stage; a sum over stages would be wrong for
    inf.
    """

    def norm(axes, made):
        layout, state = lay_out(made, axes), trainer.init_state(trainer.lay_out(made, axes), CPU)
        rows = trainer.rows_at(trainer.load_corpus(made).dataset, 0, axes)
        _, grads = gradient.make_gradient(layout)(
            state, trainer.make_batches(made, rows, CPU, axes)
        )
        return optim.global_norm(grads, placements=layout.placements, stages=axes.pp, p=p)

    expected = norm(Mesh().axes(), recipe)
    mesh = Mesh(pp=2, tp=2)
    got = each_rank(norm, mesh, lambda _: (dataclasses.replace(recipe, mesh=mesh),))
    assert len({float(n) for n in got}) == 1
    torch.testing.assert_close(got[0], expected, rtol=1e-12, atol=0)


def test_case_d25_a_stage_without_moe_layers(recipe):
    """The biases of the last layer move, and every rank has them."""
    made = dataclasses.replace(recipe, mesh=Mesh(pp=2))
    assert [p.layers for p in lay_out(made, Mesh().axes()).parts] == [range(0, 2)]
    _, expected = meshes.on_one_device(recipe, 1)
    _, states, _ = meshes.on_threads(made, 1)
    for state in states:
        assert state.balance.bias.abs().sum() > 0
        assert torch.equal(state.balance.bias, states[0].balance.bias)
    torch.testing.assert_close(
        states[0].balance.bias, expected.balance.bias, rtol=1e-12, atol=1e-12
    )


def test_a_model_without_experts(recipe):
    """No row of the balance state anywhere."""
    cfg = small.replace(recipe.model, num_dense_layers=2)
    dense = dataclasses.replace(recipe, model=cfg)
    expected, _ = meshes.on_one_device(dense, 1)
    metrics, _, _ = meshes.on_threads(dataclasses.replace(dense, mesh=Mesh(pp=2)), 1)
    torch.testing.assert_close(metrics[0], expected, rtol=1e-10, atol=1e-12)


def test_a_layer_that_is_not_balanced_keeps_its_bias(recipe):
    moe = dataclasses.replace(recipe.model.sublayers["moe"], balanced=False)
    made = dataclasses.replace(recipe, mesh=Mesh(pp=2), model=small.replace(recipe.model, moe=moe))
    _, states, _ = meshes.on_threads(made, 1)
    assert all(not state.balance.bias.any() for state in states)


def test_biases_by_the_sign_of_the_load(recipe):
    """From zero one step up or down, less the mean; the same on ranks, which count their tokens."""
    moe = dataclasses.replace(recipe.model.sublayers["moe"], bias_step=0.25)
    made = dataclasses.replace(
        recipe, mesh=Mesh(fsdp=2), model=small.replace(recipe.model, moe=moe)
    )
    _, states, _ = meshes.on_threads(made, 1)
    _, expected = meshes.on_one_device(made, 1)
    bias = expected.balance.bias
    assert all(torch.equal(state.balance.bias, bias) for state in states)
    steps = (bias - bias[:, :1]) / 0.25
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-6)
    assert steps.any()


@pytest.mark.parametrize(
    "mesh", [Mesh(fsdp=2, tp=2), pytest.param(Mesh(dp=2), marks=pytest.mark.slow)], ids=str
)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(recipe, monkeypatch, mesh):
    original, made = model.loss, dataclasses.replace(recipe, mesh=mesh, batch_size=2)
    rows = trainer.load_corpus(made).dataset.batch_at(0)
    tokens = rows.tokens.clamp(max=200)
    tokens[1, 0] = 201
    rows = dataclasses.replace(rows, tokens=tokens)

    def sometimes_infinite(params, batch, cfg, **how):
        total, parts = original(params, batch, cfg, **how)
        return torch.where((batch.tokens == 201).any(), total * float("inf"), total), parts

    monkeypatch.setattr(model, "loss", sometimes_infinite)

    def go(axes):
        before = trainer.init_state(trainer.lay_out(made, axes), CPU)
        own = own_index(axes.view("dp", "fsdp"))
        batches = trainer.make_batches(made, tree.map(lambda x: x[own : own + 1], rows), CPU, axes)
        after, numbers = trainer.make_step(trainer.lay_out(made, axes))(
            tree.map(torch.clone, before), batches, 0.01
        )
        pairs = [
            (after.params, before.params),
            (after.opt_state, before.opt_state),
            (after.balance, before.balance),
        ]
        same = all(
            torch.equal(a, b)
            for x, y in pairs
            for a, b in zip(tree.leaves(x), tree.leaves(y), strict=True)
        )
        return float(numbers.skipped), float(numbers.non_finite), same

    assert each_rank(go, mesh, lambda _: ()) == [(1.0, 1.0, True)] * mesh.world_size


@pytest.mark.parametrize("mesh", [Mesh(dp=2, cp=2), Mesh(pp=2, tp=2)], ids=str)
def test_the_heldout_loss(recipe, mesh):
    """Rows that the ranks do not divide, over data, tokens and stages."""
    made = dataclasses.replace(recipe, mesh=mesh)
    scored = trainer.load_corpus(made).all
    assert len(scored.rows.tokens) % recipe.batch_size
    counted = []

    def go(axes):
        state = trainer.init_state(trainer.lay_out(made, axes), CPU)
        return trainer.heldout_loss(
            trainer.lay_out(made, axes), state, scored, progress=counted.append
        )

    expected = trainer.heldout_loss(
        trainer.lay_out(recipe), trainer.init_state(trainer.lay_out(recipe), CPU), scored
    )
    got = each_rank(go, mesh, lambda _: ())
    assert got == pytest.approx([expected] * mesh.world_size, rel=1e-12)
    assert sum(counted) == mesh.world_size * len(scored.rows.tokens)


@pytest.mark.parametrize(
    "mesh", [Mesh(fsdp=2), pytest.param(Mesh(pp=2), marks=pytest.mark.slow)], ids=str
)
def test_only_the_indexer(recipe, mesh):
    full = dataclasses.replace(recipe.model.sublayers["full_attention"], stage="dense_warmup")
    base = dataclasses.replace(
        recipe, model=small.replace(recipe.model, full_attention=full), trainable="indexer"
    )
    expected, state = meshes.on_one_device(base, 2)
    metrics, _, whole = meshes.on_threads(dataclasses.replace(base, mesh=mesh), 2)
    torch.testing.assert_close(metrics[0], expected, rtol=1e-10, atol=1e-12)
    assert_close_trees(whole, state, rtol=1e-10, atol=1e-12)


def local_denominators(monkeypatch):
    monkeypatch.setattr(step, "psum", lambda x, axes: x)


def no_sum_over_replicas(monkeypatch):
    monkeypatch.setattr(gradient.fsdp, "sum_gradients", lambda grads, places: grads)


def norm_of_own_stage(monkeypatch):
    norm = optim.global_norm
    monkeypatch.setattr(optim, "global_norm", lambda *a, stages, **k: norm(*a, **k))


@pytest.mark.parametrize(
    ("harm", "mesh"),
    [
        (local_denominators, Mesh(dp=2)),
        (no_sum_over_replicas, Mesh(dp=2)),
        (norm_of_own_stage, Mesh(pp=2)),
    ],
)
def test_what_would_be_wrong_is_seen(recipe, monkeypatch, harm, mesh):
    clipped = dataclasses.replace(recipe, optimizer=dataclasses.replace(ADAMW, max_norm=0.1))
    _, expected = meshes.on_one_device(clipped, 1)
    harm(monkeypatch)
    _, _, whole = meshes.on_threads(dataclasses.replace(clipped, mesh=mesh), 1)
    with pytest.raises(AssertionError):
        assert_close_trees(gradients(whole), gradients(expected), rtol=1e-6, atol=1e-9)
