"use strict";
// The page of all cells: one of them as its address says, and the list. Data goes in as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const cells = new Map(data.cells.map((cell) => [cell.key, cell]));
const place = document.getElementById("cell");

// What is compared: its place in a cell's results, what it is called, in full and in short, and its unit, which a loss
// alone has.
const [COMPARED, MEASURE, SHORT, UNIT] = data.measure;
const BY_STEP = UNIT ? `Validation loss (${UNIT}) by step` : `${SHORT} of validation documents by step`;

const NAMES = {
  test_micro_f1: "micro F1 of test documents", test_macro_f1: "macro F1", test_f1_rare: "F1 of rare labels",
  test_f1_common: "F1 of common labels", test_map: "mAP", test_ndcg_at_5: "nDCG@5", test_r_precision: "R-precision",
  val_loss: `final validation loss (${UNIT || "nats per label"})`, val_loss_best: "lowest validation loss", val_loss_best_step: "at step",
  train_loss: "training loss", perplexity: "perplexity", clipped_frac: "share of steps clipped", peak_lr: "peak learning rate",
  steps: "steps", tokens: "tokens", tokens_per_s: "tokens per second", tflops: "TFLOP/s of products",
  gpu_busy: "GPU at work (share of time)", step_ms_median: "median step (ms)",
  total_s: "seconds in all", peak_memory_mb: "peak memory (MB)", bytes_per_parameter: "bytes per parameter",
  signature: "signature", outcome_step: "ended at step",
  first_nonfinite: "first tensor that was not finite", first_rows: "rows of it", reason: "why it is missing",
};

function made(name, text = "", className = "") {
  const element = document.createElement(name);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

function baseOf(cell) {
  return data.baseline === null || cell.format === data.baseline ? undefined
    : data.cells.find((other) => other.format === data.baseline && ["optimizer", "seed", "lr_scale"].every((name) => other[name] === cell[name]));
}

function lossOf(cell) {
  return cell && cell.status === "completed" ? cell.results[COMPARED] : null;
}

function above(cell) {
  const own = lossOf(cell), base = lossOf(baseOf(cell));
  return own === null || base === null ? null : own - base;
}

function shown(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (Number.isInteger(value)) return String(value).replace("-", "−");
  const size = Math.abs(value);
  const text = size >= 1e-3 && size < 1e5 ? value.toFixed(size < 100 ? digits : 1) : value.toExponential(2);
  return text.replace(/-/g, "−");
}

function loss(value, sign = false) {
  return value === null ? "–" : ((sign && value >= 0 ? "+" : "") + value.toFixed(4)).replace("-", "−");
}

function table(heads, rows, numeric = []) {
  const box = made("div", "", "scroll"), found = document.createElement("table");
  const head = found.createTHead().insertRow(), body = found.createTBody();
  heads.forEach((text, i) => {
    const cell = made("th", text, numeric.includes(i) ? "number" : "");
    cell.scope = "col";
    head.append(cell);
  });
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((value, i) => line.append(made("td", value, numeric.includes(i) ? "number" : String(value).length > 24 ? "long" : "")));
  }
  box.append(found);
  return box;
}

function link(key) {
  const found = document.createElement("a");
  found.href = "#" + encodeURIComponent(key);
  found.append(made("code", key));
  return found;
}

// --- curves -----------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function drawn(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Lines are [name, colour, dashed, [[step, value], ...]].
function chart(title, lines) {
  const width = 460, height = 230, left = 52, right = 10, top = 22, bottom = 26;
  const points = lines.flatMap(([, , , line]) => line);
  const figure = made("figure"), svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  svg.append(drawn("text", { x: left, y: 13, "font-weight": 600 }, title));
  const last = Math.max(...points.map(([step]) => step), 1);
  const late = points.filter(([step]) => step >= 0.05 * last).map(([, value]) => value); // not the untrained model's
  const values = late.length ? late : points.map(([, value]) => value);
  let low = Math.min(...values), high = Math.max(...values);
  const rough = (high - low || Math.abs(high) || 1) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const apart = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
  [low, high] = [Math.floor(low / apart) * apart, Math.ceil(high / apart) * apart || apart];
  const x = (step) => left + (step / last) * (width - left - right);
  const y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
  for (let value = low; value <= high + apart / 2; value += apart) {
    svg.append(drawn("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: "var(--line)" }));
    svg.append(drawn("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, String(Number(value.toPrecision(6))).replace("-", "−")));
  }
  for (let i = 0; i <= 4; i++) {
    const step = Math.round((last * i) / 4);
    svg.append(drawn("text", { x: x(step), y: height - 8, "text-anchor": i === 4 ? "end" : "middle" }, String(step)));
  }
  for (const [name, color, dashed, whole] of lines) {
    const line = whole.filter(([, value]) => low <= value && value <= high);
    const path = line.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    const look = { fill: "none", stroke: color, "stroke-width": 1.8, "stroke-dasharray": dashed ? "5 3" : "none" };
    svg.append(drawn("polyline", { points: path, ...look }));
    svg.lastChild.append(drawn("title", {}, name));
    if (line.length < 30) for (const [step, value] of line) svg.append(drawn("circle", { cx: x(step), cy: y(value), r: 2.4, fill: color }));
  }
  figure.append(svg, made("figcaption", lines.map(([name]) => name).join("; ")));
  return figure;
}

function column(cell, index) {
  return cell.curve.filter((row) => row[index] !== null).map((row) => [row[0], row[index]]);
}

function curves(cell) {
  const base = baseOf(cell), box = made("div", "", "pair");
  const losses = [["blue: training", "#0072B2", false, column(cell, 1)]], validation = UNIT ? losses : [];
  validation.push(["orange: validation", "#D55E00", false, column(cell, 2)]);
  if (base && base.curve) validation.push([`dashed: validation of ${base.key}`, "#888888", true, column(base, 2)]);
  const norm = [["of all weights together, before clipping", "#009E73", false, column(cell, 3)]];
  const charts = UNIT ? [[`Loss (${UNIT}) by step`, losses]] : [["Loss by step", losses], [BY_STEP, validation]];
  for (const [title, lines] of [...charts, ["Gradient norm by step", norm]]) {
    const kept = lines.filter(([, , , line]) => line.length);
    if (kept.length) box.append(chart(title, kept));
  }
  return box;
}

// --- one cell ---------------------------------------------------------------------------------------

function show(key) {
  const cell = cells.get(key);
  place.replaceChildren();
  document.title = cell ? `${key} – AltGrad cells` : "AltGrad cells";
  if (!cell) {
    if (key) place.append(made("p", `The grid has no cell ${key}.`));
    return;
  }
  const heading = made("h2");
  heading.append(made("code", key));
  place.append(heading, made("p", `${cell.status}${cell.cause ? `: ${cell.cause}` : ""}${cell.reason ? `: ${cell.reason}` : ""}`));
  if (cell.results) {
    place.append(curves(cell));
    const rows = [...Object.entries(cell.outcome), ...Object.entries(cell.results)].map(([name, value]) => [NAMES[name] || name, shown(value)]);
    rows.splice(Object.keys(cell.outcome).length + 1, 0, [`above ${data.baseline}, same arm, rate and seed`, loss(above(cell), true)]);
    place.append(made("h3", "What became of it"), table(["what", "value"], rows, [1]));
  }
  place.append(made("h3", "Settings, without the defaults"), made("pre", cell.settings));
  if (cell.results) {
    if (cell.flags) place.append(made("h3", "Flags"), table(["what", "layer", "worst", "limit"], cell.flags, [2, 3]));
    const health = data.metrics.map(([, title, definition], i) => [title, shown(cell.summary[i]), definition]).filter(([, value]) => value !== "–");
    const measures = table(["metric", "value"], health.map((row) => row.slice(0, 2)), [1]);
    measures.querySelectorAll("td:first-child").forEach((name, i) => name.append(made("small", health[i][2])));
    if (health.length) place.append(made("h3", "What its diagnosis measured, over its layers"), measures);
  }
  prepare(place);
}

// --- several of them: #?format=E3M4&optimizer=adamw&optimizer=muon ----------------------------------

const rows = new Map();
const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#888888"];

function among(cell, wanted) {
  return [...wanted.keys()].every((name) => wanted.getAll(name).some((value) => String(cell[name]) === value || Number(cell[name]) === Number(value)));
}

function select(text) {
  const wanted = new URLSearchParams(text), chosen = data.cells.filter((cell) => among(cell, wanted));
  for (const cell of data.cells) rows.get(cell.key).classList.toggle("other", !chosen.includes(cell));
  if (!text) return;
  const title = [...new Set(wanted.keys())].map((name) => (name === "lr_scale" ? "lr × " : "") + wanted.getAll(name).join(", ")).join(", ");
  document.title = `${title} – AltGrad cells`;
  place.append(made("h2", title));
  const arms = [...new Set(chosen.map((cell) => [cell.format, cell.optimizer, cell.lr_scale].join("\n")))];
  const groups = arms.map((arm) => chosen.filter((cell) => [cell.format, cell.optimizer, cell.lr_scale].join("\n") === arm));
  const summaries = groups.map((group) => {
    const done = group.map(lossOf).filter((value) => value !== null);
    const mean = done.length ? done.reduce((a, b) => a + b, 0) / done.length : null;
    return [group[0].format, group[0].optimizer, loss(mean), `${done.length} of ${group.length}`, shown(group[0].lr_scale)];
  });
  if (groups.length) place.append(table(["format", "arm", `mean ${MEASURE}`, "cells completed", "rate"], summaries, [2, 3, 4]));
  else place.append(made("p", "The grid has no such cell."));
  const lines = groups.flatMap((group, i) => group.filter((cell) => cell.curve).map((cell) => [cell.key, COLORS[i % COLORS.length], i >= COLORS.length, column(cell, 2)]));
  if (lines.some(([, , , line]) => line.length) && lines.length <= 60) {
    const figure = chart(BY_STEP, lines);
    const colored = groups.map((group, i) => [group[0], i]).filter(([, i]) => i < COLORS.length);
    figure.querySelector("figcaption").replaceChildren(...colored.flatMap(([cell, i]) => {
      const name = made("strong", `${cell.format} ${cell.optimizer}`);
      name.style.color = COLORS[i];
      return [name, document.createTextNode(i + 1 < colored.length ? ", " : "; a line per cell")];
    }));
    const box = made("div", "", "pair");
    box.append(figure);
    place.append(box);
  }
  prepare(place);
}

function route() {
  const hash = location.hash.slice(1), several = hash.startsWith("?");
  document.getElementById("all").textContent = several ? "These cells" : "All cells";
  show(several ? "" : decodeURIComponent(hash));
  select(several ? hash.slice(1) : "");
}

for (const cell of data.cells) {
  const row = document.getElementById("list").insertRow();
  rows.set(cell.key, row);
  row.insertCell().append(link(cell.key));
  row.append(
    made("td", loss(above(cell), true), "number"), made("td", loss(lossOf(cell)), "number"), made("td", cell.status),
    made("td", cell.flags ? String(cell.flags.length) : "0", "number"),
  );
  const option = document.createElement("option");
  option.value = cell.key;
  document.getElementById("keys").append(option);
}
document.getElementById("wanted").addEventListener("change", (event) => {
  if (cells.has(event.target.value)) location.hash = encodeURIComponent(event.target.value);
});
addEventListener("hashchange", () => {
  route();
  scrollTo(0, 0);
});
route();
