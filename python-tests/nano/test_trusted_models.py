"""Saved models that run code when they are loaded, and who vouches for them."""

import contextlib
import hmac
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
import yaml
from refusals import refused
from torch import nn

from bigdl.common import trust
from bigdl.common.errors import UsageError
from bigdl.common.private_folders import private_cache
from bigdl.common.trust import UntrustedFileError
from bigdl.nano.pytorch import InferenceOptimizer, Trainer
from bigdl.nano.pytorch.inference.compiling import inductor_cache
from bigdl.nano.serving import ModelRepository, ServedModel

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
X = torch.rand(2, 3)
INPUTS = "input: FP32[-1, 3]"


def write_evil_script(path, victim):
    """Write a program of TorchScript that makes a file when it is loaded, and when it is run."""
    source = f"""
import torch

class Evil(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.size = 8

    @torch.jit.export
    def __getstate__(self):
        return self.size

    @torch.jit.export
    def __setstate__(self, state: int):
        made = torch.from_file({str(victim)!r}, True, state)
        made += 1
        self.size = made.numel()
        self.training = False

    def forward(self, input):
        return input + torch.from_file({str(victim)!r}, True, 8).sum()
"""
    module = path.parent.parent / "evil_source.py"
    module.write_text(source)
    names = {"__file__": str(module)}
    exec(compile(source, str(module), "exec"), names)
    torch.jit.script(names["Evil"]()).save(path)


@pytest.fixture
def saved(tmp_path):
    """A directory of TorchScript, and the model that it was written from."""
    fast = InferenceOptimizer.trace(nn.Linear(3, 2), X, accelerator="jit")
    InferenceOptimizer.save(fast, tmp_path / "model")
    return tmp_path / "model", fast


@pytest.fixture
def victim(tmp_path, saved):
    """A file that is made if the script runs, which has taken the place of the saved one."""
    write_evil_script(saved[0] / "ckpt.pth", tmp_path / "victim")
    (tmp_path / "victim").unlink(missing_ok=True)
    return tmp_path / "victim"


def test_a_script_that_somebody_put_there_does_not_run(saved, victim):
    with pytest.raises(UntrustedFileError) as refused:
        InferenceOptimizer.load(saved[0])
    assert str(refused.value) == (
        f"{str(saved[0] / 'ckpt.pth')!r} is a program of TorchScript, which can run any code when "
        "it is read, and no program of this user has signed it as it is now; pass trust=True "
        "(bigdl-serve: --trust; a configuration of the recommender: ranking.trust: true) if you "
        "trust all who can write it"
    )
    with pytest.raises(UntrustedFileError):
        Trainer.load(saved[0])
    files = {each.name: each.open("rb") for each in saved[0].iterdir()}
    with pytest.raises(UntrustedFileError):
        InferenceOptimizer.load(files)
    assert not victim.exists()
    InferenceOptimizer.load(saved[0], trust=True)  # so the attack is one
    assert victim.exists()


def test_the_server_does_not_run_it_unless_it_is_told_to(saved, victim, caplog):
    root = saved[0].parent / "served"
    shutil.copytree(saved[0], root / "1")
    with pytest.raises(UsageError, match="no program of this user has signed it"):
        ServedModel(root / "1", inputs=INPUTS)
    assert not victim.exists()
    with ServedModel(root / "1", inputs=INPUTS, trust=True) as model:
        assert model.platform == "pytorch"
    assert victim.exists()


def test_a_reload_keeps_the_model_when_somebody_changed_its_script(saved, tmp_path, caplog):
    path, fast = saved
    with ModelRepository(path, name="linear", inputs=INPUTS) as repository:
        repository.load_all()
        write_evil_script(path / "ckpt.pth", tmp_path / "victim")
        (tmp_path / "victim").unlink(missing_ok=True)
        repository.refresh()
        assert "the version loaded before stays in use" in caplog.text
        assert "--trust" in repository.index()[0]["reason"]
        answer = repository.find("linear").model.predict(X.numpy())
    torch.testing.assert_close(torch.from_numpy(answer), fast(X))
    assert not (tmp_path / "victim").exists()


def test_bigdl_serve_and_the_recommender_take_the_word_trust(tmp_path):
    from bigdl.friesian.serving.config import read_config
    from bigdl.nano.serving.main import make_parser

    assert not make_parser().parse_args(["folder"]).trust
    assert make_parser().parse_args(["folder", "--trust"]).trust
    file = tmp_path / "config.yaml"
    file.write_text("ranking:\n  model: ranker\n  trust: true\n")
    assert read_config(file).get("ranking.trust") is True


def test_changed_content_and_the_keys_of_others_are_refused(saved, tmp_path, monkeypatch):
    path, fast = saved
    assert torch.equal(InferenceOptimizer.load(path)(X), fast(X))
    shutil.copytree(path, tmp_path / "moved")  # by its user, the directory may go anywhere
    assert torch.equal(InferenceOptimizer.load(tmp_path / "moved")(X), fast(X))
    meta = tmp_path / "moved" / "nano_model_meta.yml"
    for old, new in (("flat: true", "flat: false"), ("signature: ", "signature: 0")):
        text = meta.read_text()
        meta.write_text(text.replace(old, new))
        assert meta.read_text() != text
        with pytest.raises(UntrustedFileError):
            InferenceOptimizer.load(tmp_path / "moved")
        meta.write_text(text)
    meta.write_text(text + "checkpoint: other.pth\n")
    shutil.copy(path / "ckpt.pth", tmp_path / "moved" / "other.pth")
    with pytest.raises(UntrustedFileError):
        InferenceOptimizer.load(tmp_path / "moved")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/home of another user")
    with pytest.raises(UntrustedFileError):
        InferenceOptimizer.load(path)
    trusted = InferenceOptimizer.load(path, trust=True)
    InferenceOptimizer.save(trusted, tmp_path / "mine")  # signs it
    assert torch.equal(InferenceOptimizer.load(tmp_path / "mine")(X), fast(X))


def test_a_key_that_a_crash_cut_short_signs_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = trust.cache_directory("keys") / "pickles"
    trust.user_signature("text")
    assert len(file.read_bytes()) == 32
    file.write_bytes(b"")
    trust.user_key.cache_clear()
    guessed = hmac.digest(b"", b"text", "sha256").hex()
    assert not trust.is_signed("text", guessed)
    assert "0 bytes instead of 32; remove it" in caplog.text
    trust.user_key.cache_clear()


def test_a_file_that_is_swapped_while_it_is_loaded_never_runs(saved, tmp_path):
    path, fast = saved
    shutil.copytree(path, tmp_path / "evil")
    write_evil_script(tmp_path / "evil" / "ckpt.pth", tmp_path / "victim")
    (tmp_path / "victim").unlink(missing_ok=True)
    contents = [(path / "ckpt.pth").read_bytes(), (tmp_path / "evil/ckpt.pth").read_bytes()]
    over = threading.Event()

    def swap():
        number = 0
        while not over.is_set():
            number += 1
            (tmp_path / "next").write_bytes(contents[number % 2])
            os.replace(tmp_path / "next", path / "ckpt.pth")

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(60):
            with contextlib.suppress(UntrustedFileError):
                assert torch.equal(InferenceOptimizer.load(path)(X), fast(X))
    finally:
        over.set()
        swapping.join()
    assert not (tmp_path / "victim").exists()


def test_weights_and_networks_of_other_runtimes_never_ask(saved, tmp_path, monkeypatch):
    model = nn.Linear(3, 2)
    InferenceOptimizer.save(model, tmp_path / "plain")
    for accelerator in ("openvino", "onnxruntime"):
        fast = InferenceOptimizer.trace(model, X, accelerator=accelerator)
        InferenceOptimizer.save(fast, tmp_path / accelerator)
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/home of another user")
    InferenceOptimizer.load(tmp_path / "plain", model=nn.Linear(3, 2))
    for accelerator in ("openvino", "onnxruntime"):
        torch.testing.assert_close(InferenceOptimizer.load(tmp_path / accelerator)(X), model(X))
    assert not (tmp_path / "home of another user").exists()


def test_a_link_to_a_file_elsewhere_is_refused(tmp_path):
    # The weights of such a model are bytes of a file that its reader may read, and its writer not.
    InferenceOptimizer.save(nn.Linear(3, 2), tmp_path / "plain")
    weights = tmp_path / "plain" / "saved_weight.pt"
    (tmp_path / "plain" / "..data").mkdir()
    inner = weights.rename(tmp_path / "plain" / "..data" / weights.name)
    weights.symlink_to(f"..data/{weights.name}")  # as Kubernetes mounts files
    InferenceOptimizer.load(tmp_path / "plain", model=nn.Linear(3, 2))
    (tmp_path / "linked").symlink_to(tmp_path / "plain")
    InferenceOptimizer.load(tmp_path / "linked", model=nn.Linear(3, 2))
    weights.unlink()
    weights.symlink_to(shutil.move(inner, tmp_path / "secret"))
    with refused("path-unusable", "saved_weight.pt' is a link", "outside of the directory"):
        InferenceOptimizer.load(tmp_path / "plain", model=nn.Linear(3, 2))
    InferenceOptimizer.load(tmp_path / "plain", model=nn.Linear(3, 2), trust=True)


def test_a_meta_that_names_a_file_elsewhere_is_refused(tmp_path):
    InferenceOptimizer.save(nn.Linear(3, 2), tmp_path / "plain")
    InferenceOptimizer.save(nn.Linear(3, 2), tmp_path / "other")
    meta = tmp_path / "plain" / "nano_model_meta.yml"
    meta.write_text(meta.read_text().replace("saved_weight.pt", "../other/saved_weight.pt"))
    with pytest.raises(UsageError, match="which is not in that directory"):
        InferenceOptimizer.load(tmp_path / "plain", model=nn.Linear(3, 2))
    meta.write_text(meta.read_text().replace("../other/saved_weight.pt", "[saved_weight.pt]"))
    with refused("file-damaged", "which is not in that directory"):
        InferenceOptimizer.load(tmp_path / "plain", model=nn.Linear(3, 2))


def test_weights_that_are_a_script_and_settings_that_name_files_do_nothing(saved, tmp_path):
    InferenceOptimizer.save(nn.Linear(3, 2), tmp_path / "plain")
    write_evil_script(tmp_path / "plain" / "saved_weight.pt", tmp_path / "victim")
    (tmp_path / "victim").unlink(missing_ok=True)
    with pytest.raises(UsageError, match=r"saved_weight.pt' holds no weights"):
        InferenceOptimizer.load(tmp_path / "plain", model=nn.Linear(3, 2))
    assert not (tmp_path / "victim").exists()
    fast = InferenceOptimizer.trace(nn.Linear(3, 2), X, accelerator="openvino")
    InferenceOptimizer.save(fast, tmp_path / "network")
    meta = tmp_path / "network" / "nano_model_meta.yml"
    inner = f"{{CACHE_DIR: {tmp_path}/inner}}"
    properties = f"{{CACHE_DIR: {tmp_path}/outer, DEVICE_PROPERTIES: {{CPU: {inner}}}}}"
    content = yaml.safe_load(meta.read_text()) | {"config": yaml.safe_load(properties)}
    meta.write_text(yaml.safe_dump(content))
    torch.testing.assert_close(InferenceOptimizer.load(tmp_path / "network")(X), fast(X))
    assert not [*tmp_path.glob("inner"), *tmp_path.glob("outer")]


def test_results_of_a_search_are_loaded_without_a_word(tmp_path):
    optimizer = InferenceOptimizer()
    optimizer.optimize(
        nn.Linear(3, 2),
        training_data=X,
        includes=["jit_fp32"],
        latency_sample_num=2,
        cache_dir=str(tmp_path / "cache"),
    )
    model = optimizer.get_model("jit_fp32")
    torch.testing.assert_close(model(X), optimizer.get_model("original")(X))


# The cache of TorchInductor ---------------------------------------------------------------------


def test_a_directory_of_somebody_else_is_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = private_cache("inductor")
    assert made == tmp_path / "bigdl" / "inductor"
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o777)
    other = private_cache("inductor")
    assert other != made
    assert other.stat().st_mode & 0o777 == 0o700
    assert private_cache("inductor") == other
    assert "others can write to" in caplog.text
    (tmp_path / "bigdl" / "link").symlink_to(other)
    assert private_cache("link") not in (other, tmp_path / "bigdl" / "link")
    if os.geteuid() == 0:
        (tmp_path / "bigdl" / "foreign").mkdir(mode=0o700)
        os.chown(tmp_path / "bigdl" / "foreign", 65534, 65534)
        assert private_cache("foreign") != tmp_path / "bigdl" / "foreign"
    (tmp_path / "of a group").mkdir()
    (tmp_path / "of a group").chmod(0o775)  # as the umask 002 makes it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of a group"))
    assert private_cache("inductor") == tmp_path / "of a group" / "bigdl" / "inductor"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open"))
    assert private_cache("inductor") != tmp_path / "open" / "bigdl" / "inductor"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        assert private_cache("inductor") == tmp_path / "new" / "cache" / "bigdl" / "inductor"
    finally:
        os.umask(before)


def test_what_is_compiled_is_cached_for_its_user_and_the_environment_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    before = dict(os.environ)
    with inductor_cache(), inductor_cache():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/bigdl/inductor"
        assert os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/bigdl/inductor/triton"
    assert dict(os.environ) == before
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    with inductor_cache():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
        assert "TRITON_CACHE_DIR" not in os.environ


COMPILES = """
import torch
from bigdl.nano.pytorch.inference.compiling import compiled

x, model = torch.rand(3, 4), torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU())
compiled(model.forward)(x).sum().backward()  # compiled when it is first needed
"""


@pytest.mark.slow
def test_nothing_is_compiled_in_the_directory_for_temporary_files(tmp_path):
    (tmp_path / "tmp").mkdir()
    env = {k: v for k, v in os.environ.items() if "CACHE_DIR" not in k}
    env |= {"TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", COMPILES]
    subprocess.run(command, env=env, check=True, timeout=300)
    assert not list((tmp_path / "tmp").rglob("*.so"))
    cache = tmp_path / "home" / "bigdl" / "inductor"
    assert cache.stat().st_mode & 0o777 == 0o700
    assert any(cache.rglob("*.so"))
