"""Plain gRPC server: ``by_grpc.py FOLDER REDIS_PORT CANDIDATES SEARCHED [PROCESSES]``."""

import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from parts import Parts
from say import ready, requests_of

METHOD = "/hand.Recommender/ask"


def main(folder, redis_port, candidates, searched, processes="1", port="0"):
    parts = Parts(folder, int(redis_port), int(candidates), int(searched))
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", int(port)))
        port = holder.getsockname()[1]
        serve(parts, port, folder, redis_port, candidates, searched, int(processes))


def serve(parts, port, folder, redis_port, candidates, searched, processes):
    """Serve on a port that other processes share."""

    def answer(content, context):
        return parts.recommend([int(content)]).tobytes()

    server = grpc.server(ThreadPoolExecutor(4))
    handlers = {"ask": grpc.unary_unary_rpc_method_handler(answer)}
    generic = grpc.method_handlers_generic_handler("hand.Recommender", handlers)
    server.add_generic_rpc_handlers([generic])
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    for _ in range(processes - 1):
        again = [sys.executable, __file__, folder, redis_port, candidates, searched, "1", str(port)]
        other = subprocess.Popen(again, stdout=subprocess.PIPE, text=True)
        other.stdout.readline()
    ready(port, METHOD, requests_of(folder, "grpc", lambda user: str(user).encode()))
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
