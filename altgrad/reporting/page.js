"use strict";
// What the report's page does beyond being read: tables sort and filter, figures enlarge. Without this it is complete.

function numberOf(text) {
  const found = text.replace(/\u2212/g, "-").match(/[-+]?\d[\d,]*\.?\d*(e[-+]?\d+)?/i);
  return found ? Number(found[0].replace(/,/g, "")) : NaN;
}

function sortable(table) {
  const body = table.tBodies[0], original = [...body.rows];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: "none" }[head.getAttribute("aria-sort")] || "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (next !== "none") head.setAttribute("aria-sort", next);
      body.append(...(next === "none" ? original : sorted(original, column, head.classList.contains("number"), next)));
    });
  });
}

function sorted(rows, column, numeric, direction) {
  const sign = direction === "ascending" ? 1 : -1;
  const keyed = rows.map((row) => [row, numeric ? numberOf(row.cells[column].textContent) : row.cells[column].textContent]);
  keyed.sort(([, a], [, b]) => {
    if (!numeric) return sign * a.localeCompare(b, "en", { numeric: true });
    return Number.isNaN(a) || Number.isNaN(b) ? Number.isNaN(a) - Number.isNaN(b) : sign * (a - b); // without one last
  });
  return keyed.map(([row]) => row);
}

function filterable(table) {
  const rows = [...table.tBodies[0].rows];
  const input = document.createElement("input");
  input.type = "search";
  input.className = "filter";
  input.placeholder = `filter ${rows.length} rows`;
  input.setAttribute("aria-label", "show only rows with these words");
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
  table.parentElement.before(input);
}

function enlargeable(image, dialog) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "enlarge";
  button.setAttribute("aria-label", `enlarge: ${image.alt}`);
  image.replaceWith(button);
  button.append(image);
  button.addEventListener("click", () => {
    const large = new Image();
    large.src = image.src;
    large.alt = image.alt;
    dialog.replaceChildren(large);
    dialog.showModal();
  });
}

function prepare(part) {
  for (const table of part.querySelectorAll("table:not([data-ready])")) {
    table.dataset.ready = "";
    sortable(table);
    if (table.tBodies[0].rows.length > 15) filterable(table);
  }
}

prepare(document.querySelector("main"));
const dialog = document.createElement("dialog");
dialog.addEventListener("click", () => dialog.close());
document.body.append(dialog);
for (const image of document.querySelectorAll(".figure img")) enlargeable(image, dialog);
