"""Triton server of the components: ``by_pytriton.py FOLDER REDIS_PORT CANDIDATES SEARCHED``.

Triton's dynamic batcher joins requests; two processes of Python answer, one a core.
"""

import socket
import sys
import threading

import numpy as np
from parts import BEST, Parts
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig
from say import ready, requests_of
from tritonclient.grpc import service_pb2

METHOD = "/inference.GRPCInferenceService/ModelInfer"


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Worker:
    """Worker that loads its components at the first call, in a separate process."""

    def __init__(self, *arguments):
        self._arguments, self._parts = arguments, None

    @batch
    def __call__(self, user):
        if self._parts is None:
            self._parts = Parts(*self._arguments)
        return {"answer": self._parts.recommend(user[:, 0].tolist())}


def encoded(user):
    request = service_pb2.ModelInferRequest(model_name="recommender")
    request.inputs.add(name="user", datatype="INT64", shape=[1, 1])
    request.raw_input_contents.append(np.int64(user).tobytes())
    return request.SerializeToString()


def main(folder, *numbers):
    http, grpc, metrics = free_ports(3)
    config = TritonConfig(http_port=http, grpc_port=grpc, metrics_port=metrics)
    with Triton(config=config) as triton:
        triton.bind(
            "recommender",
            [Worker(folder, *map(int, numbers)) for _ in range(2)],
            inputs=[Tensor(name="user", dtype=np.int64, shape=(1,))],
            outputs=[Tensor(name="answer", dtype=np.int32, shape=(2 * BEST,))],
            config=ModelConfig(max_batch_size=16, batcher=DynamicBatcher()),
        )
        triton.run()
        ready(grpc, METHOD, requests_of(folder, "pytriton", encoded))
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
