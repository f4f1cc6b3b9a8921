"""Configs: frozen dataclasses, built by the Python files of ``configs/`` or from plain data.

``load(path)`` gives a config file's model, ``load_recipe(path)`` its training recipe or that of a
run's ``config.json``. ``to_dict`` and ``from_dict`` turn a config into JSON-ready data and back,
strictly and without running any code: what a run writes down is what a later one reads.
``override`` applies command-line arguments.
"""

from k31fn.config.codec import from_dict, to_dict
from k31fn.config.files import load, load_recipe
from k31fn.config.overrides import fields_of, override
from k31fn.config.phase import Phase, Span, spans
from k31fn.config.recipe import Optimizer, Pipeline, Recipe

__all__ = [
    "Optimizer",
    "Phase",
    "Pipeline",
    "Recipe",
    "Span",
    "fields_of",
    "from_dict",
    "load",
    "load_recipe",
    "override",
    "spans",
    "to_dict",
]


def __dir__() -> list[str]:
    return __all__
