"""The comparison of runs, from the pipeline's files: statistics, tables, figures, pages, and data for DVC's plots.

It needs neither torch nor a device, and a report takes seconds.
"""
