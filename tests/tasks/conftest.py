collect_ignore = ["data", "repositories"]  # libraries that tasks are built from, with tests of their own
