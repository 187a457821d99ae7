"""Warn about lines of a torch loop that have no effect after a compiled step, which torch does not report."""

import dis
import logging
import sys

_BY_NORM = "give jaxtrain.compile clip_norm="
_BY_VALUE = "let the parameters clamp theirs, p.register_hook(lambda grad: grad.clamp(-v, v)) before jaxtrain.compile"
_CLIPPING = {"clip_grad_norm_": _BY_NORM, "clip_grads_with_norm_": _BY_NORM, "clip_grad_value_": _BY_VALUE}

log = logging.getLogger(__name__)


def tell_clipping() -> None:
    """Warn if a user function on the call stack clips gradients: a compiled step leaves no gradients to clip."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if "site-packages" not in code.co_filename and not _CLIPPING.keys().isdisjoint(code.co_names):
            found = next(step for step in dis.get_instructions(code) if step.argval in _CLIPPING)
            log.warning(
                "%s at %s:%s clips nothing after a compiled step, which leaves no gradients: remove it, and %s",
                found.argval,
                code.co_filename,
                found.positions.lineno if found.positions else code.co_firstlineno,
                _CLIPPING[found.argval],
            )
            return
        frame = frame.f_back
