"""Gradients and second derivatives of scalar functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn

from k31fn import tree
from k31fn.autodiff.compiled import refuse_compile
from k31fn.autodiff.leaves import differentiable, pick
from k31fn.autodiff.transforms import vjp

__all__ = ["hessian", "hvp", "value_and_grad"]


# Bound, so that the argument of a lambda, which has no type, is Any and not object.
_First = TypeVar("_First", bound=Any)
_Aux = TypeVar("_Aux")
_Rest = ParamSpec("_Rest")


# A gradient has the type of the argument. Of another argument than the first, or of several, the
# type system cannot say so.
@overload
def value_and_grad(
    f: Callable[Concatenate[_First, _Rest], Tensor],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[False] = False,
) -> Callable[Concatenate[_First, _Rest], tuple[Tensor, _First]]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[_First, _Rest], tuple[Tensor, _Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
) -> Callable[Concatenate[_First, _Rest], tuple[tuple[Tensor, _Aux], _First]]: ...
@overload
def value_and_grad(
    f: Callable[..., Any], argnums: int | tuple[int, ...], *, has_aux: bool = False
) -> Callable[..., Any]: ...


def value_and_grad(
    f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """The function that returns ``f``'s scalar value and its gradient with respect to
    ``args[argnums]``.

    The numbers of ``torch.func.grad_and_value``, without its graph of the backward: this is what
    training calls.

    Returns:
        ``(*args, **kwargs) -> (value, grads)``, or ``((value, aux), grads)`` if ``has_aux``.
        ``grads`` has the structure of the argument (a tuple of trees for a tuple of argnums), with
        ``()`` for an integer leaf among floating ones.

    Raises:
        ValueError: the value is not a floating scalar, an argument is named twice or is not there,
            ``f`` or a leaf of a named argument is an ``nn.Module``, or a named argument has leaves
            and none is a floating tensor; names the first.
    """
    chosen = _positions("value_and_grad", f, argnums)

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        refuse_compile("value_and_grad")
        some = _differentiated("value_and_grad", args, chosen, every=False)

        def of_chosen(*some: Any) -> Any:
            return f(*_with(args, chosen, some), **kwargs)

        result = vjp(of_chosen, *some, has_aux=has_aux)
        value, pull = result[0], result[1]
        if not isinstance(value, Tensor) or value.ndim or not differentiable(value):
            raise ValueError(
                f"value_and_grad: {_name(f)} must return a floating scalar, got "
                f"{_described(value)}{_advice(value, has_aux)}"
            )
        grads = pull(torch.ones_like(value))
        grads = grads[0] if isinstance(argnums, int) else grads
        return ((value, result[2]), grads) if has_aux else (value, grads)

    return wrapped


def hessian(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """The Hessian of a scalar function, reverse over reverse (``torch.func.hessian`` needs forward
    mode).
    """
    return torch.func.jacrev(torch.func.jacrev(f, argnums), argnums)


def hvp(f: Callable[..., Any], v: Any, *args: Any, argnums: int | tuple[int, ...] = 0) -> Any:
    """The Hessian of ``f`` at ``args`` times ``v``, reverse over reverse: about two gradients.

    Nothing of the Hessian's size is made. Under ``torch.func.vmap`` over ``v`` it is many products;
    with :func:`k31fn.tree.vdot` it is what conjugate gradients need.

    >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
    >>> hvp(lambda x: x.pow(3).sum(), v, x)        # diag(6 x) v
    tensor([6., 0.])

    Args:
        f: returns a floating scalar.
        v: a tree with the structure and shapes of the argument (a tuple of trees for a tuple of
            argnums).
        args: of ``f``.
        argnums: with respect to which the second derivative is taken.

    Raises:
        ValueError: as :func:`value_and_grad`, any leaf of the argument is no floating tensor, or
            ``v`` is not like the argument.
        RuntimeError: an operator on the way is of first order only; the message names what is not.
    """
    chosen = _positions("hvp", f, argnums)
    some = _differentiated("hvp", args, chosen, every=True)

    def gradients(*some: Any) -> Any:
        return value_and_grad(f, chosen)(*_with(args, chosen, some))[1]

    vectors = (v,) if isinstance(argnums, int) else tuple(v)
    for position, arg, vector in zip(chosen, some, vectors, strict=True):
        _check_like(position, arg, vector)
    _, pull = vjp(gradients, *some)
    products = pull(vectors)
    return products[0] if isinstance(argnums, int) else products


def _positions(name: str, f: Callable[..., Any], argnums: int | tuple[int, ...]) -> tuple[int, ...]:
    """The arguments to differentiate, as a tuple."""
    if isinstance(f, nn.Module):
        raise ValueError(
            f"{name}: {type(f).__name__} is an nn.Module, whose parameters are no argument; "
            "differentiate lambda p, x: torch.func.functional_call(module, p, (x,))"
        )
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if len(set(chosen)) != len(chosen):
        raise ValueError(
            f"{name}: argnums={argnums} names an argument twice; its gradient would be split"
        )
    return chosen


def _differentiated(
    name: str, args: tuple[Any, ...], chosen: tuple[int, ...], *, every: bool
) -> list[Any]:
    """The named arguments, of which some leaf has a gradient, or ``every`` one, and none is a
    module.
    """
    for i in chosen:
        if not -len(args) <= i < len(args):
            raise ValueError(f"{name}: argnums names {i}, but there are {len(args)} arguments")
        # None is refused below, with the number of the argument in its path.
        pairs = tree.flatten_with_paths(args[i], allow_none=True)
        without = [(path, leaf) for path, leaf in pairs if not _has_gradient(leaf)]
        modules = [(path, leaf) for path, leaf in without if isinstance(leaf, nn.Module)]
        for path, leaf in modules or without:
            fix = "pass it as an argument of its own, or by closure"
            if modules:
                fix = "give its parameters as a dict, and call torch.func.functional_call"
            elif not every and len(without) < len(pairs):
                continue  # as a quantised weight among others: its gradient is ()
            place = f"leaf {path!r} of argument {i}" if path else f"argument {i}"
            raise ValueError(f"{name}: {place} is {_described(leaf)}, which has no gradient; {fix}")
    return pick(args, chosen)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and differentiable(leaf)


def _with(args: tuple[Any, ...], chosen: tuple[int, ...], some: tuple[Any, ...]) -> list[Any]:
    replaced = list(args)
    for i, value in zip(chosen, some, strict=True):
        replaced[i] = value
    return replaced


def _check_like(position: int, arg: Any, vector: Any) -> None:
    try:
        pairs = tree.leaves(tree.map(_Pair, arg, vector), is_leaf=lambda x: isinstance(x, _Pair))
    except ValueError as difference:
        raise ValueError(f"hvp: v is not like argument {position}: {difference}") from None
    for leaf, of_vector in pairs:
        if not isinstance(of_vector, Tensor) or _kind(of_vector) != _kind(leaf):
            raise ValueError(
                f"hvp: v has {_described(of_vector)} where argument {position} has "
                f"{_described(leaf)}; give a tree like the argument"
            )


class _Pair(NamedTuple):
    leaf: Tensor
    of_vector: Any


def _kind(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    return x.shape, x.dtype


def _described(x: Any) -> str:
    """A tensor by its dtype and shape: its values fill screens, and would be waited for."""
    if isinstance(x, Tensor):
        return f"a tensor of {x.dtype} and shape {list(x.shape)}"
    if isinstance(x, bool | int | float | str):
        return f"{type(x).__name__} {x!r}"
    return f"a {type(x).__name__}"


def _advice(value: Any, has_aux: bool) -> str:
    if isinstance(value, tuple) and not has_aux:
        return "; for (value, aux) say has_aux=True"
    return "; take a sum or a mean" if isinstance(value, Tensor) and value.ndim else ""


def _name(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", type(f).__name__)
