"""Functions with their own reverse rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from k31fn import _functorch, tree
from k31fn.autodiff.ambient import CarriedVariables
from k31fn.autodiff.captured_tensors import global_names, reaches_nothing, refuse_captured
from k31fn.autodiff.compiled import refuse_compile
from k31fn.autodiff.leaves import differentiable, pick

__all__ = ["custom_vjp", "detached", "runs_rule"]


class _VjpCall:
    """Record of one call of a rule besides its tensors; travels through ``Function.apply`` as a
    plain object.
    """

    __slots__ = (
        "args_def",
        "constants",
        "num_out",
        "out_def",
        "res_def",
        "res_source",
        "rule",
        "static",
        "variables",
    )

    rule: custom_vjp
    static: tuple[Any, ...]
    args_def: Any
    variables: CarriedVariables
    constants: list[Any]  # per leaf of the arguments: the Python value, or _TENSOR
    out_def: Any
    num_out: int
    res_def: Any
    # per leaf of the residuals: ("input", i) | ("output", i) | ("constant", value)
    res_source: list[tuple[str, Any]]

    def needs(self, wanted: Container[int]) -> tuple[Any, ...]:
        """Per differentiable argument a tree: whether this leaf's gradient is used."""
        needed: list[bool] = []
        number = 0  # among the tensors, as in wanted
        for constant in self.constants:
            is_tensor = constant is _TENSOR
            needed.append(is_tensor and number in wanted)
            number += is_tensor
        return tree.unflatten(self.args_def, needed)

    def args(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The rule's positional arguments with these tensor leaves."""
        remaining = iter(tensors)
        leaves = [next(remaining) if c is _TENSOR else c for c in self.constants]
        args = list(tree.unflatten(self.args_def, leaves))
        # Ascending, so that each lands where it was.
        for i, value in zip(self.rule.nondiff_argnums, self.static, strict=True):
            args.insert(i, value)
        return args


# In the place of a tensor among the constants; None would be a value.
_TENSOR = object()


class _Forward(torch.autograd.Function):
    """The forward of every rule.

    A residual that is an input is saved as that input, so derivatives of any order flow through it;
    other residuals leave as extra outputs, which is how a tensor survives the ``torch.func``
    levels.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _VjpCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        out, residuals = call.rule.fwd(*call.args(tensors))
        outputs, call.out_def = tree.flatten(out)
        for leaf in outputs:
            if not isinstance(leaf, Tensor):
                raise ValueError(
                    f"{call.rule.name}: its output has the leaf {leaf!r}; every leaf must be a "
                    "tensor"
                )
        input_index = {id(t): i for i, t in enumerate(tensors)}
        output_index: dict[int, int] = {}
        fresh: list[Tensor] = []
        # autograd marks the objects that it is given; it must not be an input or a constant that
        # the rule captured
        for i, o in enumerate(outputs):
            if id(o) in input_index:
                fresh.append(o.view_as(o))
            else:
                output_index[id(o)] = i
                fresh.append(o.detach())
        fresh = _batch_alike(fresh)
        call.num_out = len(fresh)
        values, call.res_def = tree.flatten(residuals)
        call.res_source = []
        for value in values:
            if not isinstance(value, Tensor):
                call.res_source.append(("constant", value))
            elif id(value) in input_index:
                call.res_source.append(("input", input_index[id(value)]))
            else:
                if id(value) not in output_index:
                    output_index[id(value)] = len(fresh)
                    fresh.append(value.detach())
                call.res_source.append(("output", output_index[id(value)]))
        return tuple(fresh)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, *tensors = inputs
        ctx.call = call
        ctx.runs_rule = True  # the context is the node of the graph: see runs_rule()
        # Without this a residual's missing cotangent would be zeros, and look like a second
        # derivative through it.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o in output if not differentiable(o)])
        saved: list[Tensor] = []
        for kind, i in call.res_source:
            if kind != "constant":
                saved.append(tensors[i] if kind == "input" else output[i])
        ctx.save_for_backward(*saved)
        ctx.inputs = [(t.shape, differentiable(t)) for t in tensors]
        ctx.outputs = [(o.shape, o.dtype, o.device) for o in output[: call.num_out]]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        call: _VjpCall = ctx.call
        if any(c is not None for c in cotangents[call.num_out :]):
            raise RuntimeError(
                f"{call.rule.name}: a second derivative needs the gradient of a residual that is "
                "neither an input nor an output of the function; save inputs and outputs only, or "
                "use the reference implementation"
            )
        filled: list[Tensor | None] = []
        for ct, (shape, dtype, device) in zip(cotangents[: call.num_out], ctx.outputs, strict=True):
            absent = ct is None and dtype.is_floating_point
            # A bwd is given a tensor for each output, also for one that nobody used.
            filled.append(torch.zeros(shape, dtype=dtype, device=device) if absent else ct)
        needed = ctx.needs_input_grad[1:]
        # Needed is what autograd will use: not the gradient of a frozen weight.
        wanted = [i for i, (_, has_grad) in enumerate(ctx.inputs) if has_grad and needed[i]]
        if call.rule.opaque:
            # The residuals are arguments too: a second derivative could go through them.
            wanted_grads = _OpaqueBackward.apply(
                call, wanted, len(filled), *filled, *ctx.saved_tensors
            )
        else:
            wanted_grads = _run_backward(call, wanted, filled, ctx.saved_tensors)
        grads: list[Tensor | None] = [None] * len(ctx.inputs)
        for i, grad in zip(wanted, wanted_grads, strict=True):
            shape = ctx.inputs[i][0]
            if grad is not None and grad.shape != shape:
                raise ValueError(
                    f"{call.rule.name}: bwd returned a gradient of shape {tuple(grad.shape)} for "
                    f"an input of shape {tuple(shape)}"
                )
            grads[i] = grad
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_forward_mode(ctx.call.rule.name)


def _batch_alike(outputs: list[Tensor]) -> list[Tensor]:
    """Batches all floating outputs under ``vmap`` if one is.

    torch's generated rule sums the gradient of an unbatched input over the samples. It would do so
    also with the part that comes from an unbatched output, whose cotangent is the sum already:
    counted once per sample (torch 2.11, 2.13).
    """
    batched: Tensor | None = None
    for o in outputs:
        if differentiable(o) and _functorch.is_batched_here(o):
            batched = o
            break
    if batched is None:
        return outputs
    zero = batched.detach().flatten()[:0].sum()  # not from values, so never NaN
    alike: list[Tensor] = []
    for o in outputs:
        is_alone = differentiable(o) and not _functorch.is_batched_here(o)
        alike.append(o + zero.to(o.dtype) if is_alone else o)
    return alike


class _OpaqueBackward(torch.autograd.Function):
    """The backward of an opaque rule as one node whose own backward refuses.

    An opaque kernel tapes nothing, so a second derivative through it would be silently wrong.
    Counting grad levels instead gives false alarms (``torch.func.grad`` over ``remat`` over an
    opaque rule is first order).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        call: _VjpCall, wanted: list[int], num_cotangents: int, *tensors: Tensor | None
    ) -> tuple[Any, ...]:
        cotangents = tensors[:num_cotangents]
        saved = tensors[num_cotangents:]
        return tuple(_run_backward(call, wanted, cotangents, saved))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        rule = inputs[0].rule
        ctx.name = rule.name
        ctx.instead = rule.instead
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        raise RuntimeError(
            f"{ctx.name} is first order only: a second derivative through it is not defined; use "
            f"{ctx.instead}, which is differentiable to any order"
        )


# Function.apply asks for these signatures at each call: so they are there (torch 2.11, 2.13).
for _function in (_Forward, _OpaqueBackward):
    _forward: Any = _function.forward
    _forward.__signature__ = inspect.signature(_forward)


def _run_backward(
    call: _VjpCall,
    wanted: list[int],
    cotangents: Sequence[Tensor | None],
    saved: Sequence[Tensor | None],
) -> list[Tensor | None]:
    remaining = iter(saved)
    leaves = [v if kind == "constant" else next(remaining) for kind, v in call.res_source]
    residuals = tree.unflatten(call.res_def, leaves)
    ct = tree.unflatten(call.out_def, list(cotangents))
    needs = (call.needs(set(wanted)),) if call.rule.needs else ()
    # On the thread of a device's backward, context variables have their defaults.
    with call.variables.entered():
        grads = call.rule.bwd(*call.static, *needs, residuals, ct)
    subtrees = call.args_def.children()
    if not isinstance(grads, tuple) or len(grads) != len(subtrees):
        raise ValueError(
            f"{call.rule.name}: bwd must return a tuple of {len(subtrees)} gradients, one per "
            "argument"
        )
    of_leaves: list[Tensor | None] = []
    for subtree, grad in zip(subtrees, grads, strict=True):
        if grad is None:
            of_leaves += [None] * subtree.num_leaves
        else:
            of_leaves += _grad_leaves(call, subtree, grad)
    of_tensors: list[Tensor | None] = []
    for grad, constant in zip(of_leaves, call.constants, strict=True):
        if constant is _TENSOR:
            of_tensors.append(grad)
    return pick(of_tensors, wanted)


def _grad_leaves(call: _VjpCall, subtree: Any, grad: Any) -> list[Tensor | None]:
    values = tree.leaves(grad, allow_none=True)
    if len(values) != subtree.num_leaves:
        raise ValueError(
            f"{call.rule.name}: bwd returned {len(values)} gradient leaves for an argument with "
            f"{subtree.num_leaves}"
        )
    return values


def _refuse_forward_mode(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} under forward-mode differentiation: k31fn functions are reverse-mode only; use "
        "k31fn.autodiff.hvp or hessian (reverse over reverse), or torch.func.jacrev"
    )


def runs_rule(node: Any) -> bool:
    """Whether the backward of this node of an autograd graph is the ``bwd`` of a rule."""
    return getattr(node, "runs_rule", False)


class custom_vjp:  # noqa: N801 (a function's maker, spelt as in JAX)
    """A function of pytrees that is given by its forward and its reverse rule.

    ``fwd(*args) -> (out, residuals)`` and ``bwd(*static, residuals, ct) -> one gradient tree (or
    None for zero) per differentiable argument``. Works under ``torch.func.grad``, ``vjp``,
    ``vmap``, ``jacrev``, nested, and under plain autograd, with any number of leaves. Rules in
    plain torch are differentiable to any order as long as their residuals are inputs and outputs.

    A square that is scaled by a Python number, whose gradient reads the input again:

    >>> def fwd(x, scale):
    ...     return scale * x * x, x          # the value, and what bwd is to be given
    >>> def bwd(scale, x, ct):               # static arguments, residuals, cotangent
    ...     return (2 * scale * x * ct,)     # one gradient for each differentiable argument
    >>> scaled_square = custom_vjp(fwd, bwd, nondiff_argnums=(1,), name="scaled_square")
    >>> scaled_square(torch.tensor(3.0), 5)
    tensor(45.)
    >>> torch.func.grad(scaled_square)(torch.tensor(3.0), 5)
    tensor(30.)
    >>> torch.func.vmap(torch.func.grad(scaled_square), (0, None))(torch.tensor([1.0, 2.0]), 5)
    tensor([10., 20.])

    Its only residual is an input, so it has a second derivative too:

    >>> torch.func.grad(torch.func.grad(scaled_square))(torch.tensor(3.0), 5)
    tensor(10.)

    Args:
        fwd: the value and the residuals, a tree of tensors and plain Python values. It must not
            read a differentiated tensor that is not among its arguments.
        bwd: the gradients, from the static arguments, the residuals and the cotangent, which has
            the structure of the output.
        nondiff_argnums: positions of plain Python arguments; they reach ``bwd`` first, in the order
            of their position.
        opaque: the backward cannot be taped (a kernel). A second derivative then raises instead of
            being wrong.
        needs: ``bwd`` is told whose gradients are used, ``bwd(*static, needs, residuals, ct)``:
            ``needs`` has a tree of bools per differentiable argument, with its structure (a bool
            for a tensor). For a frozen weight, or an integer, it is False; the gradient returned
            for it is dropped and may be None.
        name: for messages; by default that of ``fwd``.
        instead: what the message about a second derivative recommends.

    Raises:
        ValueError: (at a call) ``fwd`` captured a differentiated tensor; its gradient would
            silently be zero.
    """

    def __init__(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        *,
        nondiff_argnums: Sequence[int] = (),
        opaque: bool = False,
        needs: bool = False,
        name: str = "",
        instead: str = "the reference implementation (k31fn.kernels.registry.use_impl)",
    ) -> None:
        self.fwd = fwd
        self.bwd = bwd
        self.nondiff_argnums = tuple(sorted(nondiff_argnums))
        self.opaque = opaque
        self.needs = needs
        self.name = name or getattr(fwd, "__name__", type(fwd).__name__)
        self.instead = instead
        self._global_names = global_names(fwd)

    def __call__(self, *args: Any) -> Any:
        """The function's value."""
        refuse_compile(self.name)
        call = _VjpCall()
        call.rule = self
        call.variables = CarriedVariables()
        call.static = tuple(pick(args, self.nondiff_argnums))
        # The search takes as long as a small operator; most rules are plain functions.
        if not reaches_nothing(self.fwd, self._global_names, call.static):
            refuse_captured(self.name, self.fwd, call.static)
        traced = list(args)
        for i in reversed(self.nondiff_argnums):
            del traced[i]
        values, call.args_def = tree.flatten(tuple(traced))
        call.constants = []
        tensors: list[Tensor] = []
        for value in values:
            if isinstance(value, Tensor):
                tensors.append(value)
                call.constants.append(_TENSOR)
            else:
                call.constants.append(value)
        outputs = _Forward.apply(call, *tensors)
        return tree.unflatten(call.out_def, outputs[: call.num_out])


def detached(x: Any) -> Any:
    """The tree ``x`` with zero gradient, at every order and every ``torch.func`` level."""
    return tree.map(lambda t: t.detach() if isinstance(t, Tensor) and differentiable(t) else t, x)
