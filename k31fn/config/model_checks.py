"""Whether a recipe's model can be run and trained as it asks, before any work."""

from __future__ import annotations

from k31fn import model, params
from k31fn.layers import kinds
from k31fn.layers.kind import TokenMixer

__all__ = ["check_logits", "check_size"]

_MOST_PARAMETERS = 10**15


def check_size(cfg: model.Config) -> None:
    """Refuses a model that no machine holds.

    Raises:
        ValueError: names the part that has too many parameters.
    """
    # by part and not by layer: a hundred layers cost as much as one of each kind
    sizes = {"model.vocab_size x hidden_size": cfg.vocab_size * cfg.hidden_size}
    for name in cfg.used():
        config = cfg.sublayers[name]
        sizes[f"model.{name}"] = params.count(kinds.sublayer_of(config).specs(config))
    for name, size in sizes.items():
        if size > _MOST_PARAMETERS:
            raise ValueError(
                f"{name} has {size:.1e} parameters, more than {_MOST_PARAMETERS:.0e}; lower its "
                "sizes"
            )


def check_logits(cfg: model.Config, qk_clip: float) -> None:
    """Refuses to bound attention logits where there are none.

    Raises:
        ValueError: no layer reports them.
    """
    for name in cfg.used():
        kind = kinds.kind_of(cfg.sublayers[name])
        if isinstance(kind, TokenMixer) and kind.with_logits is not None:
            return
    # refused, not without effect: logits would look bounded and are not
    raise ValueError(
        f"optimizer.qk_clip={qk_clip}: no layer of the model has attention logits to clip; set it "
        "to 0"
    )
