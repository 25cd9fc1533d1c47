"""Release workflows use trusted sources and publish the checked files."""

import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BUILD_TOOLS = ROOT / ".github" / "build" / "requirements.txt"
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


def lines_of(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def steps(workflow: dict):
    for job in workflow["jobs"].values():
        yield from job["steps"]


def test_every_action_is_named_by_its_digest_and_version():
    pinned = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
    not_pinned = [
        f"{path.name}:{number}: {line.strip()}"
        for path in WORKFLOWS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "uses:" in line and not pinned.search(line)
    ]
    assert not not_pinned


def test_an_action_has_one_version_in_all_workflows():
    actual = {
        use
        for path in WORKFLOWS
        for use in re.findall(r"uses: ([\w./-]+@[0-9a-f]{40})", path.read_text(encoding="utf-8"))
    }
    names = [use.partition("@")[0] for use in actual]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_unless_a_job_asks_for_more(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] in ({}, {"contents": "read"})
    assert "pull_request_target" not in workflow[True]  # YAML's reading of `on`
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        # what others can write (titles, branches) is never part of a command
        assert "${{" not in step.get("run", "")


def test_rights_of_a_release_are_apart_from_programs_of_others():
    """Check that privileged jobs run no packages and no files of the repository."""
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    writing = {
        name: job for name, job in release["jobs"].items() if "write" in job["permissions"].values()
    }
    assert set(writing) == {"attest", "publish", "page"}
    for job in writing.values():
        assert not any(
            step.get("uses", "").startswith("actions/checkout@") for step in job["steps"]
        )
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert release["jobs"]["publish"]["environment"]["name"] == "pypi"
    assert not any("cache" in step.get("with", {}) for step in steps(release))


def test_build_tools_are_named_by_digest_at_the_tested_versions():
    tested = dict(line.split("==") for line in lines_of(ROOT / "constraints.txt"))
    needed = set()
    for line in lines_of(BUILD_TOOLS):
        pin, digest = line.split(" --hash=sha256:")
        name, version = pin.split("==")
        needed.add(name)
        assert tested[name] == version
        assert re.fullmatch(r"[0-9a-f]{64}", digest)
    assert {"build", "setuptools"} <= needed


def test_constraints_name_each_package_once():
    names = [
        canonicalize_name(Requirement(line).name) for line in lines_of(ROOT / "constraints.txt")
    ]
    assert sorted(names) == sorted(set(names))


def test_no_installation_asks_two_indexes():
    files = [
        *WORKFLOWS,
        *(ROOT / name for name in ("Makefile", "README.md", "docker/Dockerfile", ".ci/run")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "scripts").rglob("*.sh"),
    ]
    command = re.compile(r"pip install.*--extra-index-url|PIP_EXTRA_INDEX_URL=")
    assert not [path.name for path in files if command.search(path.read_text(encoding="utf-8"))]


def test_the_base_image_is_named_by_its_digest():
    assert re.search(r"^ARG BASE=python:[\w.-]+@sha256:[0-9a-f]{64}$", DOCKERFILE, re.M)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.M))
    sources = set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.M))
    assert sources - stages == {"${BASE}"}


def test_updates_are_proposed_for_everything_that_is_pinned():
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    watched = {(each["package-ecosystem"], each["directory"]) for each in updates}
    assert watched >= {
        ("pip", "/"),
        ("pip", "/.github/build"),
        ("github-actions", "/"),
        ("docker", "/docker"),
    }
