"""Cells that classify. Oracles: scikit-learn on the scores that a run stored, and the definitions of pooling and loss.

The documents are made: the words of a document tell its labels.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn import metrics as oracle

from altgrad.common.files import read_json
from altgrad.config import Cell
from altgrad.config.models import CellModel, Model, ModelFrom, cell_model, weights_sha256
from altgrad.config.recipe import Recipe
from altgrad.config.tasks import ON_TEST, ON_VALIDATION, TITLES, Classifier
from altgrad.data import SPLITS, hashed_split
from altgrad.data.batches import task_of
from altgrad.data.labels import choose_thresholds, classification_metrics, read_labels
from altgrad.diagnostics.evaluated import AS_TRAINED, UNQUANTIZED, Evaluated, quantized
from altgrad.model import GPT, quantize_model, save_published
from altgrad.model.from_cell import build_model, config_of, recipe_of
from altgrad.model.gpt import GPTConfig
from altgrad.optim.checks import check_cells
from altgrad.training import train_cell
from tests.training.conftest import VOCABULARY, WORDS, diagnosed, make_cell

END = VOCABULARY - 1


def cell_of(format: str = "E4M3", **task: object) -> Cell:
    """Products are in float32 on every machine, so that scores can be computed again."""
    cell = make_cell(format, lr=2e-2, steps=40, batch=16, compute="float32")
    return cell.model_copy(update={"task": Classifier(**task)})


@pytest.fixture(scope="module")
def run(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    root = tmp_path_factory.mktemp("run")
    train_cell(cell_of(), documents, root / "out", root)
    return root / "out"


def by_the_oracle(truth: np.ndarray, scores: np.ndarray, thresholds: np.ndarray) -> dict[str, float]:
    """Return the metrics, R-precision from its definition: of each document's R best the share that is right."""
    some = truth.any(axis=1)
    rows = list(zip(truth[some], scores[some], strict=True))
    found = [own[np.argsort(-s, kind="stable")[: own.sum()]].mean() for own, s in rows]
    f1 = [oracle.f1_score(t, s) for t, s in zip(truth.T, (scores >= thresholds).T, strict=True)]
    by_frequency = [f1 for _, _, f1 in sorted(zip(truth.sum(axis=0), range(len(f1)), f1, strict=True))]
    rare, common = by_frequency[: len(f1) // 2], by_frequency[len(f1) // 2 :]
    return {
        "micro_f1": oracle.f1_score(truth, scores >= thresholds, average="micro"),
        "macro_f1": oracle.f1_score(truth, scores >= thresholds, average="macro"),
        "f1_rare": sum(rare) / len(rare),
        "f1_common": sum(common) / len(common),
        "map": np.mean([oracle.average_precision_score(t, s) for t, s in zip(truth.T, scores.T, strict=True)]),
        "ndcg_at_5": np.mean([oracle.ndcg_score([t], [s], k=5) for t, s in rows]),
        "r_precision": np.mean(found),
    }


def test_metrics_are_those_of_the_stored_scores(run: Path, documents: Path) -> None:
    stored = {name: t.numpy() for name, t in load_file(run / "scores.safetensors").items()}
    reported = read_json(run / "metrics.json")
    for split, columns in (("val", ON_VALIDATION), ("test", ON_TEST)):
        truth, scores = stored[f"{split}/truth"], stored[f"{split}/scores"]
        assert (truth == read_labels(documents, split, len(WORDS))).all() and scores.shape == truth.shape
        expected = by_the_oracle(truth, scores, stored["thresholds"])
        assert {name: reported[columns[name]] for name in TITLES} == pytest.approx(expected, rel=1e-9)
    assert reported["perplexity"] is None and 0 < reported["read_frac"] <= 1


def test_predictions_are_the_stored_scores_and_lead_back_to_the_documents(run: Path, documents: Path) -> None:
    rows = pd.read_json(documents.parent / "rows.jsonl", lines=True)
    stored = {name: t.numpy() for name, t in load_file(run / "scores.safetensors").items()}
    found = pd.read_csv(run / "predictions.csv", keep_default_na=False, dtype={f"score {name}": "f4" for name in WORDS})
    assert list(found) == ["split", "document", "true", "predicted", *(f"score {name}" for name in sorted(WORDS))]
    assert list(found.split) == [hashed_split(f"row {number}") for number in found.document]
    assert not found.document.duplicated().any()
    assert list(found.true) == [";".join(sorted(rows.labels[number])) for number in found.document]
    scores = np.concatenate([stored["val/scores"], stored["test/scores"]])
    assert (found.filter(like="score ").to_numpy() == scores).all()
    given = [np.array(sorted(WORDS))[row] for row in scores >= stored["thresholds"]]
    assert list(found.predicted) == [";".join(names) for names in given]


def test_a_documents_score_is_the_mean_logit_of_its_pieces(run: Path, documents: Path) -> None:
    cell = cell_of()
    task = task_of(cell, documents, "test")
    model = GPT(config_of(cell, task.vocab_size, task.labels))
    quantize_model(model, Recipe(rules=tuple(rule.with_formats({}) for rule in cell.rules)))
    model.load_state_dict(load_file(run / "model.safetensors"), strict=False)
    inputs, _, owner = task.pieces.sample()
    with torch.no_grad():
        logits = torch.cat([model.eval()(part) for part in inputs.split(cell.train.batch)]).double()
    means = torch.stack([logits[torch.from_numpy(owner == i)].mean(dim=0) for i in range(len(task.pieces.truth))])
    stored = load_file(run / "scores.safetensors")["test/scores"]
    assert torch.allclose(stored.double(), means, atol=1e-6)


@pytest.mark.parametrize("kind", ["one", "label"])
def test_thresholds_are_the_best_on_validation_documents(kind: str, run: Path) -> None:
    stored = load_file(run / "scores.safetensors")
    truth, scores = stored["val/truth"].numpy(), stored["val/scores"].numpy()
    chosen = choose_thresholds(truth, scores, kind)
    candidates = np.unique(scores)
    if kind == "one":  # as the run chose them, of these documents alone
        assert (stored["thresholds"].numpy() == chosen).all()
        best = max(oracle.f1_score(truth, scores >= c, average="micro") for c in candidates)
        assert classification_metrics(truth, scores, chosen)["micro_f1"] == pytest.approx(best)
    else:
        best = [max(oracle.f1_score(t, s >= c) for c in np.unique(s)) for t, s in zip(truth.T, scores.T, strict=True)]
        assert classification_metrics(truth, scores, chosen)["macro_f1"] == pytest.approx(np.mean(best))


def test_a_run_learns_and_is_diagnosed(run: Path, documents: Path, tmp_path: Path) -> None:
    history = (run / "history.csv").read_text().splitlines()
    assert history[0].split(",")[-len(TITLES) :] == list(ON_VALIDATION.values())
    losses = [float(line.split(",")[4]) for line in history[1:] if line.split(",")[4]]
    assert losses[0] == pytest.approx(math.log(2), rel=0.01) and losses[-1] < 0.95 * losses[0]
    found, _ = diagnosed(cell_of(), run, tmp_path, documents)
    assert found["status"] == "ok" and "head" in found["layers"] and found["summary"]["fisher_trace"] > 0


def test_a_classifier_quantized_afterwards_keeps_the_thresholds_of_the_unquantized_one(
    run: Path, documents: Path
) -> None:
    """Oracles: the run's own scores where it was trained so, and scikit-learn with thresholds chosen here."""
    cell = cell_of()
    found = quantized(cell, run, documents, ["E4M3", "E2M1"], metric="micro_f1")
    evaluated = Evaluated(cell, run, documents)
    plain, trained = Recipe(rules=()), recipe_of(cell)
    chosen = choose_thresholds(*evaluated.scores(evaluated.saved, plain, "val"), "one")
    truth, scores = evaluated.scores(evaluated.saved, trained, "test")
    assert (scores == load_file(run / "scores.safetensors")["test/scores"].numpy()).all()
    assert list(found) == [AS_TRAINED, UNQUANTIZED, "E4M3", "E2M1"]
    assert found[AS_TRAINED] == oracle.f1_score(truth, scores >= chosen, average="micro")
    truth, scores = evaluated.scores(evaluated.saved, plain, "test")
    assert found[UNQUANTIZED] == oracle.f1_score(truth, scores >= chosen, average="micro")
    loss = read_json(run / "metrics.json")["val_loss"]
    assert evaluated.loss(evaluated.saved, trained) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pooling_and_loss_are_as_defined_and_see_nothing_behind_the_end(pooling: str) -> None:
    torch.manual_seed(0)
    task = {"labels": (1.0, 3.0), "pooling": pooling, "end": END}
    model = GPT(GPTConfig(VOCABULARY, layers=2, width=16, heads=2, context=12, **task)).eval()
    tokens, targets = torch.randint(0, END, (4, 12)), torch.tensor([[0.0, 1], [1, 1], [1, 0], [0, 0]])
    lengths = [12, 1, 5, 11]
    seen = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = END
    logits = model(tokens)
    pooled = [x[:n].mean(dim=0) if pooling == "mean" else x[n - 1] for x, n in zip(seen[0], lengths, strict=True)]
    assert torch.allclose(logits, torch.stack(pooled) @ model.head.weight.T, atol=1e-6)
    p = logits.sigmoid()
    expected = -(targets * torch.tensor([1.0, 3.0]) * p.log() + (1 - targets) * (1 - p).log()).mean()
    assert torch.allclose(model(tokens, targets), expected, atol=1e-6)
    alone = torch.cat([model(row[None, :n]) for row, n in zip(tokens, lengths, strict=True)])
    assert torch.allclose(alone, logits, atol=1e-5)


@pytest.mark.parametrize("layout", ["published", "run"])
def test_a_classifier_starts_from_weights_and_a_head_of_its_own(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    language = GPT(GPTConfig(VOCABULARY + 20, layers=1, width=16, heads=2, context=16))  # padded, as published ones are
    if layout == "published":
        save_published(language, tmp_path)
        sizes = cell_model(ModelFrom.model_validate({"from": str(tmp_path)}))
    else:
        save_file(dict(language.named_parameters()), tmp_path / "model.safetensors")
        sizes = cell_model(Model(layers=1, width=16, heads=2, context=12), str(tmp_path))
    assert sizes["start"] == {
        "folder": str(tmp_path), "sha256": weights_sha256(tmp_path), "vocab_size": VOCABULARY + 20,
    }  # fmt: skip
    cell = cell_of().model_copy(update={"model": CellModel.model_validate(sizes)})
    check_cells([cell], VOCABULARY, "bf16")
    model = build_model(cell, VOCABULARY, torch.device("cpu"), (1.0, 1.0))
    for name, p in language.named_parameters():
        assert torch.equal(model.get_parameter(name), p[: cell.model.context] if "positions" in name else p), name
    assert model.head.weight.shape == (2, 16) and model.config.end == END


def test_class_weights_are_negatives_by_positives_of_training_documents(documents: Path) -> None:
    truth = read_labels(documents, "train", len(WORDS))
    weighed = task_of(cell_of(class_weights=True), documents, "train").labels
    assert weighed == pytest.approx((~truth).sum(axis=0) / truth.sum(axis=0))
    assert task_of(cell_of(), documents, "train").labels == (1.0,) * 3 and set(SPLITS) == {"train", "val", "test"}
