"""Hooks of the site: what its Markdown takes from outside docs/, and the check of its English.

commands.md gets the help of each command; contribute.md and changelog.md are files of the root. A
link to a source leads into the repository if mkdocs.yml has a `repo_url`; else its path follows
the words. Pictures are copied. A missing file ends the build, and so does a sentence that breaks a
rule of `english`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import click
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from hvdtrain import cli

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs import english  # noqa: E402

_OF_ROOT = {"contribute.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
_HELP_COLUMNS = 110
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_pre_build(config: Any) -> None:
    """Check the English of all pages. Raises PluginError with page, line and sentence."""
    try:
        english.check_all()
    except ValueError as error:
        raise PluginError(str(error)) from None


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page's text with its links and pictures as the site has them.

    Raises PluginError for a link to a file that does not exist.
    """
    if page.file.src_path == "commands.md":
        return f"{markdown}\n{commands()}"
    folder = ROOT / "docs"
    if root_file := _OF_ROOT.get(page.file.src_path):
        folder = ROOT
        markdown = (ROOT / root_file).read_text()

    def replaced(match: re.Match[str]) -> str:
        is_picture, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        if re.match(r"\w+:", target):
            return match[0]
        path = os.path.relpath(folder / target, ROOT)
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_path} links to {path}, which does not exist")
        if path == "README.md":
            return f"[{words}](index.md)"
        if path.startswith("docs/"):
            return f"{is_picture}[{words}]({path.removeprefix('docs/')}{anchor})"
        if is_picture:
            name = f"pictures/{Path(path).name}"
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
            return f"![{words}]({name})"
        if config.repo_url:
            return f"[{words}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"
        is_path = words.replace("\\", "").strip("`") in path and "/" in words
        return words if is_path else f"{words} (`{path}`)"

    return _LINK.sub(replaced, markdown)


def commands() -> str:
    """Return the help of each command, in the sections of `hvdtrain --help`."""
    parts = []
    for title, names in cli.SECTIONS.items():
        parts.append(f"## {title}")
        for name in names.split():
            command = cli.cli.get_command(click.Context(cli.cli), name)
            assert command is not None
            context = click.Context(
                command, info_name=f"hvdtrain {name}", max_content_width=_HELP_COLUMNS
            )
            context.terminal_width = _HELP_COLUMNS
            parts.append(f"### hvdtrain {name}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts)
