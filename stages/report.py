"""Stage `report`: everything measured to reports/."""

import subprocess
from pathlib import Path

from altgrad.config import discard_finished, project_root, run_stage

NEXT = "dvc exp run -S 'grid.formats=[bf16,E5M2]' asks another question; reports/study/README.md keeps the answer"


def git_revision() -> str | None:
    """Return the short revision of HEAD, or None outside a git checkout."""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main(arguments: list[str]) -> None:
    from altgrad.reporting.report import write_report

    result = write_report(Path("data"), Path("reports"), git_revision())
    discard_finished(project_root())
    print(f"{result}\nreport: {Path('reports/index.html').resolve()}\nnext: {NEXT}")


if __name__ == "__main__":
    run_stage(main)
