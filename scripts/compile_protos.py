"""Compile the services of Friesian's recommender to ``services.binpb``, which is checked in.

    python scripts/compile_protos.py

The file holds descriptors, from which the messages are made when they are needed: generated code
would ask for one version of protobuf, and would clash with a user's own stubs of the services.
"""

from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

PROTOS = Path(__file__).parents[1] / "src/bigdl/friesian/serving/protos"


def compiled(target):
    """Write the descriptors of all services to a file and return them."""
    well_known = Path(protoc.__file__).parent / "_proto"
    names = sorted(each.name for each in PROTOS.glob("*.proto"))
    command = ["protoc", f"-I{PROTOS}", f"-I{well_known}", "--include_imports"]
    if protoc.main([*command, f"--descriptor_set_out={target}", *names]):
        raise SystemExit("protoc refused the files")
    return FileDescriptorSet.FromString(Path(target).read_bytes())


if __name__ == "__main__":
    compiled(PROTOS / "services.binpb")
