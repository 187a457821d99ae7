"""Tell whose handler a signal has: `signal.getsignal` knows only of those that were set through it."""

import ctypes
import signal


def can_be_taken(number: int) -> bool:
    """Return False for a signal that is ignored, or that C code handles, as after faulthandler.register: Python could
    not give that one back."""
    known = signal.getsignal(number)
    if known is None or known == signal.SIG_IGN:
        return False
    return known != signal.SIG_DFL or address(number) == signal.SIG_DFL


def address(number: int) -> int:
    """Return that of the function which the system calls: one and the same for all handlers set through Python."""
    ask = ctypes.pythonapi.PyOS_getsig
    ask.restype, ask.argtypes = ctypes.c_void_p, [ctypes.c_int]
    return ask(number) or 0
