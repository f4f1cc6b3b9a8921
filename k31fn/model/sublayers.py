"""The named sublayers of a model, from which its layers choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from k31fn.layers import kinds
from k31fn.layers.kind_checks import check_config

__all__ = ["Sublayers"]


class Sublayers(Mapping[str, Any]):
    """Configs of sublayers by name, each of a registered kind; immutable and hashable.

        Sublayers(kda=kda.Config(...), local=sliding_window.Config(...), mlp=mlp.Config(...))

    Two names may have the same kind, with other sizes.

    Raises:
        ValueError: a name that is no identifier, a config of no registered kind or of a residual
            scheme, or one whose kind declares or reports what is none; names it.
    """

    __slots__ = ("_configs",)

    def __init__(self, **configs: Any) -> None:
        for name, config in configs.items():
            if not name.isidentifier():
                raise ValueError(
                    f"model.Config.sublayers[{name!r}]: a name must be an identifier, since the "
                    f"command line sets --model.{name}.FIELD; use letters, digits and _"
                )
            # Here and not where a layer is built: the name of the part is still known.
            try:
                check_config(kinds.sublayer_of(config), config)
            except ValueError as error:
                raise ValueError(f"model.Config.sublayers[{name!r}]: {error}") from error
        self._configs = configs

    def __getitem__(self, name: str) -> Any:
        return self._configs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)

    def __hash__(self) -> int:
        # By content: recipes are keys of caches, and a dict cannot be hashed. Unordered, as == is.
        return hash(frozenset(self._configs.items()))

    def __repr__(self) -> str:
        configs = ", ".join(f"{name}={config!r}" for name, config in self._configs.items())
        return f"Sublayers({configs})"
