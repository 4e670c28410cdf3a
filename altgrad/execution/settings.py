"""Write settings such as ``grid.seeds=[0,1,2]`` into params.yaml after a check: all of them, or none.

The settings have Hydra's grammar and ruamel.yaml writes the file, both as for `dvc exp run -S`. Comments stay, and no
other line of a file that DVC wrote changes. A run to ``start`` from is copied to data/weights, where no run is written.
"""

import copy
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from altgrad.common.errors import UserError, did_you_mean
from altgrad.common.files import read_json, read_yaml, replacing, write_json
from altgrad.config.models import CONFIG, KEPT, OWN, RUNS, WEIGHTS, Model, run_sizes, weights_sha256

BETWEEN = re.compile(r"\s+(?=[+~]*[\w.-]+=)")  # two settings in one text
SETTING = "start="


def change_params(path: Path, settings: list[str]) -> None:
    """Write settings into the params.yaml ``path``; a text may hold several, such as ``model=micro grid.seeds=[0,1]``.

    ``name=value`` replaces a value, ``+name=value`` adds one, ``++name=value`` does either. Raises :class:`UserError`,
    and changes no byte, if a setting is not in Hydra's grammar, names nothing, or leads to a file that `grid` refuses.
    """
    given = [setting for text in settings for setting in BETWEEN.split(text.strip()) if setting]
    if not given:
        return
    content, yaml = _unshared(read_yaml(path)), YAML()
    document, before = yaml.load(path.read_bytes()), repr(content)
    error_prefix = "-S"
    try:
        for setting in given:
            error_prefix = f"-S: {setting}"
            override = _parsed(keep_start(setting, content))
            value, (*above, name) = override.value(), override.key_or_group.split(".")
            section = _section(content, above, override)
            if name not in section:
                _require_added(override, section, name, ".".join(above))
            elif override.type is OverrideType.ADD:
                raise UserError("it is there already; leave out the +")
            if name not in section or repr(section[name]) != repr(value):  # 3.0e-3 stays 3.0e-3
                section[name] = value
                _section(document, above, override)[name] = copy.deepcopy(value)
        if repr(content) == before:
            return
        error_prefix = "-S"
        with replacing(path) as temporary:
            written = ""
            with suppress(YAMLError, UserError):
                yaml.dump(document, temporary)
                written = repr(read_yaml(temporary))
            if written != repr(content):  # an anchor, or a text that YAML's writer spoils, such as ":0"
                raise UserError(f"{path} cannot hold it as DVC would write it; edit the file by hand")
            _check(temporary, path)
    except UserError as error:
        raise UserError(f"{error_prefix}: {error} ({path} is as it was)") from None


def _unshared(content: Any) -> Any:
    """Return a copy of ``content`` in which no two places share an object, as YAML's anchors make them do."""
    if isinstance(content, dict):
        return {name: _unshared(value) for name, value in content.items()}
    return [_unshared(value) for value in content] if isinstance(content, list) else content


def _check(path: Path, name: Path) -> None:
    """Raise :class:`UserError`, which calls the file ``name``, if stage `grid` in a new process refuses ``path``."""
    command = [sys.executable, "-m", "stages.grid", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sentence = done.stderr.strip().partition("error: ")[2] or f"stage grid failed: {done.stderr}"
        raise UserError(sentence.replace(str(path), str(name)))


def _parsed(setting: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(setting)
    except HydraException as error:
        raise UserError(f"expected NAME=VALUE, such as grid.seeds=[0,1]: {str(error).splitlines()[0]}") from None
    if override.type is OverrideType.DEL or override.package is not None or override.is_sweep_override():
        raise UserError("one setting has one value, a list is written in brackets, and only a name is before the =")
    return override


def _section(content: Any, above: list[str], override: Override) -> Any:
    """Return the section of ``content`` below the names ``above``; add it if ``override`` has a ``+``."""
    for depth, part in enumerate(above):
        if part not in content:
            _require_added(override, content, part, ".".join(above[:depth]))
        if content.get(part) is None:
            content[part] = {}
        content = content[part]
        if not isinstance(content, dict):
            raise UserError(f"{'.'.join(above[: depth + 1])} is a value and has no settings; give it as a whole")
    return content


def _require_added(override: Override, section: dict[str, Any], part: str, where: str) -> None:
    if override.type is OverrideType.CHANGE:
        hint = did_you_mean(part, section)
        raise UserError(f"{where or 'the file'} has no {part!r}, which a + before the name would add{hint}")


def keep_start(setting: str, params: dict[str, object]) -> str:
    """Copy the run of ``start=data/runs/KEY`` to data/weights; return the setting with the path of the copy.

    Any other setting is returned as it is. The copy's config.json has the model sizes of the run. If the run itself
    started from the ``start`` of ``params``, that ``start`` is returned without a copy: the same command may be given
    again. Raises :class:`UserError` for an unfinished run.
    """
    folder = Path(setting.removeprefix(SETTING))
    if not setting.startswith(SETTING) or folder.parent != RUNS:
        return setting
    if not (folder / "metrics.json").is_file():
        raise UserError(f"{folder} holds no finished run")
    now = params.get("start")
    began = read_json(folder / "metrics.json").get("start")
    if began is not None and isinstance(now, str) and weights_sha256(Path(now)) == began:
        return f"{SETTING}{now}"
    model = read_json(Path("data/grid") / f"{folder.name}.json")["model"]
    kept = KEPT / f"{folder.name}-{weights_sha256(folder)[:8]}"
    kept.mkdir(parents=True, exist_ok=True)
    with replacing(kept / WEIGHTS) as temporary:
        shutil.copyfile(folder / WEIGHTS, temporary)
    sizes = {name: model[name] for name in Model.model_fields if name not in ("dropout", "threads")}
    write_json(kept / CONFIG, {"model_type": OWN, **sizes, "vocab_size": run_sizes(folder)["vocab_size"]})
    print(f"{folder} is kept as {kept}, where start: points to")
    return f"{SETTING}{kept}"
