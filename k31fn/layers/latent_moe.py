"""Mixture of experts in a latent space (Kimi K3 report, arXiv 2607.24653).

    u = x W_latent_down
    e_j = situ(u W_gate_j, u W_up_j) W_down_j
    y = RMSNorm(sum_j p_j e_j) W_latent_up + shared(x)

The experts read and write the latent; one projection down, one norm and one projection up serve all
experts of a layer. The router and the shared experts (one fused gated MLP) read the full width.
What a token's experts give is summed in float32.

On a mesh a rank routes its own tokens, and sends copies of them to the ranks that compute its
experts and gets them back (``sh.experts``; :mod:`k31fn.layers.routed`). Where ranks hold columns of
the same experts (``sh.expert_mlp``), each works on the tokens of all of them, and the parts of
``sum_j p_j e_j`` are summed before the norm. The shared experts run while copies travel: their
first products on the way there, the last on the way back; in the backward likewise. One rank runs
the same lines, and its rows stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal

import torch

from k31fn import tree
from k31fn.autodiff.replay import decision
from k31fn.layers import mlp, norm, routed, router
from k31fn.layers.arguments import check_call
from k31fn.layers.kind import Aux, ChannelMixer, Experts, Output
from k31fn.layers.linear import linear
from k31fn.parallel.collectives import all_gather, axis_size, psum_scatter, pvary
from k31fn.parallel.sharding import UNSHARDED, Sharding
from k31fn.params import Normal, ParamSpec
from k31fn.params import init as init_params
from k31fn.segments import Segments
from k31fn.typing import Float, Int, Leaf, Tensor

__all__ = ["KIND", "Config", "Params", "apply", "init", "specs"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Config:
    """Routed experts inside the latent, shared experts at full width.

    Routed: ``latent_size -> expert_size -> latent_size``. Shared: ``hidden_size -> shared_size ->
    hidden_size``.

    Attributes:
        shared_size: width of all shared experts together; 0: none.
        scale: factor of the routing weights.
        balanced: whether the router's bias is renewed after each step.
        bias_step: 0: by quantiles; or the step by which it follows the sign of the load's distance
            from the mean (:func:`k31fn.balance.update_by_sign`).
        norm_eps: of the norm on the latent.
        beta: bound of SiTU's gate.
        linear_beta: bound of its linear branch.
        init_std: standard deviation of the initial weights.
        qat: trains the routed experts for MXFP4 weights and MXFP8 activations
            (:mod:`k31fn.layers.qat`).
        placement: where experts are computed on a mesh with ``ep``: ``plain``, by the ranks that
            own them; ``moonep``, by as many rows on every rank (:mod:`k31fn.layers.routed`).
        slots: with ``moonep``, experts that a rank can hold besides its own. 0: as many as its own,
            which suffice for any routes. With fewer less is sent, and routes that need more end the
            run.
    """

    hidden_size: int
    latent_size: int
    expert_size: int
    shared_size: int
    num_experts: int
    top_k: int
    scale: float = 1.0
    balanced: bool = True
    norm_eps: float = 1e-5
    beta: float = 4.0
    linear_beta: float = 25.0
    init_std: float = 0.02
    qat: bool = False
    placement: Literal["plain", "moonep"] = "plain"
    slots: int = 0
    bias_step: float = 0.0

    def __post_init__(self) -> None:
        if self.shared_size < 0:
            raise ValueError(
                f"latent_moe.Config.shared_size={self.shared_size}: 0 for no shared expert, or a "
                "width"
            )
        if self.qat and (self.latent_size % 32 or self.expert_size % 32):
            raise ValueError(
                f"latent_moe.Config.qat with latent_size={self.latent_size}, "
                f"expert_size={self.expert_size}: MXFP4 and "
                "MXFP8 have groups of 32; make both multiples of 32"
            )
        if self.placement not in ("plain", "moonep"):
            raise ValueError(
                f"latent_moe.Config.placement={self.placement!r} unknown; use 'plain' or 'moonep'"
            )
        if self.slots < 0 or (self.slots and self.placement == "plain"):
            raise ValueError(
                f"latent_moe.Config.slots={self.slots} with placement={self.placement!r}: slots "
                "are for 'moonep': 1 or more, or 0 for as many as a rank has experts"
            )
        if self.bias_step < 0 or (self.bias_step and not self.balanced):
            raise ValueError(
                f"latent_moe.Config.bias_step={self.bias_step} with balanced={self.balanced}: a "
                "step is positive, and for a bias that is renewed; 0 for quantiles"
            )
        # Made here so that a bad value is refused now: each checks its fields in its own words.
        _ = self.router, self.norm, self.expert, self.shared

    def num_slots(self, num_ranks: int) -> int:
        """Slots of each of so many ranks over which the experts are split; 0: plain."""
        if self.placement == "plain":
            return 0
        own = self.num_experts // num_ranks
        return min(self.slots or own, own)  # no routes need more

    @property
    def router(self) -> router.Config:
        """The router's config, on the full width."""
        counts = self.balanced and not self.bias_step  # required biases, for quantiles
        return router.Config(
            self.hidden_size, self.num_experts, self.top_k, self.scale, counts, self.init_std
        )

    @property
    def norm(self) -> norm.Config:
        """Config of the norm on the latent."""
        return norm.Config(self.latent_size, self.norm_eps)

    @property
    def expert(self) -> mlp.Config:
        """Config of one routed expert."""
        return mlp.Config(
            self.latent_size, self.expert_size, self.beta, self.linear_beta, self.init_std
        )

    @property
    def shared(self) -> mlp.Config | tuple[()]:
        """Config of the shared experts; ``()`` if there are none."""
        if not self.shared_size:
            return ()
        return mlp.Config(
            self.hidden_size, self.shared_size, self.beta, self.linear_beta, self.init_std
        )


@tree.dataclass
class Params(Generic[Leaf]):
    """Weights of one layer.

    Attributes:
        latent_down: ``[D L]``.
        experts: ``w_gate [E L F]``, ``w_up [E L F]``, ``w_down [E F L]``.
        norm: ``weight [L]``.
        latent_up: ``[L D]``.
        shared: an MLP at full width, or ``()``.
    """

    router: router.Params[Leaf]
    latent_down: Leaf
    experts: mlp.Params[Leaf]
    norm: norm.Params[Leaf]
    latent_up: Leaf
    shared: mlp.Params[Leaf] | tuple[()]


def specs(cfg: Config) -> Params[ParamSpec]:
    """Declares the parameters: experts are split by expert and by their width, the projections of
    the latent are whole on every rank.
    """
    init = Normal(cfg.init_std)
    matrix = frozenset({"matrix"})

    def stacked(one_expert: ParamSpec) -> ParamSpec:
        # An expert's width has an axis of its own: tensor-parallel ranks that split the experts
        # among them have no ranks left to split the width over.
        axes = tuple("latent" if axis == "hidden" else "expert_mlp" for axis in one_expert.axes)
        return ParamSpec(
            (cfg.num_experts, *one_expert.shape),
            ("experts", *axes),
            init,
            tags=frozenset({"expert", "matrix"}),
        )

    return Params(
        router=router.specs(cfg.router),
        latent_down=ParamSpec(
            (cfg.hidden_size, cfg.latent_size), ("hidden", "latent"), init, tags=matrix
        ),
        experts=tree.map(stacked, mlp.specs(cfg.expert)),
        norm=norm.specs(cfg.norm, axis="latent"),
        latent_up=ParamSpec(
            (cfg.latent_size, cfg.hidden_size), ("latent", "hidden"), init, tags=matrix
        ),
        shared=mlp.specs(cfg.shared) if isinstance(cfg.shared, mlp.Config) else (),
    )


def init(cfg: Config, key: Tensor, *, dtype: torch.dtype | None = None) -> Params[Tensor]:
    """Draws the initial values on the key's device; ``dtype`` as :func:`k31fn.params.init` says."""
    return init_params(specs(cfg), key, dtype=dtype)


def apply(
    params: Params[Tensor],
    x: Float[Tensor, "B T D"],
    cfg: Config,
    *,
    bias: Float[Tensor, "E"],
    segments: Segments | None = None,
    sh: Sharding = UNSHARDED,
) -> Output:
    """The layer, its stages in the order in which they run.

    On a mesh ``x`` and ``y`` are this rank's tokens. Gradients: to ``params`` and ``x``; the route
    is a decision and has none, its weights have.

    Args:
        params: as :func:`specs` declares.
        x: normed input.
        cfg: the layer's config.
        bias: the router's balance state.
        segments: tells padding, which is routed with weight zero; None: there is none.
        sh: sharding.

    Raises:
        ValueError: the bias is of another number of experts, or the ranks of ``sh.experts`` do not
            divide the experts.
    """
    check_call(params, x, cfg, (Params, Config), segments=segments, sh=sh)
    routing = router.apply(params.router, x, cfg.router, bias=bias, segments=segments, sh=sh)

    # Order. A decision: a replay neither sorts nor exchanges counts again.
    assignment = decision("experts", _assign, routing.topk_idx, cfg, sh)

    # Replicas of experts first: the routes are all that they need.
    fetching = routed.fetch(params.experts, assignment, sh.experts)

    # Send. Ranks that hold other columns of the same experts work on the tokens of all of them.
    latent = all_gather(linear(x, _varying(params.latent_down, sh)), sh.expert_mlp, 1)
    weights = all_gather(routing.weights, sh.expert_mlp, 1)
    tokens = weights.shape[:2]
    weights = weights.flatten(0, 1)
    moving = routed.send(latent.flatten(0, 1), weights, assignment, sh.experts)
    del latent  # so that what was sent is freed as soon as it has arrived

    # Shared experts, first products, while the rows travel.
    hidden: Any = ()
    if isinstance(cfg.shared, mlp.Config):
        assert isinstance(params.shared, mlp.Params), "parameters of another config"
        hidden = mlp.inner(params.shared, x, cfg.shared, sh=sh)

    # Experts on what arrives, then back.
    moving = routed.compute(
        params.experts,
        fetching,
        moving,
        weights,
        assignment,
        sh.experts,
        bounds=(cfg.beta, cfg.linear_beta),
        qat=cfg.qat,
    )

    # Shared experts, last product, while the rows travel back. Two halves and not one: each hides
    # one journey, and in the backward, which runs in reverse, the other one.
    shared: Any = 0
    if isinstance(params.shared, mlp.Params):
        shared = mlp.outer(params.shared, hidden, sh=sh)

    # Combine. The norm is not linear: the parts of the experts' width are summed before it.
    mixed = routed.receive(moving, weights, assignment, sh.experts)
    mixed = psum_scatter(mixed.unflatten(0, tokens), sh.expert_mlp, 1)
    mixed = norm.apply(params.norm, mixed, cfg.norm, sh=sh)
    y = shared + linear(mixed, _varying(params.latent_up, sh))
    placement = () if cfg.placement == "plain" else routed.told(assignment)
    return Output(y, Aux(load=routing.load, histogram=routing.histogram, placement=placement))


def _assign(topk_idx: Int[Tensor, "B T G"], cfg: Config, sh: Sharding) -> routed.Assignment:
    topk_idx = all_gather(topk_idx, sh.expert_mlp, 1)
    num_slots = cfg.num_slots(axis_size(sh.experts))
    return routed.plan(topk_idx.flatten(0, 1), cfg.num_experts, num_slots, sh.experts)


def _varying(weight: Any, sh: Sharding) -> Any:
    """A weight leaf that is whole on every rank, for this rank's own tokens: its gradient is the
    sum over the ranks.
    """
    return tree.map(lambda w: pvary(w, sh.sequence), weight)


KIND = ChannelMixer(
    name="latent_moe",
    label="MoE",
    config=Config,
    specs=specs,
    apply=apply,
    parts=(
        (r"router\..*", "router"),
        (r"experts\..*", "routed experts"),
        (r"shared\..*", "shared experts"),
        (".*", "latent projections"),
    ),
    experts=lambda cfg: Experts(
        cfg.num_experts, cfg.top_k, cfg.expert_size, cfg.placement, cfg.slots, cfg.bias_step
    ),
    tensor_parallel=lambda cfg: {"shared_size": cfg.shared_size} if cfg.shared_size else {},
    splits=frozenset({"tp", "cp"}),
)
