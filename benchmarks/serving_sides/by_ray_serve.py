"""Components in two replicas of Ray Serve, with its gRPC proxy.

``by_ray_serve.py FOLDER REDIS_PORT CANDIDATES SEARCHED``
"""

import os
import socket
import sys
import threading

import grpc
import ray
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value
from ray import serve
from ray.serve.config import gRPCOptions
from say import ready, requests_of

METHOD = "/hand.Recommender/Ask"


def add_servicer(servicer, server):
    """Register a service with one method, as grpcio-tools would generate it."""
    handler = grpc.unary_unary_rpc_method_handler(
        getattr(servicer, "Ask", None),
        request_deserializer=Int64Value.FromString,
        response_serializer=BytesValue.SerializeToString,
    )
    generic = grpc.method_handlers_generic_handler("hand.Recommender", {"Ask": handler})
    server.add_generic_rpc_handlers((generic,))


@serve.deployment(num_replicas=2, max_ongoing_requests=32, ray_actor_options={"num_cpus": 0.5})
class Answers:
    """Replica with separate components."""

    def __init__(self, *arguments):
        from parts import Parts

        self._parts = Parts(*arguments)

    def Ask(self, request):  # the name of the method in the service
        return BytesValue(value=self._parts.recommend([request.value]).tobytes())


def main(folder, *numbers):
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # for the workers
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        port, http = one.getsockname()[1], other.getsockname()[1]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        configure_logging=True,
        logging_level="error",
    )
    options = gRPCOptions(port=port, grpc_servicer_functions=["by_ray_serve.add_servicer"])
    serve.start(http_options={"host": "127.0.0.1", "port": http}, grpc_options=options)
    serve.run(Answers.bind(folder, *map(int, numbers)))
    encode = requests_of(folder, "ray", lambda u: Int64Value(value=u).SerializeToString())
    ready(port, METHOD, encode)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
