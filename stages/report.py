"""Stage `report`: write the report on all measurements to reports/."""

import os
import subprocess
from pathlib import Path

from altgrad.common.errors import run_stage
from altgrad.common.fingerprint import discard_finished, project_root


def git(*arguments: str) -> str | None:
    """Return the output of ``git ARGUMENTS``, stripped; None if git fails, as outside a checkout."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def experiments() -> list[str]:
    """Return the names of this commit's DVC experiments: first the one that runs now, if any, then newest first."""
    head = git("rev-parse", "HEAD") or ""
    own = f"refs/exps/{head[:2]}/{head[2:]}"
    saved = git("for-each-ref", "--sort=-creatordate", "--format=%(refname:lstrip=4)", own) or ""
    return list(dict.fromkeys([*os.environ.get("DVC_EXP_NAME", "").split(), *saved.split()]))


def main(arguments: list[str]) -> None:
    from altgrad.reporting.report import write_report

    revision = git("rev-parse", "--short=10", "HEAD")
    result, following = write_report(Path("data"), Path("reports"), revision, experiments())
    discard_finished(project_root())
    page, name = Path("reports/index.html").resolve(), os.environ.get("DVC_EXP_NAME")
    shown = f"dvc exp apply {name} brings it here" if name and ".dvc" in page.parts else page  # a copy that DVC removes
    print(f"{result}\nreport: {shown}\nnext: {following}")


if __name__ == "__main__":
    run_stage(main)
