"""Test files on local and remote storage; the remote storage is fsspec's memory."""

import itertools
import os
import stat

import numpy as np
import pytest
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.data import file, file_hdfs_cli

_numbers = itertools.count()


@pytest.fixture(params=["local", "file", "memory"])
def root(request, tmp_path):
    """Return an empty directory on local or remote storage."""
    if request.param == "memory":
        import fsspec

        url = f"memory://bigdl-files-{next(_numbers)}"
        yield url
        if file.exists(url):
            fsspec.filesystem("memory").rm(url.removeprefix("memory:/"), recursive=True)
        return
    yield f"file://{tmp_path}" if request.param == "file" else str(tmp_path)


@pytest.fixture
def tree(tmp_path_factory):
    """Create a local directory with a/b/c.txt, a/d.txt, e.txt and an empty directory."""
    top = tmp_path_factory.mktemp("tree")
    (top / "a" / "b").mkdir(parents=True)
    (top / "empty").mkdir()
    for name in ("a/b/c.txt", "a/d.txt", "e.txt"):
        (top / name).write_text(f"this is {name}")
    return top


def contents(top):
    return {str(p.relative_to(top)): p.read_bytes() for p in top.rglob("*") if p.is_file()}


def test_text_comes_back_as_stripped_lines(root):
    path = f"{root}/lines.txt"
    file.makedirs(root)
    assert file.write_text(path, " één \nzwei\t\n\n") == len(" één \nzwei\t\n\n".encode())
    assert file.open_text(path) == ["één", "zwei", ""]
    assert file.write_text(path, "short") == 5
    assert file.open_text(path) == ["short"]


def test_listing_gives_full_paths_that_can_be_opened(root):
    file.makedirs(f"{root}/one/two")
    file.makedirs(f"{root}/one/two")
    for name in ("b.txt", "a.txt"):
        file.write_text(f"{root}/one/{name}", name)
    paths = file.listdir(f"{root}/one/")
    assert [os.path.basename(p) for p in paths] == ["a.txt", "b.txt", "two"]
    assert [file.open_text(p) for p in paths[:2]] == [["a.txt"], ["b.txt"]]
    assert [file.is_file(p) for p in paths] == [True, True, False]
    assert all(file.exists(p) for p in paths)
    assert not file.exists(f"{root}/three")
    with pytest.raises(NotADirectoryError, match="three"):
        file.listdir(f"{root}/three")


def test_rmdir_removes_what_is_inside_and_nothing_else(root):
    file.makedirs(f"{root}/one/two")
    file.write_text(f"{root}/one/two/x", "x")
    file.write_text(f"{root}/kept", "x")
    file.rmdir(f"{root}/one")
    assert not file.exists(f"{root}/one")
    assert file.exists(f"{root}/kept")
    with pytest.raises(NotADirectoryError):
        file.rmdir(f"{root}/kept")


def test_a_tree_goes_out_and_comes_back(root, tree, tmp_path_factory):
    back = tmp_path_factory.mktemp("back")
    assert file.put_local_dir_tree_to_remote(str(tree), f"{root}/tree") == 0
    assert file.get_remote_dir_to_local(f"{root}/tree", str(back)) == 0
    assert contents(back) == contents(tree)


def test_files_with_a_prefix_go_out_and_come_back(root, tmp_path_factory):
    here, back = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("back")
    for name in ("model.index", "model.data", "other"):
        (here / name).write_text(name)
    assert file.put_local_files_with_prefix_to_remote(f"{here}/model", f"{root}/there") == 0
    file.write_text(f"{root}/there/another", "x")
    prefix = file.get_remote_files_with_prefix_to_local(f"{root}/there/model", str(back))
    assert prefix == f"{back}/model"
    assert contents(back) == {"model.index": b"model.index", "model.data": b"model.data"}
    with pytest.raises(FileNotFoundError, match="nothing"):
        file.get_remote_files_with_prefix_to_local(f"{root}/there/nothing", str(back))
    with pytest.raises(FileNotFoundError, match="nothing"):
        file.put_local_files_with_prefix_to_remote(f"{here}/nothing", f"{root}/there")


def test_a_file_is_replaced_only_when_asked(root, tmp_path_factory):
    local = tmp_path_factory.mktemp("local") / "x.txt"
    local.write_text("new")
    remote = f"{root}/deep/x.txt"
    assert file.put_local_file_to_remote(str(local), remote) == 0
    file.write_text(remote, "old")
    assert file.put_local_file_to_remote(str(local), remote) == -1
    assert file.open_text(remote) == ["old"]
    assert file.get_remote_file_to_local(remote, str(local)) == -1
    assert local.read_text() == "new"
    assert file.put_local_file_to_remote(str(local), f"{root}/deep", over_write=True) == 0
    assert file.open_text(remote) == ["new"]
    file.write_text(remote, "newer")
    assert file.get_remote_file_to_local(remote, str(local), over_write=True) == 0
    assert local.read_text() == "newer"
    assert os.listdir(local.parent) == ["x.txt"]


def test_what_is_missing_is_named(root, tmp_path_factory):
    local = str(tmp_path_factory.mktemp("local"))
    for call in (file.get_remote_file_to_local, file.get_remote_dir_to_local):
        with pytest.raises(OSError, match="absent"):
            call(f"{root}/absent", local)
    for call in (file.put_local_file_to_remote, file.put_local_dir_to_remote):
        with pytest.raises(OSError, match="absent"):
            call(f"{local}/absent", root)
    assert os.listdir(local) == []


def test_permissions_of_a_copy(tmp_path):
    (tmp_path / "x").write_text("x")
    file.put_local_file_to_remote(str(tmp_path / "x"), str(tmp_path / "y"), filemode=0o640)
    assert stat.S_IMODE((tmp_path / "y").stat().st_mode) == 0o640


def test_a_file_copied_onto_itself_stays(tmp_path):
    (tmp_path / "x").write_text("x")
    path = str(tmp_path / "x")
    assert file.put_local_file_to_remote(path, path, over_write=True) == 0
    assert contents(tmp_path) == {"x": b"x"}


def test_arrays_are_read_without_running_code(root):
    import io

    for name, value in (("a", np.arange(6.0).reshape(2, 3)), ("o", np.array([{}], dtype=object))):
        data = io.BytesIO()
        np.save(data, value)
        fs, inside = file.open_file_system(f"{root}/{name}.npy")
        fs.pipe_file(inside, data.getvalue())
    np.testing.assert_array_equal(file.load_numpy(f"{root}/a.npy"), [[0, 1, 2], [3, 4, 5]])
    with refused("file-format"):
        file.load_numpy(f"{root}/o.npy")


def test_images_keep_their_pixels(root):
    image_module = pytest.importorskip("PIL.Image")
    import io

    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    data = io.BytesIO()
    image_module.fromarray(pixels).save(data, "PNG")
    fs, inside = file.open_file_system(f"{root}/x.png")
    fs.pipe_file(inside, data.getvalue())
    np.testing.assert_array_equal(np.asarray(file.open_image(f"{root}/x.png")), pixels)
    file.write_text(f"{root}/x.png", "no image")
    with refused("file-format", "x.png"):
        file.open_image(f"{root}/x.png")


class Model:
    """Model that saves itself to a local file or directory, as a user's class may."""

    def __init__(self, text="nothing"):
        self.text = text

    @file.enable_multi_fs_save
    def save(self, path, overwrite=False):
        if os.path.exists(path) and not overwrite:
            raise FileExistsError(path)
        with open(path, "w") as out:
            out.write(self.text)

    @file.enable_multi_fs_save
    def save_directory(self, path):
        os.makedirs(path, exist_ok=True)
        with open(f"{path}/part", "w") as out:
            out.write(self.text)

    @file.enable_multi_fs_load
    def load(self, path):
        with open(path) as source:
            self.text = source.read()
        return os.path.basename(path)

    @staticmethod
    @file.enable_multi_fs_load_static
    def read(path, encoding="utf-8"):
        name = f"{path}/part" if os.path.isdir(path) else path
        with open(name, encoding=encoding) as source:
            return source.read()


def test_a_method_for_local_paths_takes_any_path(root):
    Model("first").save(f"{root}/model.bin")
    loaded = Model()
    assert loaded.load(path=f"{root}/model.bin") == "model.bin"
    assert loaded.text == "first"
    with pytest.raises((UsageError, FileExistsError), match=r"model\.bin"):
        Model("second").save(f"{root}/model.bin")
    assert Model.read(f"{root}/model.bin", encoding="ascii") == "first"
    Model("second").save(f"{root}/model.bin", overwrite=True)
    assert Model.read(f"{root}/model.bin") == "second"
    Model("third").save_directory(f"{root}/folder")
    Model("fourth").save_directory(f"{root}/folder")
    assert Model.read(f"{root}/folder") == "fourth"


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("relative/x", True),
        ("/absolute/x", True),
        ("file:///x", True),
        ("dbfs:/x", True),
        ("hdfs://host:9000/x", False),
        ("s3://bucket/x", False),
    ],
)
def test_which_paths_are_local(path, local):
    assert file.is_local_path(path) is local


def test_databricks_paths_are_below_the_mount():
    assert file.open_file_system("dbfs:/some/x")[1] == "/dbfs/some/x"
    assert file.open_file_system("dbfs:///some/x")[1] == "/dbfs/some/x"


def test_a_missing_driver_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "s3fs", None)
    with refused("package-missing", "s3fs"):
        file.exists("s3://bucket/x")


@pytest.mark.parametrize("path", ["nonsense://x", 3])
def test_a_path_of_no_storage_is_refused(path):
    with pytest.raises(UsageError, match=str(path)):
        file.exists(path)


def test_a_remote_path_in_place_of_a_local_one_is_refused():
    with refused("argument-value"):
        file.put_local_file_to_remote("memory://x", "memory://y")


def test_the_other_name_of_the_module_has_the_same_functions():
    assert all(getattr(file_hdfs_cli, name) is getattr(file, name) for name in file.__all__)


def test_hdfs_without_a_client_says_what_it_needs(tmp_path):
    """Use a new process, because libhdfs searches for Java only once."""
    import subprocess
    import sys

    code = "from bigdl.orca.data import file; file.exists('hdfs://localhost:1/x')"
    environment = {"PATH": str(tmp_path), "JAVA_HOME": str(tmp_path), "CLASSPATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("bigdl.common.errors.UsageError: The path 'hdfs://localhost:1/x'")
    assert "set HADOOP_CONF_DIR" in last
