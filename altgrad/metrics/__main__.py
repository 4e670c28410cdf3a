"""``python -m altgrad.metrics``: every metric with its unit, definition and limit."""

from altgrad.metrics.table import METRICS


def main() -> None:
    """Print the table of metrics."""
    for metric in METRICS.values():
        print(f"{metric.name} [{metric.unit}]\n    {metric.text}")


if __name__ == "__main__":
    main()
