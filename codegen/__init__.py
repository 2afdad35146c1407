"""Variant to kernel source to compiled artefact to instruction mix."""
