"""Compile the servers' protos to descriptors (``*.binpb``), which are checked in.

    python scripts/compile_protos.py

The messages are made of the descriptors when they are needed: generated code would ask for one
version of protobuf, and would clash with a user's stubs of the services.
"""

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

SOURCES = Path(__file__).parents[1] / "src/bigdl"
PROTOS = SOURCES / "friesian/serving/protos"
SERVERS = SOURCES / "nano/serving"


def compiled(target, folder=PROTOS, pattern="*.proto"):
    """Write the descriptors of the protos in a folder to a file and return them."""
    names = sorted(each.name for each in folder.glob(pattern))
    # In a separate process: it clashes with the protobuf of TensorFlow.
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", "--include_imports"]
    subprocess.run([*command, f"--descriptor_set_out={target}", *names], check=True)
    return FileDescriptorSet.FromString(Path(target).read_bytes())


if __name__ == "__main__":
    compiled(PROTOS / "services.binpb")
    for name in ("open_inference", "health"):
        compiled(SERVERS / f"{name}.binpb", SERVERS, f"{name}.proto")
