"""The design review: one forecast with everything a reviewer asks about it, as data, as a page and as Markdown."""
