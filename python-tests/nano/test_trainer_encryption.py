"""Encrypted files of PyTorch."""

import io
import re
from fractions import Fraction

import pytest
import torch
from refusals import refused
from torch.utils.data import DataLoader

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.encryption import EncryptedDataset, load, save
from bigdl.nano.pytorch.patching import patch_encryption, unpatch_encryption

fernet = pytest.importorskip("cryptography.fernet")

KEY = fernet.Fernet.generate_key()
STATE = {"weight": torch.arange(6.0).reshape(2, 3), "step": 3}


@pytest.mark.parametrize("key", [KEY, KEY.decode()], ids=["bytes", "text"])
def test_a_file_is_read_with_its_key_only(tmp_path, key):
    save(STATE, tmp_path / "a.pt", encryption_key=key)
    assert torch.equal(load(tmp_path / "a.pt", decryption_key=key)["weight"], STATE["weight"])
    assert STATE["weight"].numpy().tobytes() not in (tmp_path / "a.pt").read_bytes()
    with refused("argument-value"):
        load(tmp_path / "a.pt", decryption_key=fernet.Fernet.generate_key())
    with refused("argument-missing"):
        load(tmp_path / "a.pt")


def test_a_file_that_was_changed_is_refused():
    buffer = io.BytesIO()
    save(STATE, buffer, encryption_key=KEY)
    content = bytearray(buffer.getvalue())
    for place in (30, len(content) // 2, len(content) - 2):
        changed = content.copy()
        changed[place] ^= 1
        with refused("argument-value"):
            load(io.BytesIO(changed), decryption_key=KEY)
    with refused("argument-value"):
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
    with refused("argument-conflict"):
        load(tmp_path / "plain.pt", decryption_key=KEY)


def test_a_key_must_be_one():
    with refused("argument-value", "32", "base64"):
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


# --- data sets


def rows(count=5):
    return [(torch.full((2,), float(number)), number) for number in range(count)]


def written_in(kind, folder):
    """Rows in a file or a folder; the place of it."""
    place = folder / kind
    if kind == "list":
        save(rows(), place, encryption_key=KEY)
    elif kind == "stream":
        with place.open("wb") as file:
            for row in rows():
                save(row, file, encryption_key=KEY)
    else:
        place.mkdir()
        (place / ".hidden").write_text("not ours")
        for x, number in rows():
            save((x, number), place / f"{number}.pt", encryption_key=KEY)
    return place


@pytest.mark.slow_cases("stream")
@pytest.mark.parametrize("kind", ["list", "stream", "folder"])
def test_encrypted_objects_are_a_dataset(kind, tmp_path):
    data = EncryptedDataset(str(written_in(kind, tmp_path)), KEY.decode())
    assert len(data) == 5
    assert [number for _, number in data] == [0, 1, 2, 3, 4]
    assert data[-1][1] == 4
    with pytest.raises(IndexError):
        data[5]
    workers = {"num_workers": 1, "multiprocessing_context": "spawn"} if kind == "stream" else {}
    batches = list(DataLoader(data, batch_size=2, **workers))
    assert torch.equal(torch.cat([y for _, y in batches]), torch.arange(5))
    assert torch.equal(torch.cat([x[:, 0] for x, _ in batches]), torch.arange(5.0))


def test_a_dataset_is_written_by_torch_save_itself(tmp_path):
    patch_encryption()
    try:
        torch.save([{"x": torch.ones(2)}], tmp_path / "rows.pt", encryption_key=KEY)
        assert torch.equal(EncryptedDataset(tmp_path / "rows.pt", KEY)[0]["x"], torch.ones(2))
    finally:
        unpatch_encryption()


def _other_key(folder):
    return written_in("folder", folder), fernet.Fernet.generate_key()


def _no_key(folder):
    return written_in("list", folder), "secret"


def _missing(folder):
    return folder / "nowhere.pt", KEY


def _empty(folder):
    return folder, KEY


def _plain(folder):
    torch.save(rows(), folder / "plain.pt")
    return folder / "plain.pt", KEY


def _cut(folder):
    place = written_in("stream", folder)
    place.write_bytes(place.read_bytes()[:60])
    return place, KEY


def _of_a_class(folder):
    save([Fraction(1, 2)], folder / "class.pt", encryption_key=KEY)
    return folder / "class.pt", KEY


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (_other_key, "0.pt: The file cannot be decrypted: the key is not the one"),
        (_no_key, "list: The key must be 32 bytes in URL-safe base64"),
        (_missing, "There is no file or folder .*nowhere.pt"),
        (_empty, "holds no encrypted object; save some to it first"),
        (_plain, "plain.pt is not an encrypted file; write it with torch.save"),
        (_cut, "stream: The file cannot be decrypted: .* or the file was changed"),
        (_of_a_class, "class.pt holds an object that cannot be read safely; save tensors"),
    ],
)
def test_what_is_no_encrypted_dataset_is_refused(make, sentence, tmp_path):
    with pytest.raises(UsageError) as refusal:
        EncryptedDataset(*make(tmp_path))
    text = str(refusal.value)
    assert re.search(sentence, text)
    assert "\n" not in text


def test_a_row_that_was_changed_is_refused_when_it_is_asked_for(tmp_path):
    place = written_in("stream", tmp_path)
    content = bytearray(place.read_bytes())
    content[-3] ^= 1
    place.write_bytes(content)
    data = EncryptedDataset(place, KEY)
    assert data[3][1] == 3
    with refused("argument-value"):
        data[4]
