"""All tests can be collected with torch, tensorboard, pytest, pytest-xdist and hypothesis, as on a borrowed GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.packages import normalized, with_requirements
from support.paths import ROOT

COLLECT = """
import sys
from support.packages import refuse_all_but

refused = refuse_all_but(["torchhooks", "torch", "tensorboard", "pytest", "pytest-xdist", "hypothesis"])
print("refused:", *sorted(refused))
import pytest

options = ["--collect-only", "-q", "--all", "-n", "0", "-p", "no:cacheprovider", "-p", "xdist.plugin"]
sys.exit(pytest.main([*options, "tests"]))
"""


@pytest.mark.slow
def test_all_tests_are_collected_without_the_packages_that_some_of_them_need() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "CI")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a plugin that is refused would be an error
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    refused = done.stdout.splitlines()[0].split()
    assert {"jsonschema", "moto", "prometheus_client", "torchdata", "tqdm", "coverage"} <= {*refused}
    assert not {"torch", "numpy", "pytest", "torchhooks"} & {*refused}
    assert "error" not in done.stdout.splitlines()[-1]


def test_a_distribution_comes_with_what_it_requires() -> None:
    assert {"pytest", "pluggy", "iniconfig"} <= with_requirements(["PyTest"])
    assert "coverage" not in with_requirements(["pytest"])
    assert normalized("Typing_Extensions") == "typing-extensions"
