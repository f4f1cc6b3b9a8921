"""Reverse-mode differentiation of pure functions over pytrees.

* :class:`custom_vjp`: a function with its own backward, usable under every ``torch.func``
  transform.
* :func:`vjp`, :func:`value_and_grad`: what training uses. ``torch.func.grad`` always builds the
  graph of the backward as well; these do not, and give the same numbers.
* :func:`remat`: keep a function's inputs only and run it again in the backward; :func:`keep` marks
  functions inside that do not run again.
* :func:`decision`: an integer choice (a route, a top-k set) made once and kept by every enclosing
  :func:`remat`; :func:`report`: integers that a function only tells (counts), which no remat keeps
  or makes again.
* :func:`split_vjp`: a pullback in two parts, the inputs' and the weights'; :func:`weight_product`
  marks what it splits.
* :func:`stop_gradient`, :func:`hessian`, :func:`hvp`: the product of a Hessian with a vector.

Forward mode (``torch.func.jvp``, ``jacfwd``, ``torch.func.hessian``) is not supported and says so:
:func:`hvp` and :func:`hessian` are reverse over reverse.

What is ambient (implementation overrides, decisions, axis environments) lives in context variables.
A backward may run on another thread, where they have other values, so :func:`remat` captures the
context in its forward and replays in it, and the backward of a :class:`custom_vjp` finds the
variables given to :func:`carry` as its forward did.
"""

from k31fn.autodiff.ambient import carry
from k31fn.autodiff.custom_vjp import custom_vjp
from k31fn.autodiff.gradients import hessian, hvp, value_and_grad
from k31fn.autodiff.keep import keep
from k31fn.autodiff.remat import remat
from k31fn.autodiff.replay import (
    decision,
    record_decisions,
    replay_decisions,
    report,
    stop_gradient,
)
from k31fn.autodiff.split_vjp import SplitWork, check_split, split_vjp
from k31fn.autodiff.transforms import vjp
from k31fn.autodiff.weight_grads import weight_product

__all__ = [
    "SplitWork",
    "carry",
    "check_split",
    "custom_vjp",
    "decision",
    "hessian",
    "hvp",
    "keep",
    "record_decisions",
    "remat",
    "replay_decisions",
    "report",
    "split_vjp",
    "stop_gradient",
    "value_and_grad",
    "vjp",
    "weight_product",
]


def __dir__() -> list[str]:
    return __all__
