"""Hypothesis without deadlines: a busy machine is no fault of a layout."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("design", deadline=None)
settings.load_profile("design")
