"""Checkpoints of released versions, in tests/data/checkpoints, are resumed with the same bits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.paths import ROOT
from support.recorded import KINDS, RECORDED, RECORDED_STEP, SEED, train_ranks

from torchhooks import list_checkpoints
from torchhooks.checkpoints.folder import FORMAT

VERSIONS = sorted(folder.name for folder in RECORDED.iterdir())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_training_run_is_resumed_with_the_same_bits(tmp_path: Path, version: str, kind: str) -> None:
    shutil.copytree(RECORDED / version / kind, tmp_path / "run")
    steps = [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")]
    assert steps[-1] == RECORDED_STEP
    # Another seed, so that nothing is as expected but by the checkpoint.
    outcomes = train_ranks(kind, tmp_path / "run", tmp_path / "ranks", SEED + 1)
    # As in expected.json: JSON knows no tuples.
    assert json.loads(json.dumps(outcomes)) == json.loads((RECORDED / version / "expected.json").read_text())[kind]


def test_the_present_format_is_recorded() -> None:
    manifests = RECORDED.glob("*/plain/model.ckpt-*/manifest.json")
    assert FORMAT in {json.loads(manifest.read_text())["format"] for manifest in manifests}


def test_only_released_versions_are_recorded() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = {*re.findall(r"^## \[(\d.*?)\]", changelog, re.MULTILINE), "0.1.0"}  # 0.1.0 is the first one
    assert {*VERSIONS} <= released
