"""Save a quantized model, load it in a server process, and send requests.

    python examples/nano/serve.py                    # all of it, on a free port of this machine
    python examples/nano/serve.py --folder model --port 8000 --serve

The folder is complete: the server needs neither the class of the model nor its fp32 weights. A
request is a POST of a NumPy array in the format of ``np.save``, and so is the answer. Connections
have separate threads; the runtime computes their requests one after the other, or with ``streams``
several at a time.
"""

import argparse
import io
import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from bigdl.nano.pytorch import InferenceOptimizer


def encoded(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def decoded(content):
    return np.load(io.BytesIO(content), allow_pickle=False)


def handler_for(model):
    """Return a request handler that calls the model."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            try:
                images = decoded(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = 200, encoded(model(images))
            except Exception as error:  # an invalid request must not stop the server
                status, answer = 400, f"{type(error).__name__}: {error}".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *content):
            """Suppress the log line of each request."""

    return Handler


def serve(folder, port):
    model = InferenceOptimizer.load(folder)
    with (
        InferenceOptimizer.get_context(model),
        ThreadingHTTPServer(("127.0.0.1", port), handler_for(model)) as server,
    ):
        print(f"serving {folder} on port {server.server_port}", flush=True)
        server.serve_forever()


def saved(folder, epochs):
    """Train on scikit-learn's digits, quantize and save; return test images, labels and scores."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32)
    y = torch.from_numpy(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        loss = nn.functional.cross_entropy(model(x[:1400]), y[:1400])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fast = InferenceOptimizer.quantize(
        model, accelerator="openvino", calib_data=x[:200], thread_num=1, output_tensors=False
    )
    InferenceOptimizer.save(fast, folder)
    return x[1400:].numpy(), labels[1400:], fast(x[1400:])


def asked(port, array):
    with urlopen(f"http://127.0.0.1:{port}", data=encoded(array), timeout=60) as answer:
        return decoded(answer.read())


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", help="folder of the model; temporary by default")
    parser.add_argument("--port", type=int, default=0, help="0 for a free port")
    parser.add_argument("--serve", action="store_true", help="only serve the model in the folder")
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args(argv)
    if options.serve:
        serve(options.folder, options.port)
        return None

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or str(Path(scratch, "model"))
        images, labels, expected = saved(folder, options.epochs)
        command = [sys.executable, __file__, "--serve", "--folder", folder]
        command += ["--port", str(options.port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                port = int(server.stdout.readline().split()[-1])
                answers = np.concatenate([asked(port, part) for part in np.array_split(images, 5)])
            finally:
                server.terminate()
    accuracy = float((answers.argmax(1) == labels).mean())
    difference = float(np.abs(answers - expected).max())
    print(f"accuracy {accuracy:.3f}, largest difference to the model here {difference:.1g}")
    return {"accuracy": accuracy, "difference": difference}


if __name__ == "__main__":
    main()
