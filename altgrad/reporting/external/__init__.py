"""The report for runs that something else has trained: a table of final losses, and what is asked of it."""
