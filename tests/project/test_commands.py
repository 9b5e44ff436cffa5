"""``python -m torchhooks``: what its commands say of wrong paths, and of files that another program has written."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.packages import import_or_skip
from support.schemas import FOLDER, answer, schema_of

import torchhooks
from torchhooks.__main__ import main, parsers
from torchhooks.tools.run_record import NAME

RED = "\x1b[31mred\x07\r\u202e\n"
HUGE = 10**400


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert (raised.value.code, capsys.readouterr().out) == (0, f"torchhooks {torchhooks.__version__}\n")


@pytest.mark.parametrize(
    "command",
    [
        ["checkpoints", "gone"],
        ["nan", "gone"],
        ["status", "gone"],
        ["stacks", "gone"],
        ["mirror", "gone", "file:///copy"],
    ],
)
def test_a_path_that_does_not_exist(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 1
    assert capsys.readouterr().err == "gone does not exist\n"
    assert main([*command, "--json"]) == 1
    assert answer(command[0], capsys.readouterr().out) == {"error": "gone does not exist"}


def test_the_status_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.pt"
    file.touch()
    assert main(["status", str(file)]) == 1
    assert capsys.readouterr().err == f"{file}: {os.strerror(20)}\n"


def test_a_copy_in_a_folder_of_this_machine_needs_an_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mirror", str(tmp_path), "/copies/run"]) == 1
    assert "begins with file://" in capsys.readouterr().err
    assert main(["mirror", "s3://KEY:SECRET@bucket/run", "s3://other/run"]) == 1
    assert "SECRET" not in capsys.readouterr().err


def record(**changed: Any) -> dict[str, Any]:
    now = time.time()
    made = {"pid": os.getpid(), "host": socket.gethostname(), "world_size": 1, "began": now, "began_at": 0, "time": now}
    return made | {"step": 7, "steps_per_sec": 1.5, "last_step": 9, "stopped": None, "failed": False} | changed


def status_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the status as JSON, after checking what is printed without that."""
    main(["status", str(folder)])
    printed = capsys.readouterr()
    assert printed.err == ""
    assert all(char.isprintable() or char == "\n" for char in printed.out)
    printed.out.encode()
    main(["status", str(folder), "--json"])
    return answer("status", capsys.readouterr().out)


HOSTILE: list[Any] = [None, True, -1, HUGE, -HUGE, 1e308, float("nan"), float("-inf"), "", [], {}, RED, "\ud800"]


@pytest.mark.parametrize("name", record())
def test_no_value_in_a_record_is_a_traceback_or_controls_the_terminal(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in HOSTILE:
        (tmp_path / NAME).write_text(json.dumps(record(**{name: value})))
        found = status_of(tmp_path, capsys)["record"]
        assert found is None or found[name] == value, value


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000, b"[]", b"null", b'{"pid": 1', b"\0" * 50])
def test_a_damaged_record_is_none(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / NAME).write_bytes(data)
    assert status_of(tmp_path, capsys)["record"] is None


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b"{}",
        b'{"step": 1, "time": 1e999, "loss": 1}',
        b'{"step": 1, "time": NaN, "loss": 1}',
        b'{"step": 1e999, "time": 1, "loss": 1}',
        b'{"step": 1, "time": "now", "loss": 1}',
        b'{"step": 1, "time": 1, "loss": ' + str(HUGE).encode() + b"}",
        b"\xff",
    ],
    ids=range(8),
)
def test_a_damaged_line_of_json_is_no_point(line: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "curves.jsonl").write_bytes(b'{"step": 1, "time": 1.0, "loss": 2}\n' + line + b"\n")
    assert status_of(tmp_path, capsys)["values"] == {"loss": {"step": 1, "time": 1.0, "value": 2.0}}


@pytest.mark.parametrize("tag", [RED, "\ud800"])
def test_the_tag_of_a_curve_controls_no_terminal(tag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "curves.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, tag: 2}))
    assert list(status_of(tmp_path, capsys)["values"]) == [tag]


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000, b"[]", b"null", b"{}"])
def test_a_damaged_request_for_an_autopsy_is_said(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nan.json").write_bytes(data)
    assert main(["nan", str(tmp_path)]) == 1
    assert "remove it" in capsys.readouterr().err


# -- the schemas ------------------------------------------------------------------------------------------------------


def test_each_command_has_json_and_a_schema() -> None:
    commands, jsonschema = parsers()[1], import_or_skip("jsonschema")
    assert {each.name for each in FOLDER.iterdir()} == {f"{name}.json" for name in commands}
    for name, command in commands.items():
        assert "--json" in command.format_help(), name
        jsonschema.Draft202012Validator.check_schema(schema_of(name))


@pytest.mark.parametrize("command", parsers()[1])
def test_a_schema_names_all_keys_and_allows_no_others(command: str) -> None:
    def objects(part: object) -> Iterator[dict[str, Any]]:
        if isinstance(part, dict):
            if part.get("type") == "object":
                yield part
            part = list(part.values())
        if isinstance(part, list):
            for each in part:
                yield from objects(each)

    named = [each for each in objects(schema_of(command)) if "properties" in each]
    assert named
    for each in named:
        assert (each["additionalProperties"], each["required"]) == (False, list(each["properties"]))


def test_an_answer_that_does_not_follow_the_schema_is_refused() -> None:
    text = '{"source": "run", "target": "file:///copy", "checkpoints": ["model.ckpt-3"]}'
    assert answer("mirror", text)["source"] == "run"
    for wrong in (text.replace("source", "from"), text.replace('"run"', "1"), text[:-1] + ', "more": 1}', "{}", "[]"):
        with pytest.raises(import_or_skip("jsonschema").ValidationError):
            answer("mirror", wrong)


def test_a_value_that_json_does_not_have_is_a_string(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"step": 1, "time": 1.0, "loss": "NaN"}, {"step": 2, "time": 2.0, "lr": "-Infinity"}]
    (tmp_path / "curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = status_of(tmp_path, capsys)["values"]
    assert {tag: point["value"] for tag, point in values.items()} == {"loss": "NaN", "lr": "-Infinity"}
