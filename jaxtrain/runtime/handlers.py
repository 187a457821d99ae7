"""Find out who handles a signal: `signal.getsignal` only knows handlers that were set through Python."""

import ctypes
import signal


def can_be_taken(number: int) -> bool:
    """Return True if the signal's handler can be replaced and restored later. Not so if the signal is ignored, or
    handled by C code, as after faulthandler.register: Python could not restore that handler."""
    known = signal.getsignal(number)
    if known is None or known == signal.SIG_IGN:
        return False
    return known != signal.SIG_DFL or address(number) == signal.SIG_DFL


def address(number: int) -> int:
    """Return the address of the C function that handles the signal; it is the same for all Python handlers."""
    ask = ctypes.pythonapi.PyOS_getsig
    ask.restype, ask.argtypes = ctypes.c_void_p, [ctypes.c_int]
    return ask(number) or 0
