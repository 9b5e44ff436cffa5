""".ci/versions, with stand-ins for the interpreters that it looks for."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from support.paths import ROOT

SCRIPT = ROOT / ".ci" / "versions"
TOOLS = ["bash", "cat", "chmod", "dirname", "env", "mkdir", "mktemp", "rm", "sed", "tail", "tee"]

# Creates an environment whose pip and pytest print how they were called. FAIL names the command that fails.
INTERPRETER = """#!/usr/bin/env bash
set -euo pipefail
[[ $1 == -c ]] && exit "${BROKEN:-0}"
[[ ${FAIL:-} != venv ]]
mkdir -p "$3/bin"
echo "PATH=$3/bin:\\$PATH" >"$3/bin/activate"
cat >"$3/bin/pip" <<'PIP'
#!/usr/bin/env bash
echo "pip $*"
if [[ -f $3 ]]; then sed -n '/^torch==/p; /^sympy==/p; /^numpy==/p' "$3"; fi
[[ ${FAIL:-} != pip ]]
PIP
cat >"$3/bin/pytest" <<'PYTEST'
#!/usr/bin/env bash
printf '<%s>' "$@"
printf '\\n=== 7 passed in 1.00s ===\\n'
[[ ${FAIL:-} != pytest ]]
PYTEST
chmod +x "$3/bin/pip" "$3/bin/pytest"
"""


def versions(folder: Path, *arguments: str, installed: list[str], **environment: str) -> tuple[int, str]:
    """Run the script where only the given interpreters exist; return its exit code and everything that it printed."""
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool) or pytest.fail(f"no {tool}"))
    for name in installed:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(INTERPRETER)
        (folder / name).chmod(0o755)
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = {"PATH": str(folder), "HOME": str(folder), "TMPDIR": str(temporary)} | environment
    completed = subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=60)
    assert not list(temporary.iterdir())  # the script removes what it created, whatever fails
    return completed.returncode, completed.stdout + completed.stderr


def table(output: str) -> dict[str, str]:
    """Return the result of each pair of versions."""
    rows = output.split("\nPython  torch   result\n")[1].splitlines()
    return {" ".join(row.split(None, 2)[:2]): row.split(None, 2)[2] for row in rows if re.match(r"\d", row)}


ALL = ["python3.11", "python3.12", "python3.13", "python3.14"]
PASSED = "passed: 7 passed in 1.00s"


def test_every_installed_python_is_tested_with_its_torch(tmp_path: Path) -> None:
    code, output = versions(tmp_path, installed=ALL)
    assert code == 0
    assert table(output) == {"3.11 2.7.0": PASSED, "3.12 2.13.0": PASSED, "3.13 2.13.0": PASSED, "3.14 2.13.0": PASSED}


def test_all_tests_are_run_and_arguments_are_passed_to_pytest_unchanged(tmp_path: Path) -> None:
    code, output = versions(tmp_path, "-k", "timer and not hook", "tests/a b.py", installed=["python3.12"])
    assert code == 0
    assert "\n<-k><timer and not hook><tests/a b.py>\n" in output


def test_the_oldest_torch_replaces_the_pin_and_chooses_its_own_sympy(tmp_path: Path) -> None:
    _, output = versions(tmp_path, installed=["python3.11"])
    assert re.search(r"\. --group tests\nnumpy==\S+\ntorch==2\.7\.0\n<", output)


def test_the_newest_torch_is_installed_with_every_pin(tmp_path: Path) -> None:
    _, output = versions(tmp_path, installed=["python3.13"])
    assert re.search(r"\. --group tests\nnumpy==\S+\nsympy==\S+\ntorch==2\.13\.0\n<", output)


def test_the_oldest_torch_can_be_replaced_where_there_is_no_build_of_it(tmp_path: Path) -> None:
    code, output = versions(tmp_path, installed=["python3.11"], OLDEST_TORCH="2.8.0")
    assert code == 0
    assert "\ntorch==2.8.0\n" in output
    assert table(output)["3.11 2.8.0"] == PASSED


def test_a_python_of_pyenv_is_found(tmp_path: Path) -> None:
    code, output = versions(tmp_path, installed=[".pyenv/versions/3.13.0/bin/python3.13"])
    assert code == 0
    assert table(output)["3.13 2.13.0"] == PASSED


def test_a_missing_python_is_skipped_with_the_reason(tmp_path: Path) -> None:
    code, output = versions(tmp_path, installed=["python3.12"])
    assert code == 0
    reason = "skipped: no python3.{} that can create a virtual environment, on the PATH or in pyenv"
    assert table(output) == {
        "3.11 2.7.0": reason.format(11),
        "3.12 2.13.0": PASSED,
        "3.13 2.13.0": reason.format(13),
        "3.14 2.13.0": reason.format(14),
    }


def test_one_python_can_be_chosen(tmp_path: Path) -> None:
    code, output = versions(tmp_path, installed=ALL, ONLY_PYTHON="3.12")
    assert code == 0
    assert table(output) == {"3.12 2.13.0": PASSED}


def test_it_fails_if_no_python_could_be_tested(tmp_path: Path) -> None:
    code, output = versions(tmp_path, installed=ALL, BROKEN="1")
    assert code == 1
    assert all(result.startswith("skipped: ") for result in table(output).values())
    assert ".ci/versions: needs at least one of the versions of Python above" in output


@pytest.mark.parametrize(
    ("command", "result"),
    [
        ("venv", "failed: the installation exited with 1"),
        ("pip", "failed: the installation exited with 1"),
        ("pytest", "failed: pytest exited with 1: 7 passed in 1.00s"),
    ],
)
def test_a_failure_is_reported_after_all_versions_have_been_tested(tmp_path: Path, command: str, result: str) -> None:
    code, output = versions(tmp_path, installed=ALL, FAIL=command)
    assert code == 1
    assert {*table(output).values()} == {result}
    assert len(table(output)) == len(ALL)


def test_the_versions_are_those_that_the_package_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    script = SCRIPT.read_text()
    assert project["requires-python"] == ">=3.11"
    assert 'pairs=("3.11 $oldest_torch" ' in script
    (oldest,) = re.findall(r"^oldest_torch=\${OLDEST_TORCH:-([\d.]+)}$", script, re.M)
    (minimum,) = (line.removeprefix("torch>=") for line in project["dependencies"] if line.startswith("torch>="))
    assert oldest in (minimum, f"{minimum}.0")
    assert f"needs Python 3.11 and PyTorch {minimum}, or newer" in (ROOT / "README.md").read_text()
    (newest,) = re.findall(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    sentence = f"`.ci/versions` runs the quick tests with Python 3.11 to 3.14 and torch {minimum} to {newest}"
    assert sentence in (ROOT / "CONTRIBUTING.md").read_text()
