"""Small faults, each put into a copy of the code: some test has to notice. ``make mutants``."""
