"""The parts behind plain gRPC: ``by_grpc.py FOLDER REDIS_PORT CANDIDATES SEARCHED``."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from parts import Parts
from say import ready, requests_of

METHOD = "/hand.Recommender/ask"


def main(folder, *numbers):
    parts = Parts(folder, *map(int, numbers))

    def answer(content, context):
        return parts.recommend([int(content)]).tobytes()

    server = grpc.server(ThreadPoolExecutor(4))
    handlers = {"ask": grpc.unary_unary_rpc_method_handler(answer)}
    generic = grpc.method_handlers_generic_handler("hand.Recommender", handlers)
    server.add_generic_rpc_handlers([generic])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ready(port, METHOD, requests_of(folder, "grpc", lambda user: str(user).encode()))
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
