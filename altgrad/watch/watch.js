"use strict";
// The page's script. Everything that comes from files is put in as text, never as markup.

const COLORS = {
  bf16: ["#000000", "#ffffff"], E0M7: ["#999933"], E1M6: ["#E69F00"], E2M5: ["#AA4499"], E3M4: ["#0072B2", "#4aa8e0"],
  E4M3: ["#D55E00"], E5M2: ["#009E73"], E6M1: ["#56B4E9"], E7M0: ["#882255", "#cc6699"],
};
const RESERVE = ["#777777", "#6a5acd", "#CC6677", "#44AA99", "#b8860b", "#8b5a2b"];
const EVERY = 1000; // milliseconds between two questions; ten times that while nobody looks

const $ = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
let list = "", after = 0;
let cells = [], baseline = "", measure = { title: "", unit: "", higher: false }, standing = [], pace = {};
let hidden = new Set();
let lines = [], near = null; // what is drawn, and the cell under the pointer
let stale = false;

// --- what comes from the server ---------------------------------------------------------------------

async function ask() {
  let wait = document.hidden ? 10 * EVERY : EVERY;
  try {
    const answer = await fetch(`/events?list=${encodeURIComponent(list)}&after=${after}`);
    const found = await answer.json();
    problem(found.problem || "");
    if (found.events) take(found);
  } catch (error) {
    problem("The server does not answer. Start it again with make watch; this page goes on by itself.");
    wait = 3 * EVERY;
  }
  setTimeout(ask, wait);
}

function take(found) {
  if (found.list !== list) {
    list = found.list;
    cells = []; standing = [];
  }
  after = found.next;
  pace = found.pace;
  for (const [kind, ...values] of found.events) {
    if (kind === "grid") begin(values[0]);
    else if (kind === "rows") add(...values);
    else if (kind === "cell") Object.assign(cells[values[0]], { flags: [], changes: [], why: "", outcome: "", final: null }, values[1]);
    else if (kind === "standing") standing = values[0];
  }
  if (found.events.length) {
    draw();
    fillStanding();
    fillCells();
  }
  summarise();
}

function begin(grid) {
  ({ baseline, measure } = grid);
  for (const place of document.querySelectorAll(".measure")) place.textContent = measure.title;
  for (const place of document.querySelectorAll(".minus")) place.textContent = measure.higher ? "minus the baseline's" : "above the baseline";
  cells = grid.cells.map(([key, format, arm, seed, rate, steps]) => ({
    key, format, arm, seed, rate, steps, state: "waits", step: 0, rows: [], flags: [], changes: [], why: "", outcome: "", final: null,
  }));
  const byIdentity = new Map(cells.map((cell) => [identity(cell.format, cell), cell]));
  for (const cell of cells) cell.base = cell.format === baseline ? null : byIdentity.get(identity(baseline, cell));
  const arms = unique(cells.map((cell) => cell.arm));
  const chosen = $("arm").value;
  $("arm").replaceChildren(...["", ...arms].map((arm) => {
    const option = element("option", arm || "every arm");
    option.value = arm;
    return option;
  }));
  if (arms.includes(chosen)) $("arm").value = chosen;
  legend(unique(cells.map((cell) => cell.format)));
}

function identity(format, cell) {
  return JSON.stringify([format, cell.arm, cell.seed, cell.rate]);
}

function add(number, again, rows) {
  const cell = cells[number];
  if (again) cell.rows = [];
  cell.rows.push(...rows);
}

// --- the numbers ------------------------------------------------------------------------------------

const MEASURES = {
  val: (cell) => cell.rows.filter((row) => row[2] !== null).map((row) => [row[0], row[2]]),
  train: (cell) => cell.rows.filter((row) => row[1] !== null).map((row) => [row[0], row[1]]),
  norm: (cell) => cell.rows.filter((row) => row[3] !== null).map((row) => [row[0], row[3]]),
  difference(cell) {
    if (!cell.base) return [];
    const base = new Map(MEASURES.val(cell.base));
    return MEASURES.val(cell).filter(([step]) => base.has(step)).map(([step, loss]) => [step, loss - base.get(step)]);
  },
};

function lastOf(points) {
  return points.length ? points[points.length - 1][1] : null;
}

function aboveBaseline(cell) {
  if (cell.outcome && cell.base && cell.base.outcome) {
    return cell.final === null || cell.base.final === null ? null : cell.final - cell.base.final;
  }
  return lastOf(MEASURES.difference(cell));
}

// --- what is seen -----------------------------------------------------------------------------------

function summarise() {
  const count = (states) => cells.filter((cell) => states.includes(cell.state)).length;
  const trained = count(["trained", "diagnosed"]);
  const parts = [`${trained} of ${cells.length} cells trained`, `${count(["diagnosed"])} diagnosed`];
  for (const [state, said] of [["trains", "train now"], ["paused", "paused"], ["failed", "failed"]]) {
    if (count([state])) parts.push(`${count([state])} ${said}`);
  }
  const diverged = cells.filter((cell) => cell.outcome === "diverged").length;
  if (diverged) parts.push(`${diverged} diverged`);
  if (pace.steps_per_s) parts.push(`${pace.steps_per_s.toPrecision(3)} steps/s`, `about ${duration(pace.seconds_left)} left`);
  if (pace.seconds_left !== null && pace.price) {
    const spent = pace.elapsed === null ? "" : `${money(pace.elapsed)} spent, `;
    parts.push(`${spent}${money(pace.seconds_left)} to come`);
  }
  $("summary").textContent = parts.join(" · ");
  const all = cells.reduce((sum, cell) => sum + cell.steps, 0);
  const done = cells.reduce((sum, cell) => sum + (["trained", "diagnosed"].includes(cell.state) ? cell.steps : cell.step), 0);
  const share = all ? (100 * done) / all : 0;
  $("bar").firstElementChild.style.width = `${share}%`;
  $("bar").setAttribute("aria-valuenow", share.toFixed(0));
  document.title = `${trained}/${cells.length} AltGrad`;
}

function legend(formats) {
  const mode = dark.matches ? 1 : 0;
  const unknown = formats.filter((format) => !COLORS[base(format)]);
  for (const cell of cells) {
    const known = COLORS[base(cell.format)];
    cell.color = known ? known[Math.min(mode, known.length - 1)] : RESERVE[unknown.indexOf(cell.format) % RESERVE.length];
    cell.twin = cell.format !== base(cell.format);
  }
  $("legend").replaceChildren(...formats.map((format) => {
    const cell = cells.find((one) => one.format === format);
    const button = element("button", "");
    const mark = element("i", "");
    mark.style.background = cell.twin ? `repeating-linear-gradient(90deg, ${cell.color} 0 4px, transparent 4px 7px)` : cell.color;
    button.append(mark, format);
    button.type = "button";
    button.setAttribute("aria-pressed", String(!hidden.has(format)));
    button.addEventListener("click", () => {
      if (!hidden.delete(format)) hidden.add(format);
      button.setAttribute("aria-pressed", String(!hidden.has(format)));
      draw();
    });
    return button;
  }));
}

function base(format) {
  return format.slice(format.lastIndexOf(".") + 1);
}

function draw() {
  if (stale) return;
  stale = true;
  requestAnimationFrame(() => {
    stale = false;
    drawNow();
  });
}

function drawNow() {
  const canvas = $("chart"), shown = $("measure").value, arm = $("arm").value;
  const width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const paint = canvas.getContext("2d");
  paint.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--soft"), rule = style.getPropertyValue("--line");
  lines = cells
    .filter((cell) => !hidden.has(cell.format) && (!arm || cell.arm === arm))
    .map((cell) => ({ cell, points: MEASURES[shown](cell) }))
    .filter((line) => line.points.length);
  paint.font = "12px system-ui, sans-serif";
  if (!lines.length) {
    paint.fillStyle = ink;
    const why = shown === "difference" && cells.length ? `no cell yet beside one of ${baseline} with its arm, rate and seed` : "nothing yet";
    paint.fillText(why, 10, 20);
    $("under").textContent = "";
    return;
  }
  const box = { left: 58, right: width - 10, top: 8, bottom: height - 26 };
  const steps = Math.max(...lines.map(({ cell }) => cell.steps));
  let [low, high] = bounds(lines, shown);
  const x = (step) => box.left + (step / steps) * (box.right - box.left);
  const y = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
  paint.strokeStyle = rule;
  paint.fillStyle = ink;
  paint.lineWidth = 1;
  paint.textAlign = "right";
  for (const tick of ticks(low, high, 6)) {
    segment(paint, box.left, y(tick), box.right, y(tick));
    paint.fillText(tick === 0 ? "0" : String(Number(tick.toPrecision(6))).replace("-", "−"), box.left - 6, y(tick) + 4);
  }
  paint.textAlign = "center";
  for (const tick of ticks(0, steps, 6)) paint.fillText(String(tick), Math.min(x(tick), box.right - 12), box.bottom + 18);
  if (shown === "difference" && low < 0 && high > 0) {
    paint.strokeStyle = ink;
    segment(paint, box.left, y(0), box.right, y(0));
  }
  paint.save();
  paint.beginPath();
  paint.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
  paint.clip();
  const stands = lines.some(({ cell }) => cell === near);
  if (stands) lines.sort((a, b) => (a.cell === near) - (b.cell === near)); // the last is drawn above all others
  for (const line of lines) {
    paint.strokeStyle = paint.fillStyle = line.cell.color;
    paint.globalAlpha = stands ? (line.cell === near ? 1 : 0.12) : ["trained", "diagnosed"].includes(line.cell.state) ? 0.55 : 1;
    paint.lineWidth = line.cell === near ? 2.5 : line.cell.state === "trains" ? 2 : 1.2;
    paint.setLineDash(line.cell.twin ? [5, 3] : []);
    paint.beginPath();
    line.places = line.points.map(([step, value]) => [x(step), y(value)]);
    for (const [px, py] of line.places) paint.lineTo(px, py);
    paint.stroke();
    for (const [step] of line.cell.changes) {
      const i = line.points.findIndex((point) => point[0] >= step);
      if (i >= 0) segment(paint, line.places[i][0], line.places[i][1] - 7, line.places[i][0], line.places[i][1] + 7);
    }
    if (line.places.length === 1) paint.fillRect(line.places[0][0] - 2, line.places[0][1] - 2, 4, 4);
  }
  paint.restore();
  if (!$("under").textContent) $("under").textContent = "steps; dashed: without the format; a stroke across: another recipe. Point at a line to read it.";
}

// The first loss, that of an untrained model, would leave the rest of a curve a flat line.
function bounds(drawn, shown) {
  const late = drawn.flatMap(({ cell, points }) => points.filter(([step]) => shown === "difference" || step >= 0.1 * cell.steps));
  const values = (late.length ? late : drawn.flatMap(({ points }) => points)).map((point) => point[1]).sort((a, b) => a - b);
  const at = (share) => values[Math.round(share * (values.length - 1))];
  let low = at(0), high = shown === "difference" ? at(1) : at(0.995);
  if (shown === "difference") [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - margin, high + margin];
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const apart = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  const found = [];
  for (let i = Math.ceil(low / apart); i * apart <= high; i++) found.push(Number((i * apart).toPrecision(12)));
  return found;
}

function segment(paint, x0, y0, x1, y1) {
  paint.beginPath();
  paint.moveTo(x0, y0);
  paint.lineTo(x1, y1);
  paint.stroke();
}

function nearest(event) {
  const frame = $("chart").getBoundingClientRect();
  const px = event.clientX - frame.left, py = event.clientY - frame.top;
  let found = null, distance = 24 * 24;
  for (const { cell, points, places } of lines) {
    (places || []).forEach(([qx, qy], i) => {
      const here = (qx - px) ** 2 + (qy - py) ** 2;
      if (here < distance) [found, near, distance] = [`${cell.key}, step ${points[i][0]}: ${number(points[i][1], $("measure").value === "difference")}`, cell, here];
    });
  }
  if (found) $("under").textContent = found;
  else near = null;
  draw();
}

function fillStanding() {
  const table = $("comparison").querySelector("table");
  table.hidden = !standing.length;
  if (!standing.length) return;
  const rates = unique(cells.map((cell) => cell.rate)).length > 1;
  $("standing-note").textContent = `${measure.title}${measure.unit ? `, ${measure.unit}` : ""}, means over seeds${rates ? ", each arm at the best of its rates" : ""}; minus ${baseline}'s with the same arm and seeds. Intervals are each by itself; what they prove together is the report's to say.`;
  table.tBodies[0].replaceChildren(...standing.map((row) => tableRow([
    row.format, row.arm + (rates ? ` at ${row.lr_scale}` : ""), number(row.difference, true),
    row.low === null ? "" : `${number(row.low, true)} to ${number(row.high, true)}`, row.loss.toFixed(4), `${row.seeds} of ${row.planned}`,
  ], [2, 3, 4, 5])));
}

function fillCells() {
  const all = $("which").value === "all";
  const wanted = cells.filter((cell) => all || ["trains", "paused", "failed"].includes(cell.state) || cell.why || cell.outcome === "diverged" || cell.flags.length);
  const rank = { trains: 0, failed: 1, paused: 2 };
  if (!all) wanted.sort((a, b) => (rank[a.state] ?? 3) - (rank[b.state] ?? 3));
  $("cells").querySelector("tbody").replaceChildren(...wanted.map((cell) => {
    const state = cell.outcome === "diverged" ? `diverged at step ${cell.outcome_step} (${cell.signature})` : cell.state;
    const changed = cell.changes.map(([step, recipe]) => `${recipe} from step ${step}`);
    const row = tableRow([
      cell.key, state, `${cell.step} of ${cell.steps}`, number(aboveBaseline(cell), true),
      number(cell.outcome ? cell.final : lastOf(MEASURES.val(cell))), number(lastOf(MEASURES.train(cell))),
      cell.why || [...changed, ...flagged(cell)].join("; "),
    ], [2, 3, 4, 5]);
    if (cell.why) row.lastElementChild.className = "long";
    if (cell.state === "failed" || cell.why || cell.outcome === "diverged") row.children[1].className = "bad";
    return row;
  }));
  $("cells").querySelector("table").hidden = !wanted.length;
  $("cells-note").textContent = wanted.length ? "" : "None of them now.";
}

// A metric that several layers have a flag of is said once, with the least and the greatest value.
function flagged(cell) {
  return unique(cell.flags.map(([, metric]) => metric)).map((metric) => {
    const own = cell.flags.filter((flag) => flag[1] === metric), values = own.map(([, , value]) => value);
    const said = unique([Math.min(...values), Math.max(...values)]).map((value) => Number(value.toPrecision(2))).join(" to ");
    return `${metric} ${said}${own.length > 1 ? ` in ${own.length} layers` : own[0][0] ? ` in ${own[0][0]}` : ""}`;
  });
}

function tableRow(values, numeric) {
  const row = element("tr", "");
  row.append(...values.map((value, i) => {
    const cell = element("td", value);
    if (numeric.includes(i)) cell.className = "number";
    return cell;
  }));
  return row;
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function number(value, sign = false) {
  if (value === null || value === undefined) return "";
  const text = Math.abs(value).toFixed(4);
  return (Number(text) ? (value < 0 ? "−" : sign ? "+" : "") : "") + text;
}

function money(seconds) {
  return ((pace.price * seconds) / 3600).toFixed(2);
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function unique(values) {
  return [...new Set(values)];
}

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

$("measure").addEventListener("change", () => { $("under").textContent = ""; draw(); });
$("arm").addEventListener("change", draw);
$("which").addEventListener("change", fillCells);
$("chart").addEventListener("pointermove", nearest);
$("chart").addEventListener("pointerdown", nearest);
$("chart").addEventListener("pointerleave", () => { near = null; draw(); });
addEventListener("resize", draw);
dark.addEventListener("change", () => { legend(unique(cells.map((cell) => cell.format))); draw(); });
ask();
