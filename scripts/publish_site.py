#!/usr/bin/env python3
"""Copy the built pages to a folder of all versions, and list the versions for the version switch.

python scripts/publish_site.py docs/_build/html FOLDER      # writes FOLDER/<version>

FOLDER is the root of the published site, such as a checkout of the branch `gh-pages`. The list is
FOLDER/versions.json, and FOLDER/index.html forwards to the newest version, if possible to one that
is no release candidate.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

from packaging.version import InvalidVersion, Version


def site_version(site: Path) -> str:
    """Return the version in the titles of the built pages."""
    index = (site / "index.html").read_text(encoding="utf-8")
    title = re.search(r"<title>[^<]*BigDL (\d[^<\s]*)", index)
    if not title:
        raise SystemExit(f"{site}/index.html: no version in its title; run make docs first")
    return title[1]


def publish(site: Path, folder: Path) -> list[str]:
    """Copy the pages to a folder of their version; return all versions, the newest first."""
    version = site_version(site)
    target = folder / version
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(site, target, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))
    versions = []
    for index in folder.glob("*/index.html"):
        try:
            versions.append(Version(index.parent.name))
        except InvalidVersion:
            continue
    versions.sort(reverse=True)
    newest = next((each for each in versions if not each.is_prerelease), versions[0])
    names = [str(each) for each in versions]
    (folder / "versions.json").write_text(json.dumps(names) + "\n", encoding="utf-8")
    (folder / ".nojekyll").touch()
    (folder / "index.html").write_text(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>BigDL</title>'
        f'<meta http-equiv="refresh" content="0; url={newest}/"></head>'
        f'<body><a href="{newest}/">BigDL {newest}</a></body></html>\n',
        encoding="utf-8",
    )
    return names


def main() -> None:
    """Publish the pages and print the versions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, help="the built pages")
    parser.add_argument("folder", type=Path, help="the root of the published site")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print("versions:", ", ".join(publish(options.site, options.folder)))


if __name__ == "__main__":
    main()
