"""What recomputation saves and costs: ``python -m benchmarks.recompute [--json FILE]``.

Bytes: a run of 8 layers of two sublayers in bfloat16 at K3's width, whose sublayers are a product
with a vector, so that what is kept is what joins them to the residual state, their norms and their
outputs. Measured between forward and backward, without the result; given per layer and per B*S*D.
Two accountings:

* new: without the two outputs of the branches, which a plain residual network whose branches are
  kept has too; without recomputation also without all else that a plain residual keeps (its norms);
* all: everything counts.

``mhc`` is this package's operator, which keeps its inputs only, also without recomputation.
``broadcast`` and ``einsum`` are the same equations as plain torch runs them in float32, with sums
of broadcast products or einsum for the mixing; ``broadcast, one copy`` shares the float32 streams
between read and update.

Times and peaks: a step's gradient of ``configs/tiny.py`` (or on ``--device``), the policies taking
turns; on a CPU the time is that of the process, on one thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from benchmarks.measure import told
from k31fn import config, model, params, random, tree
from k31fn import device as devices
from k31fn.autodiff import keep, value_and_grad, vjp
from k31fn.kernels.mhc_pre import SINKHORN_EPS, sinkhorn
from k31fn.layers import attn_res, mhc, norm, plain_residual
from k31fn.model.layers import Remat, run_steps
from k31fn.testing import live_bytes

__all__ = ["FORMS", "LAYERS", "Kept", "Timed", "kept", "main", "markdown", "reductions", "timed"]

LAYERS, TOKENS, WIDTH = 8, 32, 7168
POLICIES: tuple[Remat, ...] = get_args(Remat)
_CONFIGS: dict[str, Any] = {
    "plain": plain_residual.Config(),
    "attn_res": attn_res.Config(),
    "mhc": mhc.Config(),
}
Connect = Callable[..., tuple[Any, Any]]


class Kept(NamedTuple):
    """What a scheme keeps under a policy, in bytes per layer and per B*S*D.

    ``peak``: of forward and backward of all layers together, per B*S*D, without gradients of
    weights.
    """

    scheme: str
    policy: str
    kept: float
    peak: float


class Timed(NamedTuple):
    """A gradient of the tiny model: milliseconds, and bytes at the peak."""

    scheme: str
    policy: str
    milliseconds: float
    peak: int


def _plain_mhc(
    mixed: Callable[[Tensor, Tensor], Tensor],
    read: Callable[[Tensor, Tensor], Tensor],
    one_copy: bool,
    params: mhc.Params[Tensor],
    carry: mhc.Carry,
    cfg: mhc.Config,
    f: Callable[[Tensor], tuple[Tensor, Any]],
    **_: Any,
) -> tuple[mhc.Carry, Any]:
    """``mhc.connect`` by torch's own rules; ``read`` sums over streams, ``mixed`` over those of
    each new one.
    """
    x, n = carry.streams, cfg.num_streams
    wide = x.to(torch.float32)
    flat = wide.flatten(-2)
    z = (flat @ params.phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + cfg.eps)
    z_pre, z_post, z_res = z.split((n, n, n * n), -1)
    b_pre, b_post, b_res = params.base.split((n, n, n * n))
    h_pre = torch.sigmoid(params.scale[0] * z_pre + b_pre) + SINKHORN_EPS
    h_post = 2 * torch.sigmoid(params.scale[1] * z_post + b_post)
    h_res = sinkhorn((params.scale[2] * z_res + b_res).unflatten(-1, (n, n)), cfg.iterations)
    y, aux = f(read(h_pre, wide).to(x.dtype))
    after = h_post[..., None] * y.to(torch.float32)[..., None, :]
    after = after + mixed(h_res, wide if one_copy else x.to(torch.float32))
    return mhc.Carry(after.to(x.dtype)), aux


def _sum(h: Tensor, x: Tensor) -> Tensor:
    return (h[..., None] * x).sum(-2)


def _mix(h: Tensor, x: Tensor) -> Tensor:
    return (h[..., None] * x[..., None, :]).sum(-3)


_EINSUM = (
    functools.partial(torch.einsum, "btij,btid->btjd"),
    functools.partial(torch.einsum, "btn,btnd->btd"),
)
FORMS: dict[str, tuple[str, Connect]] = {
    "plain": ("plain", plain_residual.connect),
    "attn_res": ("attn_res", attn_res.connect),
    "mhc": ("mhc", mhc.connect),
    "mhc, broadcast": ("mhc", functools.partial(_plain_mhc, _mix, _sum, False)),
    "mhc, broadcast, one copy": ("mhc", functools.partial(_plain_mhc, _mix, _sum, True)),
    "mhc, einsum": ("mhc", functools.partial(_plain_mhc, *_EINSUM, False)),
}


def _branch(w: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    """Needs its argument and its weight for its backward, as a product with a matrix does."""
    return x * w, ()


def _layer(
    connect: Connect, cfg: Any, opens: bool, p: Any, carry: Any, shared: Any, per_layer: Any
) -> tuple[Any, Any]:
    del shared, per_layer
    for name in ("attention", "ffn"):

        def sublayer(h: Tensor, name: str = name) -> tuple[Tensor, Any]:
            x = norm.apply(p["norm"], h, norm.Config(h.shape[-1]))
            return keep(name, _branch)(p["branch"], x)

        carry, _ = connect(
            p["mix"], carry, cfg, sublayer, opens_block=opens and name == "attention"
        )
    return carry, ()


def kept(
    form: str,
    policy: Remat,
    *,
    tokens: int = TOKENS,
    width: int = WIDTH,
    dtype: Any = torch.bfloat16,
) -> Kept:
    """Measures a form of :data:`FORMS` under a policy, on the CPU."""
    kind, connect = FORMS[form]
    cfg, module = _CONFIGS[kind], {"plain": plain_residual, "attn_res": attn_res, "mhc": mhc}[kind]
    spec = {
        "mix": module.specs(cfg, width),
        "norm": norm.specs(norm.Config(width)),
        "branch": params.ParamSpec((width,), ("",), params.Normal(1.0)),
    }
    weights = [params.init(spec, random.key(0), dtype=dtype)] * LAYERS
    steps = [functools.partial(_layer, connect, cfg, i == 0) for i in range(LAYERS)]
    x = random.normal(random.key(1), (1, tokens, width)).to(dtype)

    def run(weights: Any, x: Tensor) -> Any:
        # A state like any between layers: the argument itself lives anyway.
        carry = tree.map(lambda t: t * 1, module.start(x, cfg))
        per_layer = [()] * LAYERS
        carry, _ = run_steps(
            steps, weights, (), carry, (), per_layer, remat=policy, light=_without_branch
        )
        return carry

    gc.collect()
    with live_bytes() as live:
        out, pull = vjp(run, weights, x)
        # The result is the caller's. A storage counts once: states may share one.
        result: dict[int, int] = {}
        for t in tree.leaves(out):
            storage = t.untyped_storage()
            result[storage.data_ptr()] = storage.nbytes()
        between = live.current - sum(result.values())
    del out, pull
    gc.collect()
    # Without gradients of weights, which are as large as the weights under every policy.
    with live_bytes() as live:
        out, pull = vjp(functools.partial(run, weights), x)
        pull(tree.map(torch.ones_like, out))
    return Kept(form, policy, between / x.numel() / LAYERS, live.peak / x.numel())


def _without_branch(p: Any) -> Any:
    return {**p, "branch": ()}


class Reduction(NamedTuple):
    """How far what is kept falls, by both accountings."""

    scheme: str
    policy: str
    new: float
    all: float


def reductions(rows: Sequence[Kept]) -> list[Reduction]:
    """Ratios of each policy against none, for forms of mHC; two outputs are 4 bytes per B*S*D."""
    kept_by = {(r.scheme, r.policy): r.kept for r in rows}
    outputs = 2 * 2
    plain = kept_by["plain", "none"]
    falls: list[Reduction] = []
    for (scheme, policy), nbytes in kept_by.items():
        if scheme.startswith("mhc") and policy in ("intra_layer", "cross_layer"):
            none = kept_by[scheme, "none"]
            new = 1 - (nbytes - outputs) / (none - plain - outputs)
            falls.append(Reduction(scheme, policy, new, 1 - nbytes / none))
    return falls


def timed(where: torch.device, repeats: int) -> list[Timed]:
    """Times of a gradient of the tiny model under each scheme and policy, and its peak."""
    recipe = config.load_recipe(Path(__file__).parents[1] / "configs" / "tiny.py")
    rows: list[Timed] = []
    for kind, residual in _CONFIGS.items():
        residual = recipe.model.residual if kind == "attn_res" else residual
        cfg = dataclasses.replace(recipe.model, residual=residual)
        weights = params.init(model.specs(cfg), random.key(0), dtype=torch.float32)
        weights = tree.map(lambda w: w.to(where), weights)
        tokens = (random.bits(random.key(1), (recipe.batch_size, recipe.length)) % 256).to(where)
        batch = model.make_batch(tokens, vocab_size=cfg.vocab_size)
        state = model.init_balance(cfg, device=where)

        def gradient(
            policy: Remat, cfg: Any = cfg, batch: Any = batch, state: Any = state, w: Any = weights
        ) -> Any:
            return value_and_grad(
                lambda w: model.loss(w, batch, cfg, balance=state, remat=policy)[0]
            )(w)

        print(f"timing {kind}", file=sys.stderr, flush=True)
        times: dict[str, list[float]] = {p: [] for p in POLICIES}
        peaks = {}
        for p in POLICIES:
            with live_bytes() as live:
                gradient(p)
            peaks[p] = live.peak
        # In turns, so that a busy moment of the machine falls on all of them.
        for _ in range(repeats):
            for p in POLICIES:
                devices.synchronize(where)
                # On a CPU the time of the process, which other programs do not lengthen.
                clock = time.process_time if where.type == "cpu" else time.perf_counter
                start = clock()
                gradient(p)
                devices.synchronize(where)
                times[p].append(1e3 * (clock() - start))
        rows += [Timed(kind, p, statistics.median(times[p]), peaks[p]) for p in POLICIES]
    return rows


def markdown(rows: Sequence[Kept], times: Sequence[Timed]) -> str:
    """Both tables."""
    falls = {(r.scheme, r.policy): r for r in reductions(rows)}
    lines = [
        "| scheme | recomputation | kept | new falls by | all falls by | peak of 8 layers |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        fall = falls.get((r.scheme, r.policy))
        shares = f"{fall.new:.1%} | {fall.all:.1%}" if fall else " | "
        lines.append(f"| {r.scheme} | {r.policy} | {r.kept:.1f} | {shares} | {r.peak:.0f} |")
    if times:
        lines += ["", "| model | recomputation | time of a gradient | peak |", "|---|---|---|---|"]
        none = {t.scheme: t for t in times if t.policy == "none"}
        for t in times:
            share = t.milliseconds / none[t.scheme].milliseconds
            lines.append(
                f"| {t.scheme} | {t.policy} | {t.milliseconds:.0f} ms ({share:.2f}) | "
                f"{t.peak / 1e6:.0f} MB |"
            )
    return "\n".join(lines)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="of the timed model")
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed gradients of each policy; 0: none"
    )
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    where = told(parser, lambda: devices.parse(args.device))
    if args.repeats < 0:
        parser.error(f"--repeats {args.repeats} must be at least 0")
    if where.type == "cpu":
        torch.set_num_threads(1)
    rows: list[Kept] = []
    for form, policy in itertools.product(FORMS, POLICIES):
        rows.append(kept(form, policy))
        print(f"{form}, {policy}: {rows[-1].kept:.1f} bytes kept", file=sys.stderr, flush=True)
    times = timed(where, args.repeats) if args.repeats else []
    print(markdown(rows, times))
    if args.json:
        results = {
            "torch": torch.__version__,
            "layers": LAYERS,
            "streams": _CONFIGS["mhc"].num_streams,
            "width": WIDTH,
            "device": devices.name(where),
            "kept": [r._asdict() for r in rows],
            "reductions": [r._asdict() for r in reductions(rows)],
            "times": [t._asdict() for t in times],
        }
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
