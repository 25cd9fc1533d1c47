"""Distribution of the Python environment and the program's modules to other machines.

:func:`packed_environment` packs the conda or virtual environment of this program into an archive,
cached under a hash of the installed packages.  :func:`ship_modules` sends the modules in the
program's folders, which are not in the archive; :func:`zip_modules` creates their zip file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import sys
import tempfile
import weakref
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, cast

from bigdl.common.errors import MissingExtraError, UsageError
from bigdl.common.private_folders import cache_directory, remove_old
from bigdl.common.timeouts import OLD_ARCHIVE_S
from bigdl.orca.cluster.spark import is_local
from bigdl.runtime.engine import user_import_path

if TYPE_CHECKING:
    from pyspark import SparkContext

LARGEST_MODULES = 64 * 2**20
"""Maximum bytes of a program's Python files; a larger folder contains something else."""

logger = logging.getLogger("bigdl.orca")

_NO_FILES = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})
_shipped: weakref.WeakKeyDictionary[SparkContext, set[str]] = weakref.WeakKeyDictionary()


def packed_environment(prefix: str | None = None, cache: str | None = None) -> str:
    """Return an archive of a Python environment, created if the environment has changed.

    Parameters
    ----------
    prefix : str, optional
        Directory of the environment, by default this interpreter's.
    cache : str, optional
        Directory of the archives, by default ``~/.cache/bigdl/environments``, or below
        ``XDG_CACHE_HOME``.

    Returns
    -------
    str
        Path of a ``.tar.gz`` file.

    Raises
    ------
    MissingExtraError
        If conda-pack or venv-pack is required but not installed.
    UsageError
        If `prefix` is neither a conda nor a virtual environment, or cannot be packed.
    """
    root = Path(prefix or sys.prefix).resolve()
    environment_type = _environment_type(root)
    directory = Path(cache) if cache else cache_directory("environments")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    family = hashlib.sha256(str(root).encode()).hexdigest()[:12]
    archive = directory / f"{family}-{environment_hash(root)}.tar.gz"
    if archive.exists():
        return str(archive)
    with tempfile.TemporaryDirectory(prefix="packing-", dir=directory) as folder:
        temporary = os.path.join(folder, archive.name)
        _pack(environment_type, root, temporary)
        os.replace(temporary, archive)
    # this keeps the new archive
    remove_old(directory.glob(f"{family}-*.tar.gz"), OLD_ARCHIVE_S)
    return str(archive)


def environment_hash(prefix: str | Path) -> str:
    """Hash the installed packages of an environment, without reading their files."""
    root = Path(prefix)
    digest = hashlib.sha256(f"{root}\n".encode())
    with contextlib.suppress(OSError):
        digest.update((root / "pyvenv.cfg").read_bytes())
    patterns = ("conda-meta/*.json", "lib/python*/site-packages/*", "bin/*")
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        if path.name == "__pycache__":
            continue
        # A reinstalled package has a new RECORD file, and its folder a new modification time.
        record = path / "RECORD" if path.suffix == ".dist-info" else path
        with contextlib.suppress(OSError):
            stat = record.lstat()
            size, changed = (0, 0) if record.is_dir() else (stat.st_size, stat.st_mtime_ns)
            digest.update(f"{path.relative_to(root)} {size} {changed}\n".encode())
    return digest.hexdigest()[:24]


def conda_prefix(name: str | None) -> str | None:
    """Return the directory of the conda environment `name`, or None if no name is given.

    Raises
    ------
    UsageError
        If there is no such environment in the active installation.
    """
    if not name:
        return None
    base = Path(os.environ.get("CONDA_PREFIX") or sys.prefix).resolve()
    root = base.parent if base.parent.name == "envs" else base / "envs"
    candidates = [base, root / name] if base.name == name else [root / name]
    for each in candidates:
        if (each / "conda-meta").is_dir():
            return str(each)
    raise UsageError(
        f"conda_name={name!r} is not a conda environment in {root}: activate it, or pass "
        "penv_archive, an archive created with conda pack",
        code="argument-value",
        argument="conda_name",
        path=str(root),
    )


def zip_modules(file: str | Path, path: Iterable[str] | None = None) -> bool:
    """Write the program's modules to an importable zip file.

    Included are the modules and packages in the script's folder, and imported modules from other
    folders outside the interpreter's (e.g. editable installations).

    Parameters
    ----------
    file : str or Path
        Zip file to write.
    path : iterable of str, optional
        Folders to search, by default :func:`bigdl.runtime.engine.user_import_path`.

    Returns
    -------
    bool
        False if there are no modules; then no file is written.
    """
    entries = user_import_path() if path is None else list(path)
    members = _members(entries, beside_script=True)
    if _size(members) > LARGEST_MODULES:
        members = _members(entries, beside_script=False)
    if _size(members) > LARGEST_MODULES:
        logger.warning(
            "The program's modules are %d MB, too large to send to the executors; pass the "
            "required ones with extra_python_lib.",
            _size(members) // 2**20,
        )
        return False
    if members:
        _write(file, members)
    return bool(members)


def zip_bigdl(file: str | Path) -> bool:
    """Write BigDL's modules to an importable zip file; return True."""
    root = Path(__file__).parents[2]
    _write(file, {source.relative_to(root.parent).as_posix(): source for source in _sources(root)})
    return True


def ship_modules(sc: SparkContext) -> None:
    """Send the program's modules to the executors of `sc` if the executors lack them.

    A program may import more modules after its context was started; the next call sends them.
    Executors on this machine import from the same folders as the program.
    """
    from pyspark import SparkFiles

    if is_local(cast("str", sc.master)) or sc.getConf().get("spark.driver.host") == "127.0.0.1":
        return
    # Executors fetch the file from here until the context stops and removes it.
    directory = Path(sc._temp_dir)
    file = directory / "bigdl-modules.zip"
    if not zip_modules(file):
        return
    content = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    sent = _shipped.setdefault(sc, set())
    if content in sent:
        return
    sent.add(content)
    named = file.rename(directory / f"bigdl-modules-{content}.zip")
    sc.addPyFile(str(named))
    with contextlib.suppress(ValueError):  # the driver imports the original modules
        sys.path.remove(SparkFiles.get(named.name))


def _environment_type(root: Path) -> str:
    if (root / "conda-meta").is_dir():
        return "conda"
    if (root / "pyvenv.cfg").is_file():
        return "venv"
    raise UsageError(
        f"the Python at {root} is neither a conda nor a virtual environment and cannot be sent "
        "to the cluster: pass penv_archive, or python_location if the nodes have a Python",
        code="cluster-config",
        argument="penv_archive",
        path=str(root),
    )


def _pack(environment_type: str, root: Path, output: str) -> None:
    try:
        packer = importlib.import_module(f"{environment_type}_pack")
    except ImportError as error:
        raise MissingExtraError(
            f"{environment_type}-pack, which packs this Python environment for the cluster, is "
            f"not installed; run: pip install {environment_type}-pack (or pass penv_archive)"
        ) from error
    logger.info("Packing the Python environment %s, once", root)
    # Editable packages are sent separately, as modules of the program.
    options = {"ignore_editable_packages": True} if environment_type == "conda" else {}
    try:
        packer.pack(prefix=str(root), output=output, format="tar.gz", **options)
    except Exception as error:
        raise UsageError(
            f"{environment_type}-pack cannot pack {root} ({error}): pass penv_archive, an archive "
            "of the environment created in another way",
            code="cluster-config",
            argument="penv_archive",
            path=str(root),
        ) from error


def _imported_from(entry: str) -> set[str]:
    """Return top-level names of the modules that were imported from a folder."""
    tops = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        path = Path(os.path.realpath(file)) if file and name != "__main__" else None
        if path is not None and path.is_relative_to(entry):
            top = path.relative_to(entry).parts[0]
            if top.removesuffix(".py") == name.partition(".")[0]:
                tops.add(top)
    return tops


def _script_folder_modules(entry: str) -> set[str]:
    """Return the names of the modules and packages in the script's folder."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(script).resolve().parent if script else Path.cwd()
    if Path(entry) != folder or folder == folder.parent:
        return set()
    return {
        path.name
        for path in folder.iterdir()
        if (path.suffix == ".py" and path.is_file()) or (path / "__init__.py").is_file()
    }


def _members(entries: Iterable[str], *, beside_script: bool) -> dict[str, Path]:
    """Return the files of the program's modules by their names in a zip file."""
    members: dict[str, Path] = {}
    for entry in entries:
        if not os.path.isdir(entry):
            continue  # zip files and eggs are sent with extra_python_lib
        names = _imported_from(entry) | (_script_folder_modules(entry) if beside_script else set())
        for top in sorted(names):
            for source in _sources(Path(entry) / top):
                members.setdefault(source.relative_to(entry).as_posix(), source)
    return members


def _size(members: dict[str, Path]) -> int:
    return sum(source.stat().st_size for source in members.values())


def _sources(path: Path) -> Iterable[Path]:
    if path.is_file():
        return [path] if path.suffix == ".py" else []
    return [
        file
        for file in sorted(path.rglob("*.py"))
        if not any(p in _NO_FILES or p.startswith(".") for p in file.relative_to(path).parts[:-1])
    ]


def _write(file: str | Path, members: dict[str, Path]) -> None:
    # Equal modules give equal bytes, independent of modification times.
    with zipfile.ZipFile(file, "w") as archive:
        folders = {folder for name in members for folder in PurePosixPath(name).parents}
        # a namespace package needs an entry for its folder
        for folder in sorted(folders - {PurePosixPath(".")}):
            archive.writestr(zipfile.ZipInfo(f"{folder}/"), b"")
        for name, source in sorted(members.items()):
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o644 << 16
            archive.writestr(info, source.read_bytes(), zipfile.ZIP_DEFLATED)
