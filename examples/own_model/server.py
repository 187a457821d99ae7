"""An inference server in plain torch: `python examples/own_model/server.py --weights runs/own_model/exports/net.pt`.

    curl -d '{"images": [[0, 0, 0.3, 0.8, 0.6, 0, 0, 0, ...]]}' localhost:8000/predict

POST /predict: {"images": [image, ...]} -> {"labels": [int, ...], "probabilities": [[float, ...], ...]}; an image is
8 rows of 8 pixels in 0..1, or their 64 values. GET /health: {"ok": true, ...}. A mistake of the client is answered with
400 and one sentence. A request is at most 4 MiB and 1,024 images and has 10 seconds; 64 are served at a time, others
wait for a moment or get 503. The standard library's server and torch are all that it needs; put a proxy before it in
the open, where it should check who asks.
"""

import argparse
import contextlib
import http.server
import json
import os
import pathlib
import re
import signal
import socket
import sys
import threading

import torch
from net import Net

MOST_BYTES, MOST_IMAGES = 4 << 20, 1024
MOST_NUMBERS = MOST_IMAGES * 64
MOST_CONNECTIONS, WAIT_S, REQUEST_S = 64, 0.2, 10.0


class Mistake(ValueError):
    """What the client has to change."""


def load(weights: pathlib.Path) -> torch.nn.Module:
    """The network with exported weights, every key of them."""
    network = Net()
    network.load_state_dict(torch.load(weights, weights_only=True), strict=True)
    return network.eval()


def images_of(body: bytes) -> torch.Tensor:
    """float [image, 1, 8, 8] of a request. Raises Mistake."""
    try:
        if body.count(b"[") > 9 * MOST_IMAGES + 2 or body.count(b",") > MOST_NUMBERS + MOST_IMAGES:
            raise Mistake(f"wanted at most {MOST_IMAGES} images of 8 x 8 or 64 pixels")  # before memory is spent on it
        images = torch.tensor(json.loads(body)["images"], dtype=torch.float32)
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError, RecursionError) as error:
        if isinstance(error, Mistake):
            raise
        words = " ".join(str(error).split())[:200]
        raise Mistake(f'wanted {{"images": [...]}} with numbers: {type(error).__name__}: {words}') from None
    if images.ndim < 2 or not 0 < len(images) <= MOST_IMAGES or images[0].numel() != 64:
        raise Mistake(f"got images of shape {list(images.shape)}, wanted 1 to {MOST_IMAGES} of 8 x 8 or 64 pixels")
    if not torch.isfinite(images).all():
        raise Mistake("a pixel is not a finite number")
    if images.min() < 0 or images.max() > 1:
        raise Mistake(f"pixels from {images.min():g} to {images.max():g}, wanted 0 to 1")
    return images.reshape(-1, 1, 8, 8)


@torch.inference_mode()
def predict(network: torch.nn.Module, images: torch.Tensor) -> dict:
    probabilities = network(images).softmax(1)
    rounded = [[round(p, 6) for p in row] for row in probabilities.tolist()]
    return {"labels": probabilities.argmax(1).tolist(), "probabilities": rounded}


def make_server(weights: pathlib.Path, host: str, port: int) -> http.server.ThreadingHTTPServer:
    """Ready to serve_forever(). port 0 takes a free one."""
    network = load(weights)
    one_at_a_time = threading.Lock()  # torch uses all its threads for one batch

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = REQUEST_S  # of a read; `handle` sees to the whole

        def handle(self):
            ends = threading.Timer(REQUEST_S, self.hang_up)  # a byte now and then is no request
            ends.daemon = True
            ends.start()
            try:
                super().handle()
            except OSError:
                pass  # the client has hung up
            finally:
                ends.cancel()

        def hang_up(self):
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RD)

        def do_GET(self):
            if self.path == "/health":
                self.answer(200, {"ok": True, "weights": str(weights)})
            else:
                self.answer(404, {"error": "there are GET /health and POST /predict"})

        def do_POST(self):
            if self.path != "/predict":
                return self.answer(404, {"error": "there are GET /health and POST /predict"})
            told = self.headers.get("Content-Length", "0")
            if not re.fullmatch("[0-9]{1,18}", told, re.ASCII) or "Transfer-Encoding" in self.headers:
                self.close_connection = True
                return self.answer(400, {"error": f"Content-Length is {told[:40]!r}, wanted the body's bytes"})
            size = int(told)
            if size > MOST_BYTES:
                self.close_connection = True  # the rest is not read
                return self.answer(413, {"error": f"{size:,} bytes, at most {MOST_BYTES:,}"})
            try:
                body = self.rfile.read(size)
                if len(body) < size:
                    return None  # the client has hung up
                images = images_of(body)
            except Mistake as mistake:
                return self.answer(400, {"error": str(mistake)})
            with one_at_a_time:
                found = predict(network, images)
            return self.answer(200, found)

        def answer(self, status: int, found: dict) -> None:
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    return Server((host, port), Handler)


class Server(http.server.ThreadingHTTPServer):
    """At most so many connections at a time; one more is told so instead of taking a thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments):
        self.room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: socket.socket, client_address):
        if self.room.acquire(timeout=WAIT_S):
            return super().process_request(request, client_address)
        with contextlib.suppress(OSError):
            request.settimeout(WAIT_S)
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
        return self.shutdown_request(request)

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request, client_address):
        """One line; a bad request never takes the server down."""
        print(f"{client_address[0]}: {sys.exc_info()[1]!r}", file=sys.stderr)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--weights", type=pathlib.Path, required=True, metavar="F.pt")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    arguments = p.parse_args()
    server = make_server(arguments.weights, arguments.host, arguments.port)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"http://{arguments.host}:{server.server_port}/predict", flush=True)
    server.serve_forever(poll_interval=0.1)
    server.server_close()
    sys.stderr.flush()
    os._exit(0)  # taking Python and torch down takes seconds on a busy machine, and there is nothing left to save


if __name__ == "__main__":
    main()
