"""Let all processes of a run meet at the coordinator's port before JAX connects them there.

If a process is missing, JAX aborts the others with a C++ stack trace (SIGABRT) and cannot say which one it is. So each
process sends `jaxtrain <number> <host>`, and process 0 answers all of them with `go`, or with `no <reason>` on timeout.
"""

import contextlib
import errno
import ipaddress
import re
import selectors
import socket
import time
from typing import cast

from jaxtrain.errors import UserError

HELLO = re.compile(rb"jaxtrain (\d{1,7}) ([^\n]{0,255})\n")
MOST_BYTES = 300  # of a hello; a longer message doesn't come from a process of the run
NAP_S = 0.2


def open_port(coordinator: str, one_machine: bool) -> socket.socket:
    """Return a socket that listens at the coordinator's own address, so that no other network can reach it.

    It listens at all addresses if that address is not this machine's own (a service's, a translated one), or if the
    host's name resolves to loopback here, as in Debian's /etc/hosts, although other machines must connect. one_machine:
    all processes are on this machine. Raises UserError if the port is taken.
    """
    host, port = split(coordinator)
    for family, address in _addresses(host, port):
        if ipaddress.ip_address(address).is_loopback and not one_machine and not _is_loopback(host):
            continue
        listener = _bound(family, address, port)
        if listener is not None:
            return listener
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    listener = _bound(family, "::" if family == socket.AF_INET6 else "", port)
    if listener is None:
        raise UserError(f"launch: port {port} cannot be opened at all addresses of this machine")
    return listener


def gather(listener: socket.socket, coordinator: str, processes: int, timeout_s: float) -> None:
    """Wait on process 0 for all other processes; close the listener. Raises UserError naming the missing ones."""
    deadline = time.monotonic() + timeout_s
    come: dict[int, tuple[socket.socket, str]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(listener, selectors.EVENT_READ, None)
        reason = ""
        while len(come) < processes - 1 and not reason:
            if time.monotonic() > deadline:
                missing = [str(process) for process in range(1, processes) if process not in come]
                shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
                reason = (
                    f"launch: not all {processes} processes reached {coordinator} within {timeout_s:.0f} s: no word "
                    f"from process {shown}. Is WORLD_SIZE right, and did every process start?"
                )
            for key, _ in selector.select(NAP_S):
                if key.fileobj is listener:
                    guest, _ = listener.accept()
                    stack.enter_context(guest)
                    guest.setblocking(False)
                    selector.register(guest, selectors.EVENT_READ, bytearray())
                else:
                    reason = reason or _hear(key, selector, come, processes)
        listener.close()  # free the port for JAX's service
        for guest, _ in come.values():
            _say(guest, f"no {reason}\n" if reason else "go\n")
        if reason:
            raise UserError(reason)
        for guest, _ in come.values():  # if the others disconnect first, the port is free at once
            guest.settimeout(NAP_S)
            with contextlib.suppress(OSError):
                guest.recv(1)


def report(coordinator: str, process: int, timeout_s: float) -> None:
    """Report to process 0 that this process has started, and wait for all others. Raises UserError on failure."""
    deadline = time.monotonic() + timeout_s
    host, port = split(coordinator)
    reason = ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.sendall(f"jaxtrain {process} {socket.gethostname()[:200]}\n".encode())
                connection.settimeout(max(1.0, deadline - time.monotonic()) + 5)  # process 0 counts from its own start
                answer = connection.makefile("rb").readline(2000).decode(errors="replace")
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.5)
            continue
        if answer == "go\n":
            return
        if answer.startswith("no "):
            raise UserError(answer.removeprefix("no ").strip())
        reason = "it hung up"
        time.sleep(0.5)
    raise UserError(
        f"launch: process {process} cannot reach the coordinator {coordinator} after {timeout_s:.0f} s ({reason}). Did "
        "process 0 start, and is MASTER_ADDR its host?"
    )


def split(coordinator: str) -> tuple[str, int]:
    """Split `host:port` or `[::1]:port` into host and port."""
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def _hear(key: selectors.SelectorKey, selector: selectors.BaseSelector, come: dict, processes: int) -> str:
    """Read a connection's message; return a reason to give up, or "". Connections of other programs are closed."""
    guest, said = cast(socket.socket, key.fileobj), key.data  # as registered by `gather`
    try:
        received = guest.recv(MOST_BYTES)
    except OSError:
        received = b""
    said += received
    hello = HELLO.fullmatch(said)
    if hello is None:
        if not received or len(said) > MOST_BYTES or b"\n" in said:
            selector.unregister(guest)
            guest.close()
        return ""
    selector.unregister(guest)
    process, host = int(hello[1]), hello[2].decode(errors="replace")
    if not 0 < process < processes:
        _say(guest, f"no launch: {processes} processes are expected, and this one calls itself number {process}\n")
        return ""
    if process in come and not _hung_up(come[process][0]):
        hosts = f"{come[process][1]} and on {host}"
        reason = f"launch: two processes call themselves number {process}, on {hosts}; check RANK"
        _say(guest, f"no {reason}\n")
        return reason
    come[process] = guest, host
    return ""


def _hung_up(guest: socket.socket) -> bool:
    """Return True if a connected process has disconnected, because it was restarted."""
    try:
        return guest.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _say(guest: socket.socket, words: str) -> None:
    with contextlib.suppress(OSError):
        guest.sendall(words.encode())


def _addresses(host: str, port: int) -> list[tuple[int, str]]:
    """Return (family, address) pairs of a host, IPv4 first. Raises UserError if it has none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"launch: the coordinator's host {host!r} has no address ({why}); check MASTER_ADDR") from None
    unique = dict.fromkeys((family, place[0].partition("%")[0]) for family, _, _, _, place in found)
    return sorted(unique, key=lambda one: one[0] != socket.AF_INET)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bound(family: int, address: str, port: int) -> socket.socket | None:
    """Return a listening socket, None if the address is not this machine's. Raises UserError if the port is taken."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address == "::" else 1)
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise UserError(
            f"launch: port {port} for the coordinator is taken on this machine ({error.strerror}); set JAXTRAIN_PORT "
            "to a free one, the same for all processes"
        ) from None
    return listener
