"""The system's Chromium, for the tests of pages: found here, never downloaded."""

from __future__ import annotations

import importlib.util
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Where it is, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def missing() -> str:
    """Why tests marked browser cannot run here; empty when they can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (make venv)"
    return "" if chromium() else "no Chromium was found (on Debian: apt-get install chromium)"
