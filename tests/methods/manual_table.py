"""The tables of docs/methods.md: `python -m tests.methods.manual_table` prints them."""

from __future__ import annotations

from hvdtrain.training import methods


def table() -> str:
    """Return the table of methods and backends, in Markdown, with the reasons below, and that of
    what methods need and lack.
    """
    lines = [
        f"| method | options | {' | '.join(methods.BACKENDS)} |",
        "|---|---|" + "---|" * len(methods.BACKENDS),
    ]
    reasons: list[str] = []

    def cell(method: methods.Method, backend: str) -> str:
        reason = method.refused.get(backend)
        if reason is None:
            return "yes"
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"

    for method in methods.METHODS:
        cells = " | ".join(cell(method, backend) for backend in methods.BACKENDS)
        lines.append(f"| {method.name} | `{method.option}` | {cells} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    apart = ["| needed | by | not with |", "|---|---|---|"]
    for need in methods.Need:
        by = [f"`{method.option}`" for method in methods.METHODS if need in method.needs]
        without = [f"`{m.option}`: {m.lacks[need]}" for m in methods.METHODS if need in m.lacks]
        apart.append(f"| {need.value} | {', '.join(by)} | {'; '.join(without)} |")
    return "\n".join([*lines, "", *notes, "", *apart]).strip() + "\n"


if __name__ == "__main__":
    print(table(), end="")
