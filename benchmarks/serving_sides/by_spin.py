"""gRPC server that computes for some milliseconds: ``by_spin.py PORT MILLISECONDS THREADS``.

It computes in C, without Python's lock, and answers nothing.  No server of gRPC in Python that
computes as long can have shorter answers under a load.
"""

import hashlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

METHOD = "/spin.Spin/spin"


def bytes_for(milliseconds):
    """Return the number of bytes that SHA-256 processes in `milliseconds`."""
    content = bytes(1 << 20)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        hashlib.sha256(content).digest()
        times.append(time.perf_counter() - begin)
    return bytes(int(milliseconds / 1000 / sorted(times)[10] * len(content)))


def main(port, milliseconds, threads):
    sys.setswitchinterval(0.0005)
    content = bytes_for(float(milliseconds))

    def spin(request, context):
        hashlib.sha256(content).digest()
        return b""

    service, _, name = METHOD[1:].partition("/")
    handler = grpc.unary_unary_rpc_method_handler(spin)
    handlers = [grpc.method_handlers_generic_handler(service, {name: handler})]
    options = [("grpc.so_reuseport", 1)]
    server = grpc.server(ThreadPoolExecutor(int(threads)), handlers=handlers, options=options)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
