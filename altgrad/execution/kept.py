"""The weights of a run that others start from, kept where no run is written: a copy in data/weights, by their hash."""

from __future__ import annotations

import shutil
from pathlib import Path

from altgrad.config import UserError
from altgrad.config.files import read_json, replacing, write_json
from altgrad.config.published import CONFIG, KEPT, RUNS, WEIGHTS, run_sizes, weights_sha256

SETTING = "start="


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
