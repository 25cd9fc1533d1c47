"""Compile the services of Friesian's recommender to ``services.binpb``, which is checked in.

    python scripts/compile_protos.py

The file holds descriptors, from which the messages are made when they are needed: generated code
would ask for one version of protobuf, and would clash with a user's own stubs of the services.
"""

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

PROTOS = Path(__file__).parents[1] / "src/bigdl/friesian/serving/protos"


def compiled(target):
    """Write the descriptors of all services to a file and return them."""
    names = sorted(each.name for each in PROTOS.glob("*.proto"))
    # In a process of its own: it clashes with the protobuf of TensorFlow.
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", "--include_imports"]
    subprocess.run([*command, f"--descriptor_set_out={target}", *names], check=True)
    return FileDescriptorSet.FromString(Path(target).read_bytes())


if __name__ == "__main__":
    compiled(PROTOS / "services.binpb")
