"""The code, output and figures in the documents are real.

In README.md, CONTRIBUTING.md, AGENTS.md, the skill in the package, and the pages in docs/:

* The ``python`` blocks of a file are one program, which is run in an empty folder. A function ``test_...()`` that is
  defined in a block is called after it.
* A block that imports one of LIBRARIES is run where that library is installed. So it imports all it needs of it, and
  the blocks that do without it do not use its variables.
* A ``text`` block that follows a ``python`` block, with at most one line between them that ends in a colon, is what the
  block prints, including log lines. ``...`` matches anything within a line, or any number of lines if it is alone.
* A ``diff`` block is the output of ``diff -u examples/plain.py examples/wrapped.py``, or of ``ddp_plain.py`` and
  ``ddp.py`` there, without the names of the files.
* No other block is skipped, and there is no block in a language that is not checked here.
* A relative link leads to a file that exists, and to one of its headings.
* The rows of the tables under "What it costs" in README.md and docs/cost.md are rows of benchmarks/RESULTS.md, word for
  word.
* A command ``python -m torchhooks ...`` exists, and so does what the code in a line of text names: a file, a module of
  the package or a name in it.
* In a table whose first column is called "message", that column quotes strings of the package, with ``...`` for values.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import scripts
from support.packages import import_or_skip_all
from support.paths import ROOT

from torchhooks import MonitoredLoop
from torchhooks.__main__ import main as command_line

SKILL = ROOT / "torchhooks/.agents/skills/torchhooks/SKILL.md"
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS")),
    SKILL,
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Too large to be installed for the tests.
LIBRARIES = ("ignite", "keras", "tensorflow", "transformers")
DEADLINE_SECS = 300

BLOCK = re.compile(r"^```(?P<language>\S*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LEAD_IN = re.compile(r"\s*([^\n]*:\n\s*)?")
END_OF_BLOCK = "--- end of block ---"


class Block(NamedTuple):
    language: str
    body: str
    line: int  # of the opening fence
    lead_in: bool  # whether at most a line such as "It prints:" separates it from the previous block


def blocks(text: str) -> list[Block]:
    found, last_end = [], 0
    for match in BLOCK.finditer(text):
        lead_in = LEAD_IN.fullmatch(text[last_end : match.start()]) is not None
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(match["language"], match["body"], line, lead_in))
        last_end = match.end()
    return found


def missing_library(block: Block) -> bool:
    imported = re.findall(rf"^(?:from|import) ({'|'.join(LIBRARIES)})\b", block.body, re.MULTILINE)
    return any(importlib.util.find_spec(library) is None for library in imported)


def program(text: str) -> str:
    """Return the Python blocks as one script with the line numbers of the document."""
    lines = [""] * (text.count("\n") + 1)
    for block in blocks(text):
        if block.language == "python" and not missing_library(block):
            body = block.body.splitlines()
            tests = re.findall(r"^def (test_\w+\(\))", block.body, re.MULTILINE)
            lines[block.line : block.line + len(body)] = body
            lines[block.line + len(body)] = "; ".join([*tests, f"print({END_OF_BLOCK!r})"])
    return "\n".join(lines)


class Ran(NamedTuple):
    code: int | None
    output: str


def run(document: Path) -> Ran:
    """Run the blocks of a document in a new process."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as outputs:
        script, output = Path(folder, document.name).with_suffix(".py"), Path(outputs, "output")
        script.write_text(program(document.read_text(encoding="utf-8")), encoding="utf-8")
        process = scripts.start(script, output)
        process.join(DEADLINE_SECS)
        code = process.exitcode
        process.kill()
        process.join()
        return Ran(code, output.read_text(encoding="utf-8"))


def matches(shown: str, printed: str) -> bool:
    lines = [
        "(.*\n)*" if line.strip() == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n"
        for line in shown.splitlines()
    ]
    return re.fullmatch("".join(lines), printed) is not None


def outputs(text: str) -> list[tuple[int, Block]]:
    """Return the blocks that show output, each with the index of the Python block that prints it."""
    pairs = itertools.pairwise(blocks(text))
    number = itertools.count()
    ran = (pair for pair in pairs if pair[0].language == "python" and not missing_library(pair[0]))
    numbered = [(next(number), after) for _, after in ran]
    return [(index, after) for index, after in numbered if after.language == "text" and after.lead_in]


# A plain pytest runs some of what a newcomer reads first. The others take a process each, and one imports Lightning.
MARKS: dict[str, list[Any]] = {name: [] for name in ("README.md", "loops.md", "writing-hooks.md")}
MARKS["trainers.md"] = [pytest.mark.release]


@pytest.mark.parametrize(
    "document",
    [pytest.param(each, marks=MARKS.get(each.name, [pytest.mark.exhaustive]), id=each.name) for each in DOCUMENTS],
)
def test_every_python_block_runs_and_prints_the_output_shown(document: Path) -> None:
    import_or_skip_all(program(document.read_text(encoding="utf-8")))
    ran = run(document)
    assert ran.code == 0, ran.output
    printed = ran.output.split(f"{END_OF_BLOCK}\n")
    for index, block in outputs(document.read_text(encoding="utf-8")):
        assert matches(block.body, printed[index]), f"{document.name}:{block.line} prints\n{printed[index]}"


DIFFS = {  # by a word that only this diff has
    "DistributedSampler": ["ddp_plain.py", "ddp.py"],
    "": ["plain.py", "wrapped.py"],
}


def test_every_diff_shown_is_the_real_one() -> None:
    for document, block in every_block():
        if block.language == "diff":
            files = next(files for word, files in DIFFS.items() if word in block.body)
            command = ["diff", "-u", *(f"examples/{file}" for file in files)]
            real = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
            assert block.body.splitlines() == real.splitlines()[2:], f"{document.name}:{block.line}"


def every_block() -> Iterator[tuple[Path, Block]]:
    return ((document, block) for document in DOCUMENTS for block in blocks(document.read_text(encoding="utf-8")))


def test_every_block_is_checked() -> None:
    assert {block.language for _, block in every_block()} <= {"python", "text", "diff", "sh", "{eval-rst}"}
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        fences = len(re.findall("^ *```", text, re.MULTILINE))
        assert fences == 2 * len(blocks(text)), f"a fence in {document} is indented or not closed"
        assert "<!-- not run" not in text, document


@functools.cache
def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings of a Markdown file, as GitHub and MyST make them."""
    text = BLOCK.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_relative_link_leads_somewhere() -> None:
    for document in {*DOCUMENTS, *ROOT.glob("*.md")}:
        for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", document.read_text(encoding="utf-8"))):
            if not re.match(r"\w+:", target):
                name, _, anchor = target.partition("#")
                file = document.parent / name if name else document
                assert file.exists(), f"{document.name} links to {target}"
                assert not anchor or anchor in anchors(file), f"{document.name} links to {target}"


def rows(text: str) -> set[str]:
    """Return the rows of the tables, without the spaces that align their cells."""
    return {re.sub(r" *\| *", "|", line) for line in text.splitlines() if re.match(r"\| *[^ -]", line)}


@pytest.mark.parametrize("document", ["README.md", "docs/cost.md"])
def test_every_row_under_what_it_costs_is_in_the_results(document: str) -> None:
    costs = (ROOT / document).read_text(encoding="utf-8").partition("\n## What it costs\n")[2].partition("\n## ")[0]
    assert set() < rows(costs) <= rows((ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8"))


def messages(text: str) -> Iterator[str]:
    """Yield what the first cells of the tables of messages quote."""
    for table in re.findall(r"^\| message \|.*\n((?:\|.*\n?)+)", BLOCK.sub("", text), re.MULTILINE):
        for row in table.splitlines()[1:]:
            quoted = re.match(r"\| `([^`]+)` \|", row)
            assert quoted is not None, f"{row!r} quotes no message"
            yield quoted[1]


def strings_of(tree: ast.AST) -> Iterator[str]:
    """Yield the strings in a module, except docstrings, with ``...`` for the values that are inserted into them."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield re.sub(r"%[-.\d]*[a-z]", "...", node.value)


def is_in(message: str, string: str) -> bool:
    """Return whether the message is a part of ``string``; its ``...`` stands for anything."""
    parts = message.split("...")
    return max(parts, key=len) in string and re.search(".*".join(map(re.escape, parts)), string) is not None


@pytest.mark.slow
def test_every_message_that_a_page_explains_is_one_of_the_package() -> None:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "torchhooks").rglob("*.py")]
    known = [string for tree in trees for string in strings_of(tree)]
    quoted = [message for document in DOCUMENTS for message in messages(document.read_text(encoding="utf-8"))]
    gone = [message for message in quoted if not any(is_in(message, string) for string in known)]
    assert quoted
    assert not gone


def named(text: str) -> Iterator[str]:
    """Yield what code within the lines of ``text`` names: a Python file with its folder, or a dotted name."""
    for code in re.findall(r"`([^`\n]+)`", BLOCK.sub("", text)):
        yield from re.findall(r"(?<![\w/.])\w+/[\w/]+\.py\b", code)
        yield from re.findall(rf"(?<![\w./])(?:torchhooks|{'|'.join(PACKAGES)})(?:\.(?!py\b|json\b)\w+)+", code)


PACKAGES = [file.parent.name for file in (ROOT / "torchhooks").glob("*/__init__.py")]


def exists(name: str) -> bool:
    if name.endswith(".py"):
        return any((folder / name).exists() for folder in (ROOT, ROOT / "torchhooks"))
    if name.startswith("loop.") and hasattr(MonitoredLoop, name.split(".")[1]):
        return True  # the variable of the examples, and not the package
    try:
        pkgutil.resolve_name(name if name.startswith("torchhooks.") else f"torchhooks.{name}")
    except (ImportError, AttributeError):
        return False
    return True


def test_what_the_code_in_a_document_names_exists() -> None:
    documents = [*DOCUMENTS, ROOT / "CHANGELOG.md"]
    names = [(document.name, name) for document in documents for name in named(document.read_text(encoding="utf-8"))]
    assert [(document, name) for document, name in names if not exists(name)] == []


def test_every_command_in_a_document_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line(["--help"])
    (commands,) = re.findall(r"\{([\w,]+)\}\n", capsys.readouterr().out)[:1]
    documents = [document.read_text(encoding="utf-8") for document in (*DOCUMENTS, ROOT / "CHANGELOG.md")]
    assert set(re.findall(r"python -m torchhooks (\w+)", "".join(documents))) == set(commands.split(","))


# -- for agents -------------------------------------------------------------------------------------------------------


def test_the_skill_has_what_an_agent_looks_for() -> None:
    front, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", SKILL.read_text(encoding="utf-8"), re.DOTALL).groups()  # type: ignore[union-attr]
    entries = dict(line.split(": ", 1) for line in front.splitlines())
    assert entries.keys() == {"name", "description"}
    assert (
        entries["name"] == SKILL.parent.name
    )  # the standard of Agent Skills asks for it, and for at most 1,024 characters
    assert len(entries["description"]) <= 1024
    assert len(body.splitlines()) < 500
    wrapped = [block.body for block in blocks(body) if block.language == "python"][1]
    assert len([line for line in wrapped.splitlines() if line]) == 12


def rules(document: Path) -> list[str]:
    """Return the ten rules of a document, without links and line breaks."""
    section = document.read_text(encoding="utf-8").partition("## Ten rules\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\d+\. ((?:.+\n)(?:   .+\n)*)", section, re.MULTILINE)
    return [" ".join(re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", rule).split()) for rule in found]


def test_the_skill_has_the_ten_rules() -> None:
    assert len(rules(SKILL)) == 10
    assert rules(SKILL) == rules(ROOT / "docs/loops.md")


def test_llms_txt_names_the_pages_of_the_site() -> None:
    text = (ROOT / "docs/llms.txt").read_text(encoding="utf-8")
    assert re.match(r"# torchhooks\n\n> ", text)
    linked = re.findall(r"^- \[[^]]+\]\(_sources/([\w/-]+\.md)\.txt\): .", text, re.MULTILINE)
    assert len(linked) == len({*linked}) == text.count("](")
    pages = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}
    left_out = {"index.md", "changelog.md", "contributing.md", "releasing.md"}
    left_out |= {page for page in pages if page.startswith("reference/")} - {
        "reference/index.md",
        "reference/command-line.md",
    }
    assert {*linked} == pages - left_out
    assert 'html_extra_path = ["llms.txt"]' in (ROOT / "docs/conf.py").read_text(encoding="utf-8")


DOCUMENT = """\
```python
def test_one():
    print("called")
```

It prints:

```text
...lled
```

The order of calls:

Another paragraph.

```text
no output
```

```python
print("second")
```
"""


def test_the_program_has_the_line_numbers_of_the_document() -> None:
    lines = program(DOCUMENT).splitlines()
    assert lines[2] == DOCUMENT.splitlines()[2]
    assert lines[20] == 'print("second")'


def test_a_test_in_a_block_is_called_after_it() -> None:
    assert program(DOCUMENT).splitlines()[3].startswith("test_one(); ")


def test_only_a_text_block_right_after_the_code_is_output() -> None:
    assert [(index, block.body) for index, block in outputs(DOCUMENT)] == [(0, "...lled\n")]


def test_three_dots_match_within_one_line() -> None:
    assert matches("loss = 0.5 (... sec)\n", "loss = 0.5 (0.123 sec)\n")
    assert not matches("loss ... sec)\n", "loss = 0.5\n(0.123 sec)\n")


def test_three_dots_alone_match_any_number_of_lines() -> None:
    assert matches("a\n...\nz\n", "a\nb\nc\nz\n")
    assert matches("a\n...\nz\n", "a\nz\n")


def test_an_output_that_lacks_a_line_does_not_match() -> None:
    assert not matches("a\nb\n", "a\n")
