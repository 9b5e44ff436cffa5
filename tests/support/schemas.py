"""What ``python -m torchhooks COMMAND --json`` prints, checked against the schema of the command."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from support.packages import import_or_skip

FOLDER = resources.files("torchhooks") / "schemas"


def schema_of(command: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{command}.json").read_text(encoding="utf-8"))
    return found


def answer(command: str, printed: str) -> dict[str, Any]:
    """Return the object that ``command`` has ``printed``.

    Raises:
        ValueError: it is not one object of JSON.
        jsonschema.ValidationError: it does not follow the schema.
    """
    found: dict[str, Any] = json.loads(printed, parse_constant=_refuse)
    import_or_skip("jsonschema").Draft202012Validator(schema_of(command)).validate(found)
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"JSON has no {name}")
