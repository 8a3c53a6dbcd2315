"""Colocated or disaggregated, under which schedule: a user's own job in every arm, see docs/placement.md."""
