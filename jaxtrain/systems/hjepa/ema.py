"""The target encoder as an exponential moving average of the context encoder."""

from flax import nnx

from torch_bridge.layouts import named_variables


def momentum_at(step, start: float, end: float, warmup_steps: int):
    """start + (end - start) * min(1, step / warmup_steps); `step` a number or a traced integer."""
    if warmup_steps <= 0:
        return end + 0.0 * step
    share = step / warmup_steps
    capped = min(1.0, share) if isinstance(share, float) else share.clip(max=1.0)
    return start + (end - start) * capped


def move_towards(target: nnx.Module, context: nnx.Module, momentum) -> None:
    """target <- momentum * target + (1 - momentum) * context, for every parameter, each once."""
    for theirs, ours in zip(parameters_by_key(context), parameters_by_key(target), strict=True):
        ours.set_value((momentum * ours[...] + (1 - momentum) * theirs[...]).astype(ours.dtype))


def parameters_by_key(module: nnx.Module) -> list[nnx.Variable]:
    """Each parameter once, in the order of the keys (that of attributes changes when a model is split and merged)."""
    named = sorted(
        ((key, v) for key, v in named_variables(module) if isinstance(v, nnx.Param)), key=lambda pair: pair[0]
    )
    return list({id(variable): variable for _, variable in named}.values())
