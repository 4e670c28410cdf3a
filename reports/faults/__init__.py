"""Stops, damaged files and full disks at chosen moments of `make repro`, and what came of each.

    campaign.stopped_at, damages.damaged -> campaign.Outcome -> reports/faults.md

A test that takes most of an hour, so it is a command, `make faults`, whose results are kept. test_faults.py has a part.
"""
