"""Event simulation of the schedules, see docs/placement.md: ``python -m hybridengine.simulate --help``."""
