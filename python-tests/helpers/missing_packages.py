"""Import all modules that the documentation names while one package is missing.

    python missing_packages.py torch keras ...

prints a line of JSON for each package: what the imports raised other than a MissingExtraError with
the line for pip, and how many raised that. Modules that were imported before stay, except the
package and BigDL's own.
"""

import importlib
import json
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Installed:
    """The usual finder, for which a package is not installed."""

    missing = ""
    find_distributions = staticmethod(PathFinder.find_distributions)

    def find_spec(self, fullname, path=None, target=None):
        if f"{fullname}.".startswith(f"{self.missing}."):
            return None
        return PathFinder.find_spec(fullname, path, target)


def public_modules():
    """Names of modules in docs/api and docs/compat.md."""
    pages = [*(ROOT / "docs" / "api").glob("*.md"), ROOT / "docs" / "compat.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    found = {page.stem for page in pages if page.stem.startswith("bigdl.")}
    for name in re.findall(r"\bbigdl(?:\.\w+)+", text):
        parts = name.split(".")
        while len(parts) > 1:
            path = ROOT.joinpath("src", *parts)
            if path.is_dir() or path.with_suffix(".py").is_file():
                found.add(".".join(parts))
                break
            parts.pop()
    return sorted(found)


def _take_out(package):
    theirs = (each for each in sys.meta_path if not type(each).__module__.startswith("bigdl"))
    sys.meta_path[:] = theirs
    own = [name for name in sys.modules if f"{name}.".startswith(("bigdl.", f"{package}."))]
    return {name: sys.modules.pop(name) for name in own}


def _tries(module):
    """Import a module, and each of its public names, which may be lazy."""
    yield lambda: importlib.import_module(module)
    found = sys.modules.get(module)
    for name in getattr(found, "__all__", ()):
        yield lambda name=name: exec(f"from {module} import {name}")


def wrong(package, modules):
    """What importing the modules raises without a package, and how many say what to install."""
    Installed.missing = package
    taken = _take_out(package)
    from bigdl.common.dropped import DroppedModuleError
    from bigdl.common.errors import MissingExtraError

    lines, explained = [], 0
    for module in modules:
        for attempt in _tries(module):
            try:
                attempt()
            except DroppedModuleError:
                pass
            except MissingExtraError as error:
                explained += 1
                if "pip install 'bigdl[" not in str(error):
                    lines.append(f"{module}: {error}")
            except ImportError as error:
                lines.append(f"{module}: {type(error).__name__}: {error}")
    _take_out(package)
    sys.modules.update(taken)
    return lines, explained


if __name__ == "__main__":
    sys.meta_path[sys.meta_path.index(PathFinder)] = Installed()
    names = public_modules()
    for each in sys.argv[1:]:
        lines, explained = wrong(each, names)
        print("MISSING", json.dumps([each, explained, sorted(set(lines))]), flush=True)
