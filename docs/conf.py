"""Sphinx configuration. CONTRIBUTING.md has the command that builds the site."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]

project = "torchhooks"
author = "the torchhooks authors"
copyright = "the torchhooks authors"
release = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"torchhooks {release}"
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]  # it links to the sources of the pages, which Sphinx copies
html_css_files = ["wide.css"]
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_class_signature = "mixed"
autodoc_inherit_docstrings = False  # a hook shows what it adds, not the methods of every hook
autodoc_preserve_defaults = True
maximum_signature_line_length = 120
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True

# A role that names something that does not exist is a warning, and the site is built with warnings as errors. The types
# of signatures make references too, to libraries that have no page here and to classes that are not public.
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:class",
        r"(collections|contextlib|numpy|os|pathlib|signal|threading|torch|types|typing|typing_extensions)\..*",
    ),
    ("py:class", r"torchhooks(\.\w+)+\.[A-Z]\w*"),
    ("py:class", r"Fetch|Value"),  # names for what a hook may fetch, and for what it gets
]


# What is private, or imported for type checkers only, and what to show in its place.
SHOWN = {
    "_DEFAULT_STEPS": "100",
    "_Path": "str | os.PathLike[str]",
    "TensorBoardWriter": "torch.utils.tensorboard.SummaryWriter",
}


def shown(text: str | None) -> str | None:
    return text and re.sub(rf"\b({'|'.join(SHOWN)})\b", lambda name: SHOWN[name[0]], text)


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", lambda *event: (shown(event[5]), shown(event[6])))
