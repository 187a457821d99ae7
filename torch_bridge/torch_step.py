"""Training steps that torch itself runs, with the interface of a compiled step."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from jaxtrain.errors import UserError
from torch_bridge.datasets import to_torch
from torch_bridge.lowering.python.names import mentions
from torch_bridge.second_derivatives import twice_differentiable  # noqa: F401


def are_torchs(module: Any, optimizer: Any) -> bool:
    """Return True for a torch module and a torch optimizer; isinstance() would run an object's own __class__."""
    return issubclass(type(module), torch.nn.Module) and issubclass(type(optimizer), torch.optim.Optimizer)


def replaced_forward(module: torch.nn.Module) -> str | None:
    """Return the name of an inner module whose forward is not the one that its class was written with, or None.

    It was set on the object, or put into the class by other code. Decorators that set __wrapped__ are looked through.
    """
    for name, inner in module.named_modules():
        kind = next(kind for kind in type(inner).__mro__ if "forward" in vars(kind))
        written = getattr(inspect.unwrap(vars(kind)["forward"]), "__globals__", {}).get("__name__") == kind.__module__
        if "forward" in vars(inner) or not written:
            return name or type(inner).__name__
    return None


def clipping_is_replaced() -> bool:
    """Return True if torch.nn.utils.clip_grad_norm_ is not torch's own."""
    return torch.nn.utils.clip_grad_norm_ is not torch.nn.utils.clip_grad.clip_grad_norm_


class TorchStep:
    """Call with (batch, update); returns the detached loss, or (loss, values) if loss_fn(module, batch) returns both.

    With `update`, gradients are clipped to clip_norm and the optimizer and scheduler step; without it, gradients are
    kept and summed. lowered: the forward pass runs under torch.autocast in bfloat16. scaler: a GradScaler, or None.
    Tensors are moved to the module's device.
    """

    def __init__(
        self,
        module: Any,
        loss_fn: Callable,
        optimizer: Any,
        scheduler: Any,
        clip_norm: float | None,
        lowered: bool,
        scaler: Any = None,
    ):
        self.module, self.loss_fn, self.optimizer, self.scheduler = module, loss_fn, optimizer, scheduler
        self.clip_norm, self.lowered, self.scaler = clip_norm, lowered, scaler

    def __call__(self, batch: Any, update: bool = True) -> Any:
        with self._autocast():
            found = self.loss_fn(self.module, self._moved(batch))
        loss, values = found if isinstance(found, tuple) else (found, {})
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if update:
            self._update()
        values = {name: value.detach() if hasattr(value, "detach") else value for name, value in values.items()}
        return (loss.detach(), values) if values else loss.detach()

    def _update(self) -> None:
        clip_and_step(self.module, self.optimizer, self.clip_norm, self.scaler)
        if self.scheduler is not None:
            self.scheduler.step()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs in evaluation mode; its mode is restored afterwards."""
        return in_evaluation(self.module, self.module, self._moved(args), self._moved(kwargs))

    def _autocast(self) -> Any:
        return torch.autocast(self._device().type, torch.bfloat16, enabled=self.lowered)

    def _device(self) -> torch.device:
        parameters = self.module.parameters() if issubclass(type(self.module), torch.nn.Module) else ()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._device())
        if isinstance(value, Mapping):
            return {name: self._moved(inner) for name, inner in value.items()}
        return type(value)(map(self._moved, value)) if type(value) in (list, tuple) else value


def clip_and_step(module: Any, optimizer: Any, clip_norm: float | None, scaler: Any = None) -> None:
    """Clip the gradients of the module's parameters, update the weights and clear the gradients.

    clip_norm: None for no clipping. scaler: the GradScaler whose scale the gradients carry, or None.
    """
    if clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


@torch.no_grad()
def in_evaluation(module: torch.nn.Module, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Call a function, such as the module or one of its methods, while the module is in evaluation mode."""
    modes = [(inner, inner.training) for inner in module.modules()]
    module.eval()
    try:
        return function(*args, **kwargs)
    finally:
        for inner, training in modes:
            inner.training = training


def set_gradients(tensors: Mapping[str, Any], parameters: Iterable[Any], grads: Mapping[str, Any]) -> None:
    """Set the parameters' gradients from arrays, by the tensor's name; clear the gradients of all others."""
    for parameter in parameters:
        parameter.grad = None
    for name, grad in grads.items():
        tensors[name].grad = to_torch(np.array(grad)).reshape(tensors[name].shape).to(tensors[name])


def gradients(tensors: Mapping[str, Any], parameters: Iterable[Any]) -> dict[str, np.ndarray]:
    """Return the gradients of the parameters that have one, by name."""
    held = {id(parameter) for parameter in parameters}
    return {n: x.grad.numpy(force=True) for n, x in tensors.items() if id(x) in held and x.grad is not None}


def loss_of(arguments: Sequence[Any], loss_fn: Callable, batch: Any, optimizer: Any, lowered: bool) -> Any:
    """Call the loss function. Takes the arguments of `backward`."""
    is_array = lambda leaf: issubclass(type(leaf), np.ndarray)  # isinstance() would run an object's own __class__
    own = mentions(loss_fn, "from_numpy")  # it makes its tensors of a batch of arrays
    if not own and any(map(is_array, pytree.tree_leaves(batch))):  # else itself: the loss may write to it
        batch = pytree.tree_map(lambda leaf: to_torch(leaf) if is_array(leaf) else leaf, batch)
    parameters = _trained(optimizer)
    device = parameters[0].device.type if parameters else "cpu"
    with torch.autocast(device, torch.bfloat16, enabled=lowered):
        return loss_fn(*arguments, batch)


def _trained(optimizer: Any) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def backward(
    arguments: Sequence[Any], loss_fn: Callable, batch: Any, optimizer: Any, lowered: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Add the loss's gradients to the optimizer's parameters and to tensors outside the compiled modules.

    Returns the loss and the values to log. arguments: the modules. batch: with tensors or arrays. lowered: the forward
    pass runs under torch.autocast in bfloat16.
    """
    found = loss_of(arguments, loss_fn, batch, optimizer, lowered)
    loss, values = found if isinstance(found, (tuple, list)) and len(found) == 2 else (found, {})
    if isinstance(loss, float) or (isinstance(loss, torch.Tensor) and not loss.requires_grad):
        named = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise UserError(
            f"{named}: no parameter that requires a gradient reaches the loss (detach(), item(), no_grad() or "
            "requires_grad_(False)), so there is nothing to train; torch's backward() refuses it too"
        )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not isinstance(values, Mapping):
        raise not_a_loss(
            getattr(loss_fn, "__name__", type(loss_fn).__name__), loss if isinstance(values, Mapping) else found
        )
    updated = set(map(id, _trained(optimizer)))
    others = {p: p.grad for module in arguments for p in module.parameters() if id(p) not in updated}
    for parameter in others:  # of modules that another update trains, say
        parameter.grad = None
    loss.reshape(()).backward()
    for parameter, grad in others.items():
        parameter.grad = grad
    plain = lambda x: x.detach().float().numpy(force=True) if isinstance(x, torch.Tensor) else np.asarray(x)
    return plain(loss).reshape(()), {name: plain(value) for name, value in values.items()}


def not_a_loss(name: str, found: Any) -> UserError:
    """Return the error for a loss function that returns neither a scalar nor (scalar, dict of values)."""
    shape = getattr(found, "shape", None)
    got = type(found).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
    if isinstance(found, np.ndarray | np.generic):
        got = "a NumPy value, which carries no gradient"
    elif found is None:
        got = "None"
    reduced = "; reduce the loss with .mean() or .sum()" if shape else "; the step runs backward() itself"
    return UserError(
        f"{name} returned {got}, wanted a scalar tensor, or (scalar tensor, dict of values to log){reduced}"
    )


def wants_closure(optimizer: Any) -> bool:
    """Return True if step() requires a closure that evaluates the loss, as LBFGS's does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def clip(optimizer: Any, clip_norm: float | None, clipped: torch.nn.Module | None) -> np.ndarray | None:
    """Clip the gradients: of the module `clipped`, or of all that the optimizer holds. Return their norm before
    clipping, or None without a limit."""
    if clip_norm is None:
        return None
    held = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = held if clipped is None else list(clipped.parameters())
    return torch.nn.utils.clip_grad_norm_(parameters, clip_norm).numpy(force=True)


def update(
    optimizer: Any,
    clip_norm: float | None,
    clipped: torch.nn.Module | None,
    divisor: int,
    evaluate: Callable[[], Any] | None,
) -> np.ndarray | None:
    """Divide and clip the gradients, step, and clear them. Return the norm before clipping, or None without a limit.

    clipped: as in `clip`. evaluate: adds the gradients of the loss once more, for an optimizer whose `step` requires a
    closure (SAM).
    """
    if divisor > 1:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
    norm = clip(optimizer, clip_norm, clipped)
    try:
        optimizer.step()
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        if evaluate is None or "closure" not in str(error).lower():
            raise
        optimizer.step(evaluate)
    optimizer.zero_grad()
    return norm


def state_of(modules: Iterable[torch.nn.Module]) -> Callable[[], None]:
    """Return a function that gives buffers, and torch's generator, the values that they have now."""
    state = torch.get_rng_state()
    buffers = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()]

    @torch.no_grad()
    def restore() -> None:
        torch.set_rng_state(state)
        for buffer, value in buffers:
            buffer.copy_(value)

    return restore
