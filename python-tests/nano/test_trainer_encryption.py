"""Encrypted files of PyTorch."""

import io

import pytest
import torch

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.encryption import load, save
from bigdl.nano.pytorch.patching import patch_encryption, unpatch_encryption

fernet = pytest.importorskip("cryptography.fernet")

KEY = fernet.Fernet.generate_key()
STATE = {"weight": torch.arange(6.0).reshape(2, 3), "step": 3}


@pytest.mark.parametrize("key", [KEY, KEY.decode()], ids=["bytes", "text"])
def test_a_file_is_read_with_its_key_only(tmp_path, key):
    save(STATE, tmp_path / "a.pt", encryption_key=key)
    assert torch.equal(load(tmp_path / "a.pt", decryption_key=key)["weight"], STATE["weight"])
    assert STATE["weight"].numpy().tobytes() not in (tmp_path / "a.pt").read_bytes()
    with pytest.raises(UsageError, match="the key is not the one"):
        load(tmp_path / "a.pt", decryption_key=fernet.Fernet.generate_key())
    with pytest.raises(UsageError, match="pass its key"):
        load(tmp_path / "a.pt")


def test_a_file_that_was_changed_is_refused():
    buffer = io.BytesIO()
    save(STATE, buffer, encryption_key=KEY)
    content = bytearray(buffer.getvalue())
    for place in (30, len(content) // 2, len(content) - 2):
        changed = content.copy()
        changed[place] ^= 1
        with pytest.raises(UsageError, match="cannot be decrypted"):
            load(io.BytesIO(changed), decryption_key=KEY)
    with pytest.raises(UsageError, match="cannot be decrypted"):
        load(io.BytesIO(content[:60]), decryption_key=KEY)


def test_several_objects_lie_in_one_buffer():
    buffer = io.BytesIO()
    for step in range(3):
        save({"step": step}, buffer, encryption_key=KEY)
    buffer.seek(0)
    assert [load(buffer, decryption_key=KEY)["step"] for _ in range(3)] == [0, 1, 2]


def test_files_without_a_key_are_those_of_pytorch(tmp_path):
    save(STATE, tmp_path / "plain.pt")
    assert torch.load(tmp_path / "plain.pt")["step"] == load(tmp_path / "plain.pt")["step"] == 3
    with pytest.raises(UsageError, match="is not encrypted"):
        load(tmp_path / "plain.pt", decryption_key=KEY)


def test_a_key_must_be_one():
    with pytest.raises(UsageError, match="32 bytes in URL-safe base64"):
        save(STATE, io.BytesIO(), encryption_key="secret")


def test_torch_itself_takes_keys_until_it_is_put_back(tmp_path):
    before = torch.save, torch.load
    patch_encryption()
    try:
        assert (torch.old_save, torch.old_load) == before
        torch.save(STATE, tmp_path / "a.pt", encryption_key=KEY)
        assert torch.load(tmp_path / "a.pt", decryption_key=KEY)["step"] == 3
    finally:
        unpatch_encryption()
    assert (torch.save, torch.load) == before
    assert not hasattr(torch, "old_save")
