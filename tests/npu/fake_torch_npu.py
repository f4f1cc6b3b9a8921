"""A stand-in for torch_npu, so that adapters run where there is no NPU and no CANN.

The operators have the schemas that torch_npu 2.13.0 publishes (``tools/ascend/operators.txt``), so
torch's dispatcher refuses a wrong name, type or number of arguments. Values are plain torch
formulas, shapes of fake tensors plain rules, both after torch_npu's documentation of each operator.
What it forbids is refused.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

F32, I32, I64 = torch.float32, torch.int32, torch.int64
OPERATORS = Path(__file__).parents[2] / "tools" / "ascend" / "operators.txt"
TRIANGLE = 2048

_library = torch.library.Library("npu", "FRAGMENT")
_values, _shapes = dict[str, Callable[..., Any]](), dict[str, Callable[..., Any]]()


def value(f: Callable[..., Any]) -> Callable[..., Any]:
    _values[f.__name__] = f
    return f


def shape(f: Callable[..., Any]) -> Callable[..., Any]:
    _shapes[f.__name__.removesuffix("_shape")] = f
    return f


def need(condition: Any, message: str) -> None:
    if not condition:
        raise RuntimeError(f"stand-in: {message}")


def _by_name(operator: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """``f``, given the arguments that it has, by the schema's names; the dispatcher leaves defaults
    out.
    """
    arguments = getattr(torch.ops.npu, operator).default._schema.arguments
    wanted = inspect.signature(f).parameters

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {a.name: a.default_value for a in arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        return f(**{name: given[name] for name in wanted})

    return call


def install() -> types.ModuleType:
    """Registers the operators (once in a process) and returns the module."""
    module = types.ModuleType("torch_npu")
    module.__version__ = "2.13.0"
    module.npu = types.SimpleNamespace(get_device_name=lambda *_: "Ascend950PR")
    for schema in OPERATORS.read_text().splitlines():
        name = schema.partition("(")[0]
        if not hasattr(torch.ops.npu, name):
            _library.define(schema)
            _library.impl(name, _by_name(name, _values[name]), "CPU")
            torch.library.register_fake(f"npu::{name}", _by_name(name, _shapes[name]), lib=_library)
        setattr(module, name, getattr(torch.ops.npu, name))
    return module


# ------------------------------------------------------------------------------------------ RMSNorm


@value
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    need(input.dtype == gamma.dtype, "gamma has the dtype of the input")
    inverse = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + epsilon)
    return (input.float() * inverse * gamma.float()).to(input.dtype), inverse


@shape
def npu_rms_norm_shape(input: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), input.new_empty(
        (*input.shape[: input.dim() - gamma.dim()], 1), dtype=F32
    )


@value
def npu_rms_norm_backward(
    dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    need(dy.dtype == input.dtype == gamma.dtype and rstd.dtype == F32, "dtypes")
    hat, g = input.float() * rstd, dy.float()
    weighted = g * gamma.float()
    d_input = rstd * (weighted - hat * (weighted * hat).mean(-1, keepdim=True))
    return d_input.to(input.dtype), (g * hat).flatten(0, -2).sum(0)


@shape
def npu_rms_norm_backward_shape(input: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), gamma.new_empty(gamma.shape, dtype=F32)


# ------------------------------------------------------------------------------------------ experts


@value
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    group_list: Tensor,
    split_item: int,
    group_type: int,
    group_list_type: int,
) -> list[Tensor]:
    (a,), (b,) = x, weight
    need(split_item in (2, 3) and group_list_type == 0, "one result, cumulative groups")
    need(
        a.dtype == b.dtype and group_list.dtype == I64 and (group_list.diff() >= 0).all(),
        "dtypes, groups in order",
    )
    bounds = [0, *group_list.tolist()]
    pairs = list(itertools.pairwise(bounds))
    if group_type == 0:
        need(
            a.is_contiguous() and b.dim() == 3 and len(pairs) == len(b) and bounds[-1] == len(a),
            "groups of rows",
        )
        return [
            torch.cat([a[i:j].float() @ b[e].float() for e, (i, j) in enumerate(pairs)]).to(a.dtype)
        ]
    need(
        group_type == 2 and a.dim() == b.dim() == 2 and bounds[-1] == a.shape[1] == len(b),
        "groups of the sum",
    )
    need(a.mT.is_contiguous() and b.is_contiguous(), "a transposed left factor")
    unknown = torch.full(
        (len(a), b.shape[1]), torch.nan
    )  # the value for an empty group is not documented
    return [
        torch.stack(
            [a[:, i:j].float() @ b[i:j].float() if j > i else unknown for i, j in pairs]
        ).to(a.dtype)
    ]


@shape
def npu_grouped_matmul_shape(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor, group_type: int
) -> list[Tensor]:
    (a,), (b,) = x, weight
    return [
        a.new_empty((*((len(group_list),) if group_type == 2 else ()), a.shape[0], b.shape[-1]))
    ]


@value
def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
) -> Tensor:
    need(sorted_indices.dtype == I32 and sorted_indices.dim() == 1, "int32 indices")
    copies = grad_permuted_tokens[sorted_indices.long()].view(tokens_size_0, num_topK, -1)
    return copies.float().sum(1).to(tokens_dtype)


@shape
def npu_moe_token_permute_grad_v2_shape(
    grad_permuted_tokens: Tensor, tokens_size_0: int, tokens_dtype: torch.dtype
) -> Tensor:
    return grad_permuted_tokens.new_empty(
        (tokens_size_0, grad_permuted_tokens.shape[1]), dtype=tokens_dtype
    )


@value
def npu_moe_token_unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor
) -> Tensor:
    need(sorted_indices.dtype == I32 and probs.dtype == permuted_tokens.dtype, "dtypes")
    copies = permuted_tokens[sorted_indices.long()].view(*probs.shape, -1)
    return (copies.float() * probs.float()[..., None]).sum(1).to(permuted_tokens.dtype)


@shape
def npu_moe_token_unpermute_shape(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor
) -> Tensor:
    return permuted_tokens.new_empty(
        (sorted_indices.shape[0] // probs.shape[1], permuted_tokens.shape[1])
    )


@value
def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor, grad_unpermuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    need(sorted_indices.dtype == I32, "int32 indices")
    index, g = (
        sorted_indices.long(),
        grad_unpermuted_tokens.float().repeat_interleave(probs.shape[1], 0),
    )
    d_rows = torch.empty(permuted_tokens.shape)
    d_rows[index] = g * probs.flatten().float()[:, None]
    d_probs = (g * permuted_tokens[index].float()).sum(-1).view(probs.shape)
    return d_rows.to(permuted_tokens.dtype), d_probs.to(probs.dtype)


@shape
def npu_moe_token_unpermute_grad_shape(
    permuted_tokens: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(permuted_tokens), torch.empty_like(probs)


# ---------------------------------------------------------------------------------------- attention


def _sequences(
    query: Tensor, key: Tensor, layout: str, mask: Tensor | None, ends: Any, mode: int
) -> list[Any]:
    need(
        layout == "TND" and query.dim() == key.dim() == 3 and query.dtype == key.dtype,
        "packed tokens",
    )
    causal = (
        mode == 3
        and mask is not None
        and torch.equal(mask, torch.ones(TRIANGLE, TRIANGLE).triu(1).bool())
    )
    need(causal or (mode == 0 and mask is None), "the mask")
    need(
        len(ends[0]) == len(ends[1]) and ends[0][-1] == len(query) and ends[1][-1] == len(key),
        "ends",
    )
    return list(
        zip(
            *([slice(*pair) for pair in itertools.pairwise([0, *each])] for each in ends),
            strict=True,
        )
    )


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    wide = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("thd,shd->ths", q.float(), wide) * scale
    need(len(q) <= len(k) or not causal, "no query without a key")
    later = (
        torch.ones(len(q), len(k)).triu(1 + len(k) - len(q)).bool()
        if causal
        else torch.zeros(1, 1).bool()
    )
    return scores.masked_fill(later[:, None], -torch.inf)


@value
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    atten_mask: Tensor | None,
    scale: float,
    actual_seq_qlen: Any,
    actual_seq_kvlen: Any,
    sparse_mode: int,
) -> tuple[Any, ...]:
    need(head_num == query.shape[1], "heads")
    parts = []
    for d, s in _sequences(
        query, key, input_layout, atten_mask, (actual_seq_qlen, actual_seq_kvlen), sparse_mode
    ):
        scores = _scores(query[d], key[s], scale, sparse_mode == 3)
        largest = scores.amax(-1)
        e = torch.exp(scores - largest[..., None])
        total = e.sum(-1)
        v = value[s].float().repeat_interleave(query.shape[1] // value.shape[1], 1)
        parts.append((torch.einsum("ths,shv->thv", e / total[..., None], v), largest, total))
    out, largest, total = (torch.cat(column) for column in zip(*parts, strict=True))
    statistics = (s[..., None].expand(-1, -1, 8).contiguous() for s in (largest, total))
    return out.to(query.dtype), *statistics, query.new_empty(0), 0, 0, 0


@shape
def npu_fusion_attention_shape(query: Tensor, value: Tensor, head_num: int) -> tuple[Any, ...]:
    statistics = (query.new_empty((len(query), head_num, 8), dtype=F32) for _ in range(2))
    return (
        query.new_empty((*query.shape[:2], value.shape[2])),
        *statistics,
        query.new_empty(0),
        0,
        0,
        0,
    )


@value
def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    atten_mask: Tensor | None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float,
    actual_seq_qlen: Any,
    actual_seq_kvlen: Any,
    sparse_mode: int,
) -> tuple[Tensor, ...]:
    need(
        head_num == query.shape[1] and dy.dtype == query.dtype == attention_in.dtype,
        "heads and dtypes",
    )
    need(
        dy.shape == attention_in.shape
        and softmax_max.shape == softmax_sum.shape == (*query.shape[:2], 8),
        "shapes",
    )
    groups = query.shape[1] // key.shape[1]
    d_q, d_k, d_v = (torch.zeros(x.shape) for x in (query, key, value))
    for d, s in _sequences(
        query, key, input_layout, atten_mask, (actual_seq_qlen, actual_seq_kvlen), sparse_mode
    ):
        k, v = (x[s].float().repeat_interleave(groups, 1) for x in (key, value))
        p = (
            torch.exp(
                _scores(query[d], key[s], scale_value, sparse_mode == 3) - softmax_max[d, :, :1]
            )
            / softmax_sum[d, :, :1]
        )
        g = dy[d].float()
        d_p = torch.einsum("thv,shv->ths", g, v)
        d_s = scale_value * p * (d_p - (g * attention_in[d].float()).sum(-1)[..., None])
        d_q[d] = torch.einsum("ths,shd->thd", d_s, k)
        d_k[s] = (
            torch.einsum("ths,thd->shd", d_s, query[d].float()).unflatten(1, (-1, groups)).sum(2)
        )
        d_v[s] = torch.einsum("ths,thv->shv", p, g).unflatten(1, (-1, groups)).sum(2)
    like = query.dtype
    return d_q.to(like), d_k.to(like), d_v.to(like), query.new_empty(0), query.new_empty(0)


@shape
def npu_fusion_attention_grad_shape(
    query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    return (
        *(torch.empty_like(x) for x in (query, key, value)),
        query.new_empty(0),
        query.new_empty(0),
    )


# ---------------------------------------------------------------------------------------------- mHC


def _streams(x: Tensor, phi: Tensor) -> tuple[int, Tensor]:
    n, width = x.shape[-2:]
    need(
        n in (4, 6, 8) and x.dtype == torch.bfloat16 and phi.shape == (n * n + 2 * n, n * width),
        "streams and phi",
    )
    return n, x.float().flatten(-2)


@value
def npu_mhc_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    norm_eps: float,
    hc_eps: float,
    out_flag: int,
) -> tuple[Tensor, ...]:
    need(
        phi.dtype == alpha.dtype == bias.dtype == F32 and out_flag == 1,
        "dtypes, and what the backward needs",
    )
    n, flat = _streams(x, phi)
    inverse = torch.rsqrt(flat.square().mean(-1) + norm_eps)
    mix = flat @ phi.mT
    pre, post, res = (mix * inverse[..., None]).split((n, n, n * n), -1)
    b_pre, b_post, b_res = bias.split((n, n, n * n))
    h_pre = torch.sigmoid(alpha[0] * pre + b_pre) + hc_eps
    h_post = 2 * torch.sigmoid(alpha[1] * post + b_post)
    h_res = (alpha[2] * res + b_res).unflatten(-1, (n, n))
    return (h_pre[..., None] * x.float()).sum(-2).to(x.dtype), h_post, h_res, inverse, mix, h_pre


@shape
def npu_mhc_pre_shape(x: Tensor, phi: Tensor) -> tuple[Tensor, ...]:
    batch, n = x.shape[:-2], x.shape[-2]
    wide = [(*batch, n), (*batch, n, n), batch, (*batch, phi.shape[0]), (*batch, n)]
    return x.new_empty((*batch, x.shape[-1])), *(x.new_empty(s, dtype=F32) for s in wide)


@value
def npu_mhc_pre_backward(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    grad_h_in: Tensor,
    grad_h_post: Tensor,
    grad_h_res: Tensor,
    inv_rms: Tensor,
    h_mix: Tensor,
    h_pre: Tensor,
    h_post: Tensor,
    hc_eps: float,
    grad_x_post: Tensor,
) -> tuple[Tensor, ...]:
    need(
        grad_x_post.dtype == x.dtype == grad_h_in.dtype and grad_x_post.shape == x.shape,
        "gradients",
    )
    n, flat = _streams(x, phi)
    g, inverse = grad_h_in.float(), inv_rms[..., None]
    opened = h_pre - hc_eps
    d_pre = (g[..., None, :] * x.float()).sum(-1) * opened * (1 - opened)
    d_a = torch.cat([d_pre, grad_h_post * h_post * (1 - h_post / 2), grad_h_res.flatten(-2)], -1)
    d_alpha = torch.stack([a.sum() for a in (d_a * h_mix * inverse).split((n, n, n * n), -1)])
    d_scaled = d_a * torch.cat([a.expand(m) for a, m in zip(alpha, (n, n, n * n), strict=True)])
    d_mix = d_scaled * inverse
    d_inverse = (d_scaled * h_mix).sum(-1, keepdim=True)
    d_flat = d_mix @ phi - d_inverse * inverse**3 / flat.shape[-1] * flat
    d_x = d_flat.view(x.shape) + h_pre[..., None] * g[..., None, :] + grad_x_post.float()
    d_phi = d_mix.flatten(0, -2).mT @ flat.flatten(0, -2)
    return d_x.to(x.dtype), d_phi, d_alpha, d_a.flatten(0, -2).sum(0), x.new_empty(0, dtype=F32)


@shape
def npu_mhc_pre_backward_shape(x: Tensor, phi: Tensor, alpha: Tensor) -> tuple[Tensor, ...]:
    wide = [phi.shape, alpha.shape, (phi.shape[0],), (0,)]
    return torch.empty_like(x), *(x.new_empty(s, dtype=F32) for s in wide)


@value
def npu_mhc_sinkhorn(x: Tensor, eps: float, num_iters: int, out_flag: int) -> tuple[Tensor, ...]:
    n = x.shape[-1]
    need(n in (4, 6, 8) and x.dtype == F32 and 1 <= num_iters <= 100, "matrices")
    m = torch.softmax(x.reshape(-1, n, n), -1) + eps
    steps, sums = [m], [m.new_ones(len(m), n)]
    for i in range(1, 2 * num_iters):
        over = -2 if i % 2 else -1
        total = m.sum(over, keepdim=True) + eps
        m = m / total
        steps.append(m)
        sums.append(total.squeeze(over))
    if not out_flag:
        return m.view(x.shape), x.new_empty(0), x.new_empty(0)
    return m.view(x.shape), *(F.pad(torch.stack(a), (0, 8 - n)).flatten() for a in (steps, sums))


@shape
def npu_mhc_sinkhorn_shape(x: Tensor, num_iters: int, out_flag: int) -> tuple[Tensor, ...]:
    rows = x.numel() // x.shape[-1] ** 2 * 2 * num_iters * 8 if out_flag else 0
    return torch.empty_like(x), x.new_empty(rows * x.shape[-1]), x.new_empty(rows)


@value
def npu_mhc_sinkhorn_backward(grad_y: Tensor, norm: Tensor, sum: Tensor) -> Tensor:
    n = grad_y.shape[-1]
    g = grad_y.reshape(-1, n, n)
    steps, sums = norm.view(-1, len(g), n, 8)[..., :n], sum.view(-1, len(g), 8)[..., :n]
    for i in range(len(steps) - 1, 0, -1):
        over = -2 if i % 2 else -1
        g = (g - (g * steps[i]).sum(over, keepdim=True)) / sums[i].unsqueeze(over)
    return (steps[0] * (g - (g * steps[0]).sum(-1, keepdim=True))).view(grad_y.shape)


@shape
def npu_mhc_sinkhorn_backward_shape(grad_y: Tensor) -> Tensor:
    return torch.empty_like(grad_y)


@value
def npu_mhc_post(x: Tensor, h_res: Tensor, h_out: Tensor, h_post: Tensor) -> Tensor:
    need(x.dtype == h_out.dtype == torch.bfloat16 and h_res.dtype == h_post.dtype == F32, "dtypes")
    need(
        h_res.shape == (*h_post.shape, h_post.shape[-1])
        and h_out.shape == (*x.shape[:-2], x.shape[-1]),
        "shapes",
    )
    return (h_res.mT @ x.float() + h_post[..., None] * h_out.float()[..., None, :]).to(x.dtype)


@shape
def npu_mhc_post_shape(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@value
def npu_mhc_post_backward(
    grad_y: Tensor, x: Tensor, h_res: Tensor, h_out: Tensor, h_post: Tensor
) -> tuple[Tensor, ...]:
    g = grad_y.float()
    d_out, d_post = (g * h_post[..., None]).sum(-2), (g * h_out.float()[..., None, :]).sum(-1)
    return (h_res @ g).to(x.dtype), x.float() @ g.mT, d_out.to(h_out.dtype), d_post


@shape
def npu_mhc_post_backward_shape(
    x: Tensor, h_res: Tensor, h_out: Tensor, h_post: Tensor
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t) for t in (x, h_res, h_out, h_post))
