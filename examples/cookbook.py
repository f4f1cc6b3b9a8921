"""A cookbook of derivatives: what research asks of a model, one short function for each.

The model is a language model of one KDA layer and one MLP; each recipe takes any function of a
parameter tree in its place. Run: ``python -m examples.cookbook``
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k31fn import optim, params, random, segments, tree
from k31fn.autodiff import hvp, value_and_grad
from k31fn.layers import embedding, kda, losses, mlp
from k31fn.layers.linear import linear
from k31fn.params import Normal, ParamSpec

D, Z = 8, 11  # hidden size, vocabulary
EMBEDDING = embedding.Config(Z, D, init_std=1.0)
KDA = kda.Config(D, num_heads=1, head_dim=8, init_std=0.2)
MLP = mlp.Config(D, intermediate_size=16, init_std=0.2)
SPECS = {
    "embedding": embedding.specs(EMBEDDING),
    "kda": kda.specs(KDA),
    "mlp": mlp.specs(MLP),
    "head": ParamSpec((D, Z), ("hidden", "vocab"), Normal(0.2)),
}

Weights = dict[str, Any]


def hidden(p: Weights, tokens: Tensor) -> Tensor:
    """The last hidden state of each token."""
    x = embedding.apply(p["embedding"], tokens, EMBEDDING)
    x = x + kda.apply(p["kda"], x, KDA).y
    return x + mlp.apply(p["mlp"], x, MLP).y


def loss(p: Weights, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token; each row is one document."""
    labels = segments.next_token_labels(tokens, segments.whole(*tokens.shape))
    lm = losses.linear_cross_entropy(hidden(p, tokens), p["head"], labels)
    return losses.mean(lm.total, lm.num_tokens)


def per_sample_gradients(p: Weights, rows: Tensor) -> Weights:
    """The gradient of each row by itself, stacked in front of each leaf."""
    return torch.func.vmap(torch.func.grad(lambda p, row: loss(p, row[None])), (None, 0))(p, rows)


def sharpest_direction(p: Weights, tokens: Tensor, v: Weights, steps: int) -> tuple[Tensor, Any]:
    """The Hessian's eigenvalue of largest magnitude and its vector, by power iteration from ``v``:
    a Hessian-vector product a step, and never the Hessian.
    """
    for _ in range(steps):
        v = tree.scale(tree.vdot(v, v).rsqrt(), v)
        v = hvp(loss, v, p, tokens)
    v = tree.scale(tree.vdot(v, v).rsqrt(), v)
    return tree.vdot(v, hvp(loss, v, p, tokens)), v


def conjugate_gradients(product: Callable[[Any], Any], b: Any, steps: int) -> Any:
    """Solves ``A x = b`` for trees, where ``product(v)`` is ``A v`` of a positive definite A."""
    x = tree.zeros_like(b)
    residual, direction = b, b
    squared = tree.vdot(b, b)
    for _ in range(steps):
        moved = product(direction)
        rate = squared / tree.vdot(direction, moved)
        x = tree.add(x, tree.scale(rate, direction))
        residual = tree.add(residual, tree.scale(-rate, moved))
        before, squared = squared, tree.vdot(residual, residual)
        direction = tree.add(residual, tree.scale(squared / before, direction))
    return x


def influence(
    p: Weights, train: Tensor, test: Tensor, *, damping: float, steps: int
) -> tuple[Tensor, Weights]:
    """What the loss of ``test`` loses by a little more weight on each row of ``train`` (Koh and
    Liang 2017): ``-g_row . u`` where ``(H + damping) u = g_test``; also ``u``.
    """

    def damped(v: Weights) -> Weights:
        return tree.add(hvp(loss, v, p, train), tree.scale(damping, v))

    u = conjugate_gradients(damped, value_and_grad(loss)(p, test)[1], steps)
    of_rows = per_sample_gradients(p, train)
    return -torch.func.vmap(tree.vdot, (0, None))(of_rows, u), u


def maml_loss(p: Weights, tasks: list[tuple[Tensor, Tensor]], rate: float) -> Tensor:
    """The mean loss over tasks after one inner step on each (Finn et al. 2017); its gradient goes
    through the step.
    """
    total = []
    for support, query in tasks:
        _, grads = value_and_grad(loss)(p, support)
        total.append(loss(tree.add(p, tree.scale(-rate, grads)), query))
    return torch.stack(total).mean()


def ensemble(keys: Tensor, dtype: torch.dtype) -> Weights:
    """Many models, stacked in front of each leaf: one for each key."""
    return torch.func.vmap(lambda key: params.init(SPECS, key, dtype=dtype))(keys)


def ensemble_losses(stacked: Weights, tokens: Tensor) -> Tensor:
    """The loss of each model of an :func:`ensemble` on the same tokens."""
    return torch.func.vmap(loss, (0, None))(stacked, tokens)


def losses_by_rate(p: Weights, tokens: Tensor, rates: Tensor, steps: int) -> Tensor:
    """The loss after some steps of AdamW, for many learning rates at once.

    An update changes no input, so all rates start from the same tree.
    """
    transform = optim.adamw(SPECS)
    start = transform.init(p)

    def train(rate: Tensor) -> Tensor:
        weights, state = p, start
        for _ in range(steps):
            _, grads = value_and_grad(loss)(weights, tokens)
            weights, state = transform.update(grads, state, weights, lr=rate)
        return loss(weights, tokens)

    return torch.func.vmap(train)(rates)


def train_head_alone(p: Weights, tokens: Tensor, steps: int) -> Weights:
    """Trains one part; the rest is an argument that nobody differentiates."""
    trained, frozen = {"head": p["head"]}, {k: v for k, v in p.items() if k != "head"}
    transform = optim.adamw({"head": SPECS["head"]})
    state = transform.init(trained)
    step = value_and_grad(lambda trained, frozen: loss({**frozen, **trained}, tokens))
    for _ in range(steps):
        _, grads = step(trained, frozen)
        trained, state = transform.update(grads, state, trained, lr=0.01)
    return {**frozen, **trained}


def tied_loss(p: Weights, tokens: Tensor) -> Tensor:
    """The loss with the embedding's table for the head: a leaf less, and one gradient, the sum of
    both uses.
    """
    return loss({**p, "head": p["embedding"].weight.mT}, tokens)


def generate(
    p: Weights, prompt: Tensor, count: int, choose: Callable[[Tensor, Tensor], Tensor], key: Tensor
) -> Tensor:
    """Tokens ``[B, count]`` after a prompt: the layers' states go in and come out, and
    ``choose(logits, key)`` is yours.
    """
    state = kda.init_state(KDA, prompt.shape[0], dtype=p["head"].dtype)
    chosen = []
    tokens = prompt
    for i in range(count):
        x = embedding.apply(p["embedding"], tokens, EMBEDDING)
        y, state = kda.extend(p["kda"], x, KDA, state)
        x = x + y
        x = x + mlp.apply(p["mlp"], x, MLP).y
        tokens = choose(linear(x[:, -1], p["head"]), random.fold_in(key, i))[:, None]
        chosen.append(tokens)
    return torch.cat(chosen, dim=1)


def greedy(logits: Tensor, key: Tensor) -> Tensor:
    """The most likely token."""
    del key
    return logits.argmax(-1)


def sampled(logits: Tensor, key: Tensor) -> Tensor:
    """A token drawn from the softmax, by Gumbel noise."""
    noise = -torch.log(-torch.log(random.uniform(key, tuple(logits.shape), low=1e-6, high=1.0)))
    return (logits + noise).argmax(-1)


def main() -> None:
    """Runs each recipe once."""
    key = random.key(0)
    p = params.init(SPECS, key, dtype=torch.float64)
    tokens = (torch.arange(4 * 6) ** 2 % 7).reshape(4, 6)
    print("per sample", per_sample_gradients(p, tokens)["head"].shape)
    v = params.init(SPECS, random.key(1), dtype=torch.float64)
    print(f"sharpness {sharpest_direction(p, tokens, v, 3)[0]:.3f}")
    print("influence", influence(p, tokens, tokens[:1], damping=5.0, steps=3)[0])
    tasks = [(tokens[:1], tokens[1:2]), (tokens[2:3], tokens[3:])]
    print(f"after an inner step {value_and_grad(maml_loss)(p, tasks, 0.1)[0]:.3f}")
    stacked = ensemble(random.split(key, 3), torch.float64)
    print("ensemble", ensemble_losses(stacked, tokens))
    rates = torch.tensor([0.001, 0.01, 0.1], dtype=torch.float64)
    print("by rate", losses_by_rate(p, tokens, rates, 3))
    print(f"head alone {loss(train_head_alone(p, tokens, 3), tokens):.3f}")
    untied = {k: v for k, v in p.items() if k != "head"}
    print(f"tied {value_and_grad(tied_loss)(untied, tokens)[0]:.3f}")
    print("greedy", generate(p, tokens, 3, greedy, key).tolist())
    print("sampled", generate(p, tokens, 3, sampled, key).tolist())


if __name__ == "__main__":
    main()
