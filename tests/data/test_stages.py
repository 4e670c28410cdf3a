"""The stages `tokenize` and `grid` on a corpus that is too small. Oracle: what the model of params.yaml needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from altgrad.common.files import read_json, read_yaml
from altgrad.config import UserError
from stages import grid, tokenize

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 100 texts of ten words, each twice, and the working directory."""
    for i in range(100):
        text = " ".join(f"{word}{i}" for word in "abcdefghij")
        for name in (f"{i}.txt", f"{i}.md"):
            (tmp_path / "data/corpus").mkdir(parents=True, exist_ok=True)
            (tmp_path / "data/corpus" / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settle(folder: Path, **changes: Any) -> None:
    """Write params.yaml with a grid of one cell and these changes."""
    params = read_yaml(ROOT / "params.yaml") | {"corpus": "local", "model": "pico"} | changes
    params["grid"] |= {"formats": ["bf16"], "optimizers": ["adamw"], "seeds": [0], "lr_scales": [1]}
    with open(folder / "params.yaml", "w") as file:
        YAML().dump(params, file)


def test_the_stage_says_how_many_copies_it_dropped(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settle(project)
    tokenize.main([])
    assert capsys.readouterr().out == "corpus local: 100 of 200 documents dropped, near copies of others\n"
    assert read_json(project / "data/tokens/meta.json")["near_copies"] == 100


def test_too_little_text_to_compare_on_is_said_before_training(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = read_yaml(ROOT / "params.yaml")["train"]
    settle(project, train=train | {"eval_sequences": 100_000_000})
    tokenize.main([])
    val = read_json(project / "data/tokens/meta.json")["splits"]["val"]
    capsys.readouterr()
    grid.main([])
    room = (val["tokens"] - 1) // 64
    assert val["documents"] < 30 and capsys.readouterr().out.splitlines() == [
        "1 cells",
        f"note: train.eval_sequences is 100000000, and the validation split has {room}: all are taken",
        (f"note: runs are compared on {room} sequences of 64 tokens, of {val['documents']} validation documents, "
         "fewer than 30: a difference there may be none elsewhere"),
    ]


def test_a_larger_context_is_refused_by_the_first_stage_that_knows_it(project: Path) -> None:
    settle(project, model="gpt-124m")
    with pytest.raises(UserError, match=r"too small.*100 near copies were dropped.*context \+ 1 = 1025"):
        tokenize.main([])
    with pytest.raises(UserError, match="meta.json does not exist"):
        grid.main([])
    settle(project)
    tokenize.main([])
    grid.main([])
    for later in ({"model": "gpt-124m"}, {"overrides": {"bf16": {"model": {"context": 1024}}}}):
        settle(project, **later)
        before = sorted((project / "data/grid").iterdir())
        with pytest.raises(UserError, match=r"corpus local is too small: .*context \+ 1 = 1025"):
            grid.main([])
        assert sorted((project / "data/grid").iterdir()) == before


def test_an_override_of_the_context_is_left_to_the_stage_that_resolves_it(project: Path) -> None:
    settle(project, model="gpt-124m", overrides={"bf16": {"model": {"context": 64}}})
    tokenize.main([])
    grid.main([])


def test_a_larger_model_tokenizes_nothing_again_but_is_checked() -> None:
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    assert stages["tokenize"]["params"] == [
        "task", "tasks.classify.min_documents", "tasks.classify.thresholds", "corpus", "corpora", "tokenizer",
    ]  # fmt: skip
    assert {"model", "models", "overrides"} <= set(stages["grid"]["params"])
    assert "data/tokens/meta.json" in stages["grid"]["deps"]
