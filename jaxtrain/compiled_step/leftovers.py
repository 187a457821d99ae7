"""Lines of a torch loop that do nothing after a compiled step, and about which torch is silent."""

import dis
import logging
import sys

_CLIPPING = {"clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_"}

log = logging.getLogger(__name__)


def tell_clipping() -> None:
    """Warn where a running function of the user's has a line that clips gradients: a compiled step leaves none."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if "site-packages" not in code.co_filename and not _CLIPPING.isdisjoint(code.co_names):
            found = next(step for step in dis.get_instructions(code) if step.argval in _CLIPPING)
            log.warning(
                "%s at %s:%s clips no gradient of a compiled step, which leaves none: give clip_norm= to "
                "jaxtrain.compile, and remove the line",
                found.argval,
                code.co_filename,
                found.positions.lineno if found.positions else code.co_firstlineno,
            )
            return
        frame = frame.f_back
