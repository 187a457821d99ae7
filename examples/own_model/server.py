"""An inference server in plain torch: `python examples/own_model/server.py --weights runs/own_model/exports/net.pt`.

    curl -d '{"images": [[0, 0, 0.3, 0.8, 0.6, 0, 0, 0, ...]]}' localhost:8000/predict

POST /predict: {"images": [image, ...]} -> {"labels": [int, ...], "probabilities": [[float, ...], ...]}; an image is
8 rows of 8 pixels in 0..1, or their 64 values. GET /health: {"ok": true, ...}. A mistake of the client is answered with
400 and one sentence. The standard library's server and torch are all that it needs; put a proxy before it in the open.
"""

import argparse
import http.server
import json
import pathlib
import signal
import threading

import torch
from net import Net

MOST_BYTES, MOST_IMAGES = 4 << 20, 1024


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
        images = torch.tensor(json.loads(body)["images"], dtype=torch.float32)
    except (ValueError, KeyError, TypeError) as error:
        raise Mistake(f'wanted {{"images": [...]}} with numbers: {type(error).__name__}: {error}') from None
    if images.ndim < 2 or not 0 < len(images) <= MOST_IMAGES or images[0].numel() != 64:
        raise Mistake(f"got images of shape {list(images.shape)}, wanted 1 to {MOST_IMAGES} of 8 x 8 or 64 pixels")
    if not torch.isfinite(images).all():
        raise Mistake("a pixel is not a finite number")
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
        def do_GET(self):
            if self.path == "/health":
                self.answer(200, {"ok": True, "weights": str(weights)})
            else:
                self.answer(404, {"error": "there are GET /health and POST /predict"})

        def do_POST(self):
            if self.path != "/predict":
                return self.answer(404, {"error": "there are GET /health and POST /predict"})
            size = int(self.headers.get("Content-Length") or 0)
            if size > MOST_BYTES:
                self.close_connection = True  # the rest is not read
                return self.answer(413, {"error": f"{size:,} bytes, at most {MOST_BYTES:,}"})
            try:
                images = images_of(self.rfile.read(size))
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

    return http.server.ThreadingHTTPServer((host, port), Handler)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--weights", type=pathlib.Path, required=True, metavar="F.pt")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    arguments = p.parse_args()
    server = make_server(arguments.weights, arguments.host, arguments.port)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"http://{arguments.host}:{server.server_port}/predict", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
