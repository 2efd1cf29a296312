"""The notebook: run its cells without Jupyter, keep its outputs, and make a page of it.

.venv/bin/python -m docs.making.notebook        # writes the outputs anew into docs/notebook.ipynb
"""

from __future__ import annotations

import ast
import contextlib
import html
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLACE = Path(__file__).resolve().parents[1] / "notebook.ipynb"
# in a cell whose output comes from another package and changes with its version
OF_OTHERS = "to_pandas"


def cells() -> list[dict[str, Any]]:
    """Return the cells of the stored notebook."""
    kept: list[dict[str, Any]] = json.loads(PLACE.read_text())["cells"]
    return kept


def outputs() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run the code cells in turn in an empty folder; yield the code and the outputs of each."""
    names: dict[str, Any] = {}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            for cell in cells():
                if cell["cell_type"] == "code":
                    code = "".join(cell["source"])
                    yield code, list(_shown(code, names))
        finally:
            os.chdir(before)


def _shown(code: str, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a cell as Jupyter does: yield its printed text, and the value of a last expression."""
    body = ast.parse(code).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        yield {"name": "stdout", "output_type": "stream", "text": text}
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        yield {
            "data": data,
            "execution_count": None,
            "metadata": {},
            "output_type": "execute_result",
        }


def page() -> str:
    """Return the notebook as a page of the site."""
    parts = []
    for cell in cells():
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", [])})
            shown = "".join(data.get("text/html", ()))
            # A blank line would end the block of HTML.
            text = "\n".join(line for line in shown.splitlines() if line.strip())
            plain = html.escape("".join(data["text/plain"]))
            parts.append(text if shown else f"<pre>{plain}</pre>")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run all cells and store their outputs."""
    notebook = json.loads(PLACE.read_text())
    of_code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, (_, shown) in zip(of_code, list(outputs()), strict=True):
        cell["outputs"] = shown
    beside = PLACE.with_suffix(".new")
    beside.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    os.replace(beside, PLACE)


if __name__ == "__main__":
    main()
