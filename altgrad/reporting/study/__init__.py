"""The study as data: questions in YAML, runs in one table, and the pages that follow. Here to make it a package."""
