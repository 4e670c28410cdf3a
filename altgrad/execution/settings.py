"""Settings such as ``grid.seeds=[0,1,2]`` go into params.yaml: checked, all or none, and no other line changes.

Their grammar is Hydra's, as that of `dvc exp run -S`. The file is edited as text, at the places that a parser found, so
that whatever else is in it stays as it was written. A run that others are to start from is copied to where no run is
written: to data/weights, by the hash of its weights.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node

from altgrad.config import UserError
from altgrad.config.errors import did_you_mean
from altgrad.config.files import read_json, read_yaml, replacing, write_json
from altgrad.config.published import CONFIG, KEPT, RUNS, WEIGHTS, run_sizes, weights_sha256

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
    content = _copied(read_yaml(path))
    given = [keep_start(setting, content) for setting in given]
    before = text = path.read_bytes().decode("utf-8")
    as_it_was = f"({path} is as it was)"
    by_hand = f"{path} is written in a way that cannot be changed in place; edit it by hand"
    for setting in given:
        try:
            text = _changed(text, content, _parsed(setting))
        except UserError as error:
            raise UserError(f"-S: {setting}: {error} {as_it_was}") from None
        except (YAMLError, StopIteration):  # an anchor or a merged mapping
            raise UserError(f"-S: {setting}: {by_hand} {as_it_was}") from None
    if text == before:
        return
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))
        try:
            _check(temporary)  # first: it has a sentence for nan, which equals nothing below
            if read_yaml(temporary) != content:
                raise UserError(by_hand)
        except UserError as error:
            raise UserError(f"-S: {str(error).replace(str(temporary), str(path))} {as_it_was}") from None


def _copied(content: Any) -> Any:
    """Return ``content`` with nothing in it twice, as what an anchor names is."""
    if isinstance(content, dict):
        return {name: _copied(value) for name, value in content.items()}
    return [_copied(value) for value in content] if isinstance(content, list) else content


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


def _changed(text: str, content: dict[str, Any], setting: Override) -> str:
    """Return ``text`` with ``setting``, and change ``content``, which is what ``text`` says, alike."""
    value, parts = setting.value(), setting.key_or_group.split(".")
    key, node, section, depth = None, YAML(typ="safe", pure=True).compose(text), content, 0
    while depth < len(parts) and isinstance(section, dict) and parts[depth] in section:
        key, node = next(pair for pair in node.value if pair[0].value == parts[depth])
        above, section, depth = section, section[parts[depth]], depth + 1

    if depth == len(parts):
        if setting.type is OverrideType.ADD:
            raise UserError("it is there already; leave out the +")
        if repr(section) == repr(value):  # 3.0e-3 stays 3.0e-3
            return text
        above[parts[-1]] = value
        return _replaced(text, key, node, value)
    where = ".".join(parts[:depth])
    if section is not None and not isinstance(section, dict):
        raise UserError(f"{where} is a value and has no settings; give it as a whole")
    if setting.type is OverrideType.CHANGE:
        hint = did_you_mean(parts[depth], section or ())
        raise UserError(f"{where or 'the file'} has no {parts[depth]!r}, which a + before the name would add{hint}")

    for part in reversed(parts[depth + 1 :]):
        value = {part: value}
    added = {parts[depth]: value}
    if not section:
        above[parts[depth - 1]] = added
        return _replaced(text, key, node, added)
    section |= added
    end = _end(text, node.value[-1][1])
    if node.flow_style:
        return f"{text[:end]}, {_flow(added)[1:-1]}{text[end:]}"
    newline, indent = "\r\n" if "\r\n" in text else "\n", " " * node.value[0][0].start_mark.column
    end += len(text[end:].partition("\n")[0].rstrip())
    return f"{text[:end]}{newline}{indent}{_flow(added)[1:-1]}{text[end:]}"


def _replaced(text: str, key: Node | None, node: Node, value: Any) -> str:
    """Return ``text`` with ``value`` in place of ``node``, the value of ``key``."""
    assert key is not None
    start, end = node.start_mark.index, _end(text, node)
    if start == node.end_mark.index:  # nothing, which a parser finds where the next thing begins
        start = text.index(":", key.end_mark.index) + 1
        return f"{text[:start]} {_flow(value)}{text[start:]}"
    if isinstance(node, CollectionNode) and not node.flow_style:  # the last line of a block may end in a comment
        end += len(text[end:].partition("\n")[0].rstrip())
    indent = " " * (key.start_mark.column + 2 - node.start_mark.column)  # lists may begin where their keys do
    return text[:start] + indent + _flow(value) + text[end:]


def _end(text: str, node: Node) -> int:
    """Return where ``node`` ends; what has lines of its own ends, as a parser has it, where the next thing begins."""
    if not isinstance(node, CollectionNode) or node.flow_style:
        return len(text[: node.end_mark.index].rstrip())
    return _end(text, node.value[-1][1] if isinstance(node, MappingNode) else node.value[-1])


def _flow(value: Any) -> str:
    yaml, stream = YAML(typ="safe", pure=True), StringIO()
    yaml.default_flow_style, yaml.width = True, sys.maxsize
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared by its default alone, None
    yaml.dump({"_": value}, stream)  # by itself, some values would end in a mark of the document's end
    text = stream.getvalue().strip().removeprefix("{_: ").removesuffix("}")
    with suppress(YAMLError):
        if [yaml.load(f"_: {text}"), yaml.load(f"_: {{_: {text}}}")] == [{"_": value}, {"_": {"_": value}}]:
            return text
    return json.dumps(value, ensure_ascii=False)  # which is YAML: its writer leaves ":0" bare, and its reader trips


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
