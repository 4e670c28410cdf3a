"""Measures what a machine can do (``make bench``, on a GPU ``make gpu``), the most useful timings first.

A GPU is rented by the hour or lent for minutes. So nothing is installed, nothing needs a network, each result is
written at once, and nothing is measured twice.
"""
