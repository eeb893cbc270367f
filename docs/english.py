"""Habits of bad English that a pattern can find: the site is not built while a page has one.

`site_hooks` checks every page with `problems`, and README.md, CONTRIBUTING.md and the unreleased
part of CHANGELOG.md. Code, quotes, headings and comments are left out. A rule is here only if good
English hardly ever matches it. Imports nothing of mkdocs, so that a test can import this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 50
"""The words of a sentence, at most."""

_VERBS = """is are was were be has have had does do did says say said tells tell told shows show
    shown means decides counts stays starts ends goes follows fits works runs helps reads writes
    saves sends finds prints lists names takes gives makes keeps needs holds""".split()
RULES = {
    "begins with 'Of': begin with the subject": re.compile(r"^Of (?!course\b)"),
    "begins with 'What' and ends in a verb: subject, verb, object": re.compile(
        rf"^What\b.*\b(?:{'|'.join(_VERBS)})[.:]?$"
    ),
    "'but' in place of 'except'": re.compile(
        r"\b(?:but for|(?:all|nothing|none|nobody|no one|never|everything|anything) but)\b"
        r"|\b(?:no|any|every|each) [\w-]+ but (?:the|that|those|of|its|one|an?|this|rank)\b",
        re.IGNORECASE,
    ),
    "'is said' or 'is told': name who prints or sends it": re.compile(
        r"\b(?:is|are|was|were|be) (?:said|told)\b"
    ),
    "'and so is': repeat the subject": re.compile(
        r"\band so (?:is|are|was|were|does|do|did|has|have)\b"
    ),
    "begins with 'One that' or 'Those of': name the thing": re.compile(
        r"^(?:One (?:that|which|who)|(?:That|Those) of)\b"
    ),
    "'of which the': make two sentences": re.compile(r"\bof which (?:the|each|every|it|this)\b"),
    "'one's own': write 'your own'": re.compile(r"\bone's own\b"),
    "'all else': write 'everything else'": re.compile(r"\ball else\b", re.IGNORECASE),
    "begins with 'Where': write 'If'": re.compile(r"^Where (?!possible|needed)(?!.*\?$)"),
    "'anew' or 'be had': write 'again', 'available'": re.compile(r"\b(?:anew|be had)\b"),
    "'wants': programs need or require": re.compile(r"(?<!who )(?<!user )\bwants\b"),
    "two colons: make two sentences": re.compile(r":\s[^;]*:\s"),
    f"has more than {LONGEST} words": re.compile(rf"^(?:\S+\s+){{{LONGEST}}}\S"),
}


def problems(markdown: str) -> list[str]:
    """Return the sentences that break a rule, each as "LINE: RULE: SENTENCE"."""
    return [
        f"{line}: {rule}: {text}"
        for line, text in _sentences(markdown)
        for rule, pattern in RULES.items()
        if pattern.search(text)
    ]


def check_all() -> None:
    """Check the manual and the texts of the root. Raises ValueError with all that is found."""
    texts = {path: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
    texts |= {ROOT / name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
    changelog = ROOT / "CHANGELOG.md"
    texts[changelog] = re.split(r"(?m)^## (?!Unreleased)", changelog.read_text())[0]
    found = [f"{path.relative_to(ROOT)}:{text}" for path in texts for text in problems(texts[path])]
    if found:
        raise ValueError("rewrite these sentences:\n" + "\n".join(found))


def _sentences(markdown: str) -> Iterator[tuple[int, str]]:
    """Return each sentence with the number of its line."""
    text = re.sub(r"(?ms)^ *```.*?^ *```$|<!--.*?-->", _blank, markdown)
    text = re.sub(r"(?m)^(?:#|:::| {4}|\|[-| ]+$).*$", "", text)  # headings, code, rulers of tables
    text = re.sub(r"`[^`\n]+`", "`x`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r'"[^"\n]*"', '"x"', text).replace("**", "")
    # A cell of a table, an item of a list and a paragraph are texts of their own.
    text = re.sub(r"(?m)^ *(?:[-*]|\d+\.) ", "\0", text)
    text = re.sub(r"(?m)^\|.*$", lambda row: row[0].replace("|", "\0"), text)
    for part in re.finditer(r"(?:[^\0\n]|\n(?!\s*\n))+", text):
        start = part.start()
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(])", part[0]):
            place = text.index(sentence, start)
            start = place + len(sentence)
            blank = len(sentence) - len(sentence.lstrip())
            yield text.count("\n", 0, place + blank) + 1, " ".join(sentence.split())


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")
