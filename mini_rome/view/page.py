"""One self-contained page: template, style, script and data in a file that asks for nothing outside itself.

The page's policy allows no request, and no script or style but these, by their hashes. Data goes in compressed, so
that nothing in it can end its element; what is in it enters the page as text. Not in the paper.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import webbrowser
from pathlib import Path
from typing import Any

from mini_rome.errors import MiniRomeError
from mini_rome.runs import replacing
from mini_rome.view.data import load

HERE = Path(__file__).parent
PAGE = "view.html"  # in the run's folder, unless --export names another file


def render(data: dict[str, Any]) -> str:
    """The page that shows `data` (see `data.load`)."""
    template, style, script = ((HERE / f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    packed = gzip.compress(json.dumps(finite(data), separators=(",", ":"), allow_nan=False).encode(), 6, mtime=0)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        f"form-action 'none'"
    )
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": base64.b64encode(packed).decode()}
    pieces = template.split("@")  # text and names in turn
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def finite(value: Any) -> Any:
    """The same with numbers that JSON cannot say as text.

    >>> finite({"mu": [-1.5, float("-inf"), float("nan")]})
    {'mu': [-1.5, '-inf', 'nan']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list) else value


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def view(run: str | Path, export: Path | None, show: bool) -> int:
    """Write the page of a run and say where it is; `show`: open it in a browser too."""
    data = load(run)
    place = Path(run)
    page = export or (place / PAGE if place.is_dir() else place.with_suffix(".html"))
    if page.is_dir() or not page.parent.is_dir():
        raise MiniRomeError(f"--export {page}: name a file in a folder that exists, such as page.html")
    try:
        with replacing(page) as spare:
            spare.write_text(render(data), encoding="utf-8")
    except MiniRomeError as error:
        raise MiniRomeError(f"{error}\nThe page goes where --export says, such as --export page.html.") from error
    for note in data["run"]["notes"]:
        print(f"note: {note}")
    simulated = " (simulated sandbox)" if "sim" in data["run"]["backends"] else ""
    count = len(data["episodes"])
    print(f"{page}: {count} episode{'s' * (count != 1)}{simulated}, {page.stat().st_size / 1e6:.1f} MB")
    if show and not webbrowser.open(page.resolve().as_uri()):
        raise MiniRomeError(f"--open: no browser was found here. Open {page} in one, it needs nothing beside it.")
    return 0
