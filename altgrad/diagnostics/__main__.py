"""``python -m altgrad.diagnostics``: every metric with its unit, definition and flag."""

from altgrad.diagnostics.registry import METRICS


def main() -> None:
    """Print the table of metrics."""
    for metric in METRICS:
        flag = f" Flagged {metric.limit}." if metric.limit else ""
        print(f"{metric.name} [{metric.unit}]\n    {metric.definition}{flag}")


if __name__ == "__main__":
    main()
