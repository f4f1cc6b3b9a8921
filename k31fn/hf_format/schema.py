"""Types and bounds of the fields of a foreign ``config.json``: the same for all of them.

Our own config is typed by its dataclasses. A foreign one is a dict of anything: 2.5 layers, NaN, a
list as text, a million of a million experts. Each is refused with its field, value and rule before
a model is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = [
    "DSA",
    "EPS",
    "LAYERS",
    "LINEAR",
    "TEXT",
    "WIDTH",
    "Number",
    "as_floats",
    "differs",
    "wrong_fields",
]

LAYERS = 10_000
"""Most layers of a model, and most numbers in a list of layers."""


class Number(NamedTuple):
    """What a number may be.

    Attributes:
        least: the smallest that is right.
        most: the largest.
        whole: whether it is without a fraction.
        optional: whether null may stand for it.
    """

    least: float
    most: float
    whole: bool = True
    optional: bool = False

    def holds(self, value: Any) -> bool:
        """Whether a value of any type is such a number."""
        if value is None:
            return self.optional
        # type, not isinstance: true is an int to Python. NaN is in no range.
        kinds = (int,) if self.whole else (int, float)
        return type(value) in kinds and self.least <= value <= self.most

    def __str__(self) -> str:
        kind = "a number without a fraction" if self.whole else "a number"
        null = ", or null" if self.optional else ""
        return f"{kind}, from {self.least:g} to {self.most:g}{null}"


WIDTH = Number(1, 1 << 24)
"""Of a layer or a part of one, and counts of such."""
EPS = Number(1e-37, 1.0, whole=False)  # the least whose reciprocal float32 has
"""What keeps a norm from dividing by zero."""

_FACTOR = Number(1e-37, 1e6, whole=False)

# Of the text model, its linear attention and its sparse attention: all of them must be there.
TEXT = {
    "vocab_size": Number(1, (1 << 31) - 1),
    "hidden_size": WIDTH,
    "num_hidden_layers": Number(1, LAYERS),
    "rms_norm_eps": EPS,
    "num_attention_heads": WIDTH,
    "q_lora_rank": WIDTH,
    "kv_lora_rank": WIDTH,
    "qk_nope_head_dim": WIDTH,
    "qk_rope_head_dim": WIDTH,
    "v_head_dim": WIDTH,
    "first_k_dense_replace": Number(0, LAYERS),
    "intermediate_size": WIDTH,
    "num_experts": Number(1, 1 << 16),
    "num_experts_per_token": Number(1, 1 << 16),
    "num_shared_experts": Number(0, 1 << 10),
    "moe_intermediate_size": WIDTH,
    "routed_expert_hidden_size": WIDTH,
    "routed_scaling_factor": _FACTOR,
    "attn_res_block_size": Number(1, LAYERS, optional=True),  # null: a plain residual
    "activation_situ_beta": _FACTOR,
    "activation_situ_linear_beta": _FACTOR,
}
LINEAR = {
    "head_dim": WIDTH,
    "num_heads": WIDTH,
    "short_conv_kernel_size": Number(2, 1 << 10),
    "gate_lower_bound": Number(-1e3, 0, whole=False),
}
DSA = {"index_n_heads": WIDTH, "index_head_dim": WIDTH, "index_topk": Number(1, 1 << 31)}


def wrong_fields(values: Mapping[str, Any], rules: Mapping[str, Number]) -> Iterator[str]:
    """A line for each of some fields that is there and is no such number."""
    for name, rule in rules.items():
        if name in values and not rule.holds(values[name]):
            yield f"{name}={repr(values[name])[:60]} must be {rule}"


def as_floats(values: Mapping[str, Any], rules: Mapping[str, Number]) -> dict[str, Any]:
    """The values, with a 1 as 1.0 where a fraction is allowed: JSON writes it as either."""
    found = dict(values)
    for name, rule in rules.items():
        if not rule.whole and type(found.get(name)) is int:
            found[name] = float(found[name])
    return found


def differs(value: Any, only: Any) -> bool:
    """Whether a value is another than the only right one; 1 is not true, nor 1.0 a 1."""
    return type(value) is not type(only) or value != only
