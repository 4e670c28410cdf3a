"""Settings such as ``grid.seeds=[0,1,2]`` go into params.yaml: checked, and all or none of them.

Their grammar is Hydra's and the file is written as DVC writes it, both as for `dvc exp run -S`: comments stay, and of a
file in DVC's form no other line changes. A run that others are to start from is copied to where no run is written: to
data/weights, by the hash of its weights.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from altgrad.common.errors import UserError, did_you_mean
from altgrad.common.files import read_json, read_yaml, replacing, write_json
from altgrad.config.models import CONFIG, KEPT, RUNS, WEIGHTS, run_sizes, weights_sha256

BETWEEN = re.compile(r"\s+(?=[+~]*[\w.-]+=)")  # two settings in one text
SETTING = "start="


def change_params(path: Path, settings: list[str]) -> None:
    """Write settings such as ``grid.seeds=[0,1,2]`` into ``path``, a params.yaml; a text may hold several.

    ``name=value`` replaces what is there, ``+name=value`` adds, ``++name=value`` does either. Raises :class:`UserError`
    for a setting that is not in Hydra's grammar or names nothing, and for whatever stage `grid` would refuse of the
    file then; no byte of it differs.
    """
    given = [setting for text in settings for setting in BETWEEN.split(text.strip()) if setting]
    if not given:
        return
    content, yaml = _copied(read_yaml(path)), YAML()
    document, before = yaml.load(path.read_bytes()), repr(content)
    as_it_was = f"({path} is as it was)"
    for setting in (keep_start(setting, content) for setting in given):
        try:
            _change(content, document, _parsed(setting))
        except UserError as error:
            raise UserError(f"-S: {setting}: {error} {as_it_was}") from None
    if repr(content) == before:
        return
    with replacing(path) as temporary:
        try:
            _write(yaml, document, temporary)
            _check(temporary)  # first: it has a sentence for nan, which equals nothing below
            if read_yaml(temporary) != content:  # an anchor, or a text that YAML's writer leaves bare, such as ":0"
                raise UserError(f"{path} cannot hold it as DVC would write it; edit the file by hand")
        except UserError as error:
            raise UserError(f"-S: {str(error).replace(str(temporary), str(path))} {as_it_was}") from None


def _copied(content: Any) -> Any:
    """Return ``content`` with nothing in it twice, as what an anchor names is."""
    if isinstance(content, dict):
        return {name: _copied(value) for name, value in content.items()}
    return [_copied(value) for value in content] if isinstance(content, list) else content


def _write(yaml: YAML, document: Any, path: Path) -> None:
    stream = StringIO()
    try:
        yaml.dump(document, stream)
    except YAMLError as error:
        raise UserError(str(error).splitlines()[0]) from None
    path.write_text(stream.getvalue(), encoding="utf-8")


def _check(path: Path) -> None:
    """Raise :class:`UserError` for what stage `grid` would refuse; a process of its own loads what that takes."""
    command = [sys.executable, "-m", "stages.grid", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(done.stderr.strip().partition("error: ")[2] or f"stage grid failed of it: {done.stderr}")


def _parsed(setting: str) -> Override:
    try:
        found = OverridesParser.create().parse_override(setting)
    except HydraException as error:
        raise UserError(f"expected NAME=VALUE, such as grid.seeds=[0,1]: {str(error).splitlines()[0]}") from None
    if found.type is OverrideType.DEL or found.package is not None or found.is_sweep_override():
        raise UserError("one setting has one value, a list is written in brackets, and only a name is before the =")
    return found


def _change(content: Any, document: Any, setting: Override) -> None:
    """Set one setting in ``content``, plain values, and in ``document``, the same file with comments and layout."""
    value, (*above, name) = setting.value(), setting.key_or_group.split(".")
    adds = setting.type is not OverrideType.CHANGE
    for depth, part in enumerate(above):
        where = ".".join(above[: depth + 1])
        if part not in content:
            _require_added(adds, content, part, ".".join(above[:depth]))
        if content.get(part) is None:
            content[part], document[part] = {}, {}
        content, document = content[part], document[part]
        if not isinstance(content, dict):
            raise UserError(f"{where} is a value and has no settings; give it as a whole")
    if name not in content:
        _require_added(adds, content, name, ".".join(above))
    elif setting.type is OverrideType.ADD:
        raise UserError("it is there already; leave out the +")
    if name not in content or repr(content[name]) != repr(value):  # 3.0e-3 stays 3.0e-3
        content[name], document[name] = value, _copied(value)


def _require_added(adds: bool, section: dict[str, Any], part: str, where: str) -> None:
    if not adds:
        hint = did_you_mean(part, section)
        raise UserError(f"{where or 'the file'} has no {part!r}, which a + before the name would add{hint}")


def keep_start(setting: str, params: dict[str, object]) -> str:
    """Return ``setting`` with a copy in place of a run in data/runs: ``start=data/runs/KEY``.

    The copy has the sizes that the run was resolved with. A run that has itself been trained from what ``params``
    start from stays out of it, so that the same command may be given again. Raises :class:`UserError` for a run that is
    not finished.
    """
    folder = Path(setting.removeprefix(SETTING))
    if not setting.startswith(SETTING) or folder.parent != RUNS:
        return setting
    if not (folder / "metrics.json").is_file():
        raise UserError(f"-S: {setting}: {folder} holds no finished run")
    now = params.get("start")
    began = read_json(folder / "metrics.json").get("start")
    if began is not None and isinstance(now, str) and weights_sha256(Path(now)) == began:
        return f"{SETTING}{now}"
    model = read_json(Path("data/grid") / f"{folder.name}.json")["model"]
    copy = KEPT / f"{folder.name}-{weights_sha256(folder)[:8]}"
    copy.mkdir(parents=True, exist_ok=True)
    with replacing(copy / WEIGHTS) as temporary:
        shutil.copyfile(folder / WEIGHTS, temporary)
    write_json(copy / CONFIG, {
        **{theirs: model[ours] for theirs, ours in (("n_layer", "layers"), ("n_head", "heads"), ("n_embd", "width"))},
        "n_inner": round(model["mlp_ratio"] * model["width"]), "bias": model["bias"],
        "activation_function": {"exact": "gelu", "tanh": "gelu_new"}[model["gelu"]],
        "n_positions": model["context"], "vocab_size": run_sizes(folder)["vocab_size"],
    })  # fmt: skip
    print(f"{folder} is kept as {copy}, where start: points to")
    return f"{SETTING}{copy}"
