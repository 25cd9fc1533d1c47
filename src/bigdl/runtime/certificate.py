"""The TLS certificate of a job, for encrypted connections.

The driver creates it and sends it with the tasks, like the secret.  Both ends of a connection
present it and accept no other, so it authenticates the job's processes without a certificate
authority.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field

from bigdl.common.errors import require
from bigdl.common.private_folders import scratch_folder


@dataclass(frozen=True)
class Certificate:
    """A private key and its self-signed certificate.

    Attributes
    ----------
    key, certificate : bytes
        Key and certificate as PEM.
    """

    key: bytes = field(repr=False)
    certificate: bytes = field(repr=False)

    @classmethod
    def make(cls) -> Certificate:
        """Create a self-signed certificate with a new private key.

        Raises
        ------
        MissingExtraError
            If the package ``cryptography`` is not installed.
        """
        require("cryptography", "encryption")
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a run of BigDL")])
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)  # clocks differ
            .not_valid_after(now + 3650 * day)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        encoding = serialization.Encoding.PEM
        private = key.private_bytes(
            encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return cls(private, certificate.public_bytes(encoding))

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return an SSL context for a server or a client that trusts only this certificate."""
        side = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # all machines share the certificate
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate.decode())
        with self.files() as (key, certificate):
            context.load_cert_chain(certificate, key)
        return context

    @contextlib.contextmanager
    def files(self) -> Iterator[tuple[str, str]]:
        """Context manager that yields the paths of temporary files with the key and certificate."""
        with scratch_folder("certificate") as folder:  # mode 0700
            paths = os.path.join(folder, "key.pem"), os.path.join(folder, "certificate.pem")
            for path, content in zip(paths, (self.key, self.certificate), strict=True):
                with open(path, "wb") as file:
                    file.write(content)
            yield paths
