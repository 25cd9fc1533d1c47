"""Models that are served in the tests of this folder."""

import datetime
import ipaddress
import threading

import numpy as np
import pytest

from bigdl.nano.acceleration.saved import write_directory
from bigdl.nano.openvino.network import SAVED_NAME, write_network
from bigdl.nano.serving import ModelRepository, ServedModel, Signature, TensorSpec
from bigdl.nano.serving.runners import ModelRunner


@pytest.fixture(scope="session")
def save_network():
    """Return a function that saves a network with one input and one output to a model directory."""
    import openvino
    from openvino import opset13

    def save(path, compute):
        x = opset13.parameter([-1, 3], np.float32, name="x")
        x.output(0).set_names({"x"})
        y = compute(opset13, x)
        y.output(0).set_names({"y"})
        network = openvino.Model([y], [x])

        def write_files(directory):
            write_network(network, directory)
            facts = {"xml_path": f"{SAVED_NAME}.xml", "weight_path": f"{SAVED_NAME}.bin"}
            return {"ModelType": "PytorchOpenVINOModel", **facts}

        write_directory(path, write_files)
        return path

    return save


@pytest.fixture(scope="session")
def scale_directory(save_network):
    """Return a function that saves a model that multiplies by a factor."""

    def write(path, factor):
        constant = np.full(3, factor, np.float32)
        return save_network(path, lambda opset, x: opset.multiply(x, constant))

    return write


class SlowModel:
    """A model that waits until it may go on."""

    def __init__(self):
        self.open, self.entered = threading.Event(), threading.Semaphore(0)
        self.open.set()
        spec = TensorSpec("x", np.dtype("float32"), (-1, 3))
        signature = Signature((spec,), (TensorSpec("y", spec.dtype, spec.shape),))
        self.runner = ModelRunner(self._run, signature, "python")

    def _run(self, arrays):
        self.entered.release()
        assert self.open.wait(60)
        return [arrays[0] * 2]

    def close(self):
        """Let calls wait from now on."""
        while self.entered.acquire(blocking=False):
            pass
        self.open.clear()


@pytest.fixture
def slow_model():
    model = SlowModel()
    yield model
    model.open.set()


@pytest.fixture
def repository_of():
    """Return a function that creates a repository of in-memory models."""

    def make(batching=None, **models):
        repository = ModelRepository()
        for name, model in models.items():
            runner = model.runner if isinstance(model, SlowModel) else model
            repository.add(name, ServedModel(runner, batching=batching))
        return repository

    return make


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"
