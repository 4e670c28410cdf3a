"""The Ray cluster that RAY_ADDRESS names, and the project's code on its machines."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import socket
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from altgrad.common.errors import UserError

ANSWERS_WITHIN = 10.0  # seconds that the head of a cluster may take to accept a connection
CODE = ("altgrad", "stages")  # what is shipped: the package, and what runs a stage
PASSED_ON = ("ALTGRAD_CPU_BF16",)  # variables of this process that decide a cell's bits


def require_ray() -> None:
    """Raise :class:`UserError` where a connection cannot succeed, which Ray itself would try for minutes."""
    if find_spec("ray") is None:
        raise UserError("ENGINE=ray needs Ray: pip install 'altgrad[ray]'")
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        if address not in ("", "auto", "local"):
            raise UserError(f"RAY_ADDRESS is {address}; expected HOST:PORT, auto or local")
        return
    try:
        socket.create_connection((host, int(port)), ANSWERS_WITHIN).close()
    except (OSError, OverflowError):
        raise UserError(f"no Ray cluster answers at {address}, which RAY_ADDRESS names; is it up?") from None


def connected() -> ModuleType:
    """Return Ray, connected to the cluster. Raises :class:`UserError` where there is none."""
    import ray

    if not ray.is_initialized():
        variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment = {"working_dir": str(_code()), "env_vars": variables}
        try:
            ray.init(
                log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False, runtime_env=environment
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError) as error:
            address = os.environ.get("RAY_ADDRESS", "this machine")
            raise UserError(f"no Ray cluster answers at {address}: {str(error).splitlines()[0]}") from None
    return ray


def _code() -> Path:
    """Return a folder with the project's code and nothing else, which Ray ships to each machine once."""
    folder = Path(tempfile.mkdtemp(prefix="altgrad-code-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    package = Path(__file__).parents[1]
    unwanted = shutil.ignore_patterns("__pycache__", "*.md")
    for name, source in zip(CODE, (package, Path("stages")), strict=True):
        shutil.copytree(source, folder / name, ignore=unwanted)
    return folder
