"""What can go wrong in `tilecast calibrate`."""

from __future__ import annotations


class CalibrateError(ValueError):
    """A wrong option or an impossible request of `tilecast calibrate`; one sentence."""
