"""The comparison, from files to a page: statistics, tables, figures, and data for DVC's own plots.

Reads what the pipeline wrote and imports no package but ``altgrad.config``: a report takes seconds and
needs neither torch nor a device.
"""
