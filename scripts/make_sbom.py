#!/usr/bin/env python3
"""Write the software bill of materials of a release, as CycloneDX 1.5.

python scripts/make_sbom.py ENVIRONMENT DIST    # needs cyclonedx-bom; `make sbom` runs it

ENVIRONMENT is a virtual environment with the wheel of the folder DIST and its dependencies. The
file DIST/bigdl-VERSION.cdx.json names each package in it with its version, its licences and its
dependencies; its subject is BigDL, with the digests of the files in DIST.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

LIST = """
import json
from importlib.metadata import distributions
print(json.dumps([[each.metadata["Name"], each.version] for each in distributions()]))
"""


def python_of(environment: Path) -> str:
    return str(environment / "bin" / "python")


def normal(name: str) -> str:
    """Return the normalized name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(environment: Path) -> set[tuple[str, str]]:
    """Return name and version of each package in an environment."""
    printed = subprocess.check_output([python_of(environment), "-I", "-c", LIST], text=True)
    return {(normal(name), version) for name, version in json.loads(printed)}


def bill(environment: Path, files: list[Path]) -> dict:
    """Return the bill of materials of an environment, with the digests of BigDL's files."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    command += ["--spec-version", "1.5", "--output-format", "JSON", python_of(environment)]
    made = json.loads(subprocess.check_output(command, text=True))
    (subject,) = (each for each in made["components"] if each["name"] == "bigdl")
    made["components"].remove(subject)
    subject["purl"] = f"pkg:pypi/bigdl@{subject['version']}"
    subject["externalReferences"] = [
        {
            "type": "distribution",
            "url": file.name,
            "hashes": [
                {"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}
            ],
        }
        for file in files
    ]
    made["metadata"]["component"] = subject
    return made


def check(made: dict, environment: Path) -> None:
    """Raise SystemExit unless the bill is valid and lists exactly the installed packages."""
    if error := JsonStrictValidator(SchemaVersion.V1_5).validate_str(json.dumps(made)):
        sys.exit(f"The bill is not valid: {error}")
    components = [made["metadata"]["component"], *made["components"]]
    named = {(normal(each["name"]), each["version"]) for each in components}
    if wrong := named ^ installed(environment):
        sys.exit(f"The bill and the environment differ in {sorted(wrong)}")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    # A path to an interpreter must stay one to its environment: no links are followed.
    environment, folder = Path(os.path.abspath(sys.argv[1])), Path(sys.argv[2])
    files = sorted([*folder.glob("bigdl-*.whl"), *folder.glob("bigdl-*.tar.gz")])
    made = bill(environment, files)
    check(made, environment)
    path = folder / f"bigdl-{made['metadata']['component']['version']}.cdx.json"
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(made['components'])} packages that BigDL needs, {len(files)} files")


if __name__ == "__main__":
    main()
