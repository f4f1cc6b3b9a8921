"""The head: linear and cross-entropy, forward and backward, beside its products alone.

``python -m benchmarks.head --json benchmarks/results/head.json``, on a CUDA device. All in one run
on the same tensors: the loss as the model takes it, in one chunk and in two; its three products
alone; the plain form of torch, and with ``--compile`` the same under torch.compile. The floor of a
row is the time of the products. Errors are relative L2: in bfloat16 against float64, in float32
against the reference, on one rank and on two of tensor parallel (threads on this GPU).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Row, cuda_device, error, take_turns, write_json
from k31fn import device as devices
from k31fn.autodiff import value_and_grad
from k31fn.kernels.registry import record_impls, use_impl
from k31fn.layers.losses import IGNORED, linear_cross_entropy
from k31fn.parallel import Mesh, MeshAxes, P, Sharding, shard_map

__all__ = ["main"]

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
_FORWARD, _BOTH = "forward", "both"


def draw(args: Any, tokens: int, dtype: torch.dtype, where: torch.device) -> list[Tensor]:
    """States, the head's weight, and labels, of which one in twenty is ignored."""
    hidden = torch.randn(1, tokens, args.width, device=where).to(dtype)
    w = torch.randn(args.width, args.vocabulary, device=where)
    labels = torch.randint(0, args.vocabulary, (1, tokens), device=where)
    labels[:, ::20] = IGNORED
    return [hidden, (w * args.width**-0.5).to(dtype), labels]


def ours(hidden: Tensor, w: Tensor, labels: Tensor, *, bound: int = 0, impl: str = "triton") -> Any:
    """The mean loss of a token, as the model takes it."""
    with use_impl(head_cross_entropy=impl):
        total, count = linear_cross_entropy(hidden, w, labels, logits_bytes=bound)
    return total / count


def plain(hidden: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """The same in plain torch, with all logits in float32."""
    logits = torch.matmul(hidden, w).to(torch.promote_types(hidden.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def loss_of_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss, and its gradient written over the wide logits ``[tokens, Z]``."""
    valid = labels != IGNORED
    at = torch.where(valid, labels, 0)[:, None]
    lse = logits.logsumexp(-1)
    value = torch.where(valid, lse - logits.gather(1, at)[:, 0], 0).sum() / valid.sum()
    weight = valid.to(logits.dtype)[:, None] / valid.sum()
    return value, logits.sub_(lse[:, None]).exp_().mul_(weight).scatter_add_(1, at, -weight)


def products(hidden: Tensor, w: Tensor, gradient: Tensor | None) -> list[Tensor]:
    """The products alone: the logits, and both gradients of a given gradient of the logits."""
    logits = hidden[0] @ w
    if gradient is None:
        return [logits]
    return [gradient @ w.mT, hidden[0].mT @ gradient]


def gradients(loss: Loss, hidden: Tensor, w: Tensor, labels: Tensor) -> list[Tensor]:
    """The loss, and the gradients of the states and of the weight."""
    value, grads = value_and_grad(lambda h, w: loss(h, w, labels), (0, 1))(hidden, w)
    return [value, *grads]


def forward(loss: Loss, hidden: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """The loss that a backward follows."""
    return loss(hidden.detach().requires_grad_(), w.detach().requires_grad_(), labels)


def extra_bytes(work: Callable[[], Any], where: torch.device) -> int:
    """Peak over what was there before and what the work returns."""
    work()
    devices.synchronize(where)
    torch.cuda.empty_cache()
    before = devices.memory_allocated(where)
    devices.reset_peak_memory(where)
    results = work()
    devices.synchronize(where)
    peak = devices.peak_memory(where) - before
    return peak - sum(x.nbytes for x in results)


def exact(hidden: Tensor, w: Tensor, labels: Tensor) -> list[Tensor]:
    """Loss and gradients in float64."""
    rows, wide = hidden[0].double(), w.double()
    value, gradient = loss_of_logits(rows @ wide, labels[0])
    return [value, (gradient @ wide.mT)[None], rows.mT @ gradient]


def split(axes: MeshAxes, hidden: Tensor, w: Tensor, labels: Tensor) -> list[Tensor]:
    """Loss and gradients on a rank that has some columns and some tokens."""

    def mean(hidden: Tensor, w: Tensor) -> Tensor:
        with use_impl(head_cross_entropy="triton"):
            total, count = linear_cross_entropy(hidden, w, labels, sh=Sharding.on(axes))
        return total / count

    value, grads = value_and_grad(mean, (0, 1))(hidden, w)
    return [value, *grads]


def errors(args: Any, inputs: list[Tensor], where: torch.device) -> dict[str, dict[str, float]]:
    """Relative L2 of loss and gradients by what is compared."""
    found: dict[str, list[float]] = {}

    def note(name: str, got: list[Tensor], want: list[Tensor]) -> None:
        found[name] = [error(a, b) for a, b in zip(got, want, strict=True)]
        print(f"{name}: {found[name]}", flush=True)

    want = exact(*inputs)
    for name, bound in (("one chunk", 0), ("two chunks", two_chunks(inputs))):
        loss = functools.partial(ours, bound=bound)
        note(f"bfloat16, {name}, against float64", gradients(loss, *inputs), want)
    reference = functools.partial(ours, impl="reference")
    note("bfloat16, reference, against float64", gradients(reference, *inputs), want)
    del want
    inputs = draw(args, args.tokens // 8, torch.float32, where)
    want = gradients(reference, *inputs)
    note("float32, one rank, against the reference", gradients(ours, *inputs), want)
    note("float32, reference, against float64", want, exact(*inputs))
    by_columns = P(None, "tp")
    ranks = shard_map(
        split,
        Mesh(tp=2),
        (by_columns, by_columns, P()),
        [P(), by_columns, by_columns],
        backend="threads",
    )
    with record_impls() as ran:
        note("float32, tp2, against the reference", ranks(*inputs), want)
    assert ran["head_cross_entropy", "triton"] == 2, ran
    names = ("loss", "hidden", "w")
    return {name: dict(zip(names, some, strict=True)) for name, some in found.items()}


def two_chunks(inputs: list[Tensor]) -> int:
    """The bound that cuts the tokens in halves."""
    hidden, w, _ = inputs
    return -(-hidden.shape[1] // 2) * w.shape[1] * hidden.itemsize


def measure(
    inputs: list[Tensor], losses: dict[str, Loss], repeats: int, where: torch.device
) -> list[Row]:
    """Rows of the losses and of the products, which take turns; their bytes are those over inputs
    and gradients.
    """
    hidden, w, labels = inputs
    shape = f"T{hidden.shape[1]} D{w.shape[0]} Z{w.shape[1]}"
    # values too: how fast a GPU multiplies depends on them
    gradient = loss_of_logits((hidden[0] @ w).float(), labels[0])[1].to(w.dtype)
    works: dict[str, list[Callable[[], Any]]] = {}
    extra: dict[str, int] = {}
    rows: list[Row] = []
    nan = float("nan")
    for name, loss in {"products": None, **losses}.items():
        if loss is None:
            one, both = (functools.partial(products, hidden, w, g) for g in (None, gradient))
        else:
            one, both = (functools.partial(f, loss, *inputs) for f in (forward, gradients))
        try:
            extra[name] = extra_bytes(both, where)
        except Exception as e:  # a peer that fails is a row that says so, whatever it raised
            if name in ("products", "fused"):
                raise
            note = f"{type(e).__name__}: {str(e).splitlines()[0][:80]}"
            rows.append(Row(shape, name, nan, nan, nan, nan, 0, note))
            print(f"{shape} {name:20} {note}", flush=True)
            continue
        works[f"{name}|{_FORWARD}"] = [one]
        works[f"{name}|{_BOTH}"] = [both]
    times = take_turns(works, where, repeats)
    floors = times[f"products|{_FORWARD}"], times[f"products|{_BOTH}"]
    for name, nbytes in extra.items():
        own = times[f"{name}|{_FORWARD}"], times[f"{name}|{_BOTH}"]
        rows.append(Row(shape, name, *own, *floors, nbytes))
        print(
            f"{shape} {name:20} forward {own[0]:8.3f} ms {own[0] / floors[0]:.3f} of the products, "
            f"both {own[1]:8.3f} ms {own[1] / floors[1]:.3f}; "
            f"{nbytes / 2**30:.3f} GiB over inputs and gradients",
            flush=True,
        )
    return rows


def main() -> int:
    """Prints errors, then a row per form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=str(devices.default()))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--vocabulary", type=int, default=163840)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    where = cuda_device(parser, args.device)
    inputs = draw(args, args.tokens, torch.bfloat16, where)
    halves = functools.partial(ours, bound=two_chunks(inputs))
    losses: dict[str, Loss] = {"fused": ours, "fused, two chunks": halves, "eager": plain}
    if args.compile:
        losses["torch.compile"] = torch.compile(plain, dynamic=False)
    rows = measure(inputs, losses, args.repeats, where)
    write_json(args.json, "head", where, rows, {})
    found = {"errors": errors(args, inputs, where)}
    write_json(args.json, "head", where, rows, found)
    del inputs
    # where the logits of three chunks of four are computed again
    inputs = draw(args, 4 * args.tokens, torch.bfloat16, where)
    rows += measure(inputs, {"fused": ours}, max(1, args.repeats // 3), where)
    write_json(args.json, "head", where, rows, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
