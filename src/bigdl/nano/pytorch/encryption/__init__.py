"""Files of PyTorch that only the holder of a key can read or change.

The encryption is Fernet of the package ``cryptography``: AES in CBC mode with an HMAC, so a file
that was changed, or a wrong key, is an error and nothing of it is unpickled. A key comes from
``cryptography.fernet.Fernet.generate_key()``.
"""

from bigdl.nano.pytorch.encryption.dataset import EncryptedDataset
from bigdl.nano.pytorch.encryption.files import load, save

__all__ = ["EncryptedDataset", "load", "save"]
