"""The metadata of the package are consistent. ``.ci/package`` builds the package, installs it and runs it."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

import torchhooks


def text(name: str) -> str:
    """Return the contents of a file in the root of the project."""
    return (ROOT / name).read_text(encoding="utf-8")


PROJECT: dict[str, Any] = tomllib.loads(text("pyproject.toml"))
METADATA: dict[str, Any] = PROJECT["project"]
TARGETS: dict[str, Any] = PROJECT["tool"]["hatch"]["build"]["targets"]


def citation(key: str) -> str:
    """Return the value of a top-level ``key`` of CITATION.cff that is written on its line."""
    [value] = re.findall(rf"^{key}: (.+)$", text("CITATION.cff"), re.MULTILINE)
    return str(value)


def pins() -> dict[str, str]:
    """Return the versions in constraints.txt by normalized name."""
    lines = text("constraints.txt").splitlines()
    named = [line.split("==") for line in lines if not line.startswith("#")]
    return {normalized(name): version for name, version in named}


def normalized(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_the_classifiers_name_every_supported_python(version: str) -> None:
    assert f"Programming Language :: Python :: {version}" in METADATA["classifiers"]


def test_the_oldest_python_is_the_same_everywhere() -> None:
    classifiers = [line.rpartition(" ")[2] for line in METADATA["classifiers"] if "Python :: 3." in line]
    oldest = min(classifiers, key=lambda version: int(version.partition(".")[2]))
    assert METADATA["requires-python"] == f">={oldest}"
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert f"Python {oldest} and PyTorch" in text("README.md")


def test_the_oldest_torch_is_that_of_the_readme() -> None:
    [requirement] = [line for line in METADATA["dependencies"] if line.startswith("torch>=")]
    oldest = requirement.removeprefix("torch>=")
    assert f"PyTorch {oldest}, or newer" in text("README.md")


def test_the_citation_agrees_with_the_project() -> None:
    for key in ("version", "license"):
        assert citation(key) == METADATA[key]
    assert citation("title") == METADATA["name"]
    assert citation("abstract") == METADATA["description"]
    [author] = METADATA["authors"]
    assert re.findall("^  - name: (.+)$", text("CITATION.cff"), re.MULTILINE) == [author["name"]]


def test_the_version_is_that_of_the_newest_release_in_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", METADATA["version"])
    headings = re.findall(r"^## \[(.+?)\]", text("CHANGELOG.md"), re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert headings
    assert released[:1] in ([], [METADATA["version"]])  # before the first release, there is only Unreleased


def test_the_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def version(name: str) -> str:
        asked.append(name)
        return "1.2.3"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert torchhooks.__version__ == "1.2.3"
    assert asked == [METADATA["name"]]


def test_the_version_of_a_checkout_that_is_not_installed_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert torchhooks.__version__ == "0+unknown"


def test_the_version_is_not_read_before_it_is_asked_for() -> None:
    assert "__version__" not in vars(torchhooks)


def test_another_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'torchhooks' has no attribute '__versoin__'$"):
        torchhooks.__versoin__  # type: ignore[attr-defined]  # noqa: B018


def test_every_path_of_the_sdist_exists() -> None:
    assert [name for name in TARGETS["sdist"]["only-include"] if not (ROOT / name).exists()] == []


def test_the_package_has_the_marker_of_its_types_and_the_licence() -> None:
    assert TARGETS["wheel"]["packages"] == ["torchhooks"]
    assert (ROOT / "torchhooks" / "py.typed").exists()
    assert "Typing :: Typed" in METADATA["classifiers"]
    assert [(ROOT / name).exists() for name in METADATA["license-files"]] == [True]


def test_every_tool_of_the_group_dev_has_a_pin() -> None:
    tools = [line for line in PROJECT["dependency-groups"]["dev"] if isinstance(line, str)]
    assert [tool for tool in tools if normalized(tool.partition("[")[0]) not in pins()] == []
    assert "build" in tools
    assert "pyproject-hooks" in pins()  # which build needs


def test_no_extra_is_for_developers_alone() -> None:
    assert METADATA["optional-dependencies"].keys().isdisjoint(PROJECT["dependency-groups"])


def test_every_version_that_is_tested_has_a_job() -> None:
    classifiers = [line.rpartition(" ")[2] for line in METADATA["classifiers"] if "Python :: 3." in line]
    workflow = text(".github/workflows/tests.yml")
    assert re.findall(r'\{ python: "(.+?)"', workflow) == classifiers
    assert re.findall(r'"(3\.\d+) \$', text(".ci/versions")) == classifiers


def test_every_action_is_pinned_by_a_hash_and_needs_no_secret() -> None:
    for path in (ROOT / ".github" / "workflows").iterdir():
        workflow = path.read_text()
        used = re.findall(r"uses: (.+)", workflow)
        assert used
        assert [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
        assert "secrets." not in workflow


@pytest.mark.parametrize(
    ("tag", "owner", "code", "message"),
    [
        ("v0.1.0", "acme", 0, "0.1.0 can be released\n"),
        ("v0.1.0", "OWNER", 1, "docs/releasing.md"),
        ("v0.2.0", "acme", 1, "the tag is v0.2.0, but the version in pyproject.toml is 0.1.0"),
        ("0.1.0", "acme", 1, "the tag is 0.1.0"),
    ],
)
def test_a_release_needs_its_tag_and_no_placeholder(
    tmp_path: Path, tag: str, owner: str, code: int, message: str
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "release-ready", tmp_path / ".ci")
    urls = f'Source = "https://github.com/{owner}/torchhooks"\n'
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "0.1.0"\n{urls}')
    (tmp_path / "CITATION.cff").touch()
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [0.1.0] - 2030-01-31\n")
    completed = subprocess.run([tmp_path / ".ci" / "release-ready", tag], capture_output=True, text=True, check=False)
    assert completed.returncode == code
    assert message in completed.stdout + completed.stderr
