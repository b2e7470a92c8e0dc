"use strict";
// A table of any length: only the rows that are in sight are in the page.

const ROW = 30, BEYOND = 12;

class TensorTable {
  // `columns`: [{name, width, number, text(i), value(i), cell(i)}], widths in pixels, the first gets what is left;
  // `open(i)` is called for a row that is clicked.
  constructor(host, columns, open) {
    this.host = host;
    this.columns = columns;
    this.open = open;
    this.rows = [];
    this.sorted = { column: null, down: false };
    const [first, ...others] = columns.map(column => column.width);
    host.style.setProperty("--columns", [`minmax(${first}px, 1fr)`, ...others.map(width => `${width}px`)].join(" "));
    const gaps = (columns.length - 1) * 14 + 28;
    host.style.setProperty("--width", `${columns.reduce((sum, column) => sum + column.width, gaps)}px`);
    this.head = host.appendChild(element("div", { class: "tr thead", role: "row" }));
    this.body = host.appendChild(element("div", { class: "tbody", role: "rowgroup" }));
    this.body.style.position = "relative";
    columns.forEach(column => this.head.append(this.header(column)));
    host.addEventListener("scroll", () => this.draw(), { passive: true });
    addEventListener("resize", () => this.draw());
    host.addEventListener("keydown", event => {
      if (event.key === "Enter" && event.target.dataset.row) this.open(Number(event.target.dataset.row));
    });
  }

  header(column) {
    const button = element("button", { type: "button", role: "columnheader" }, column.name);
    if (column.number) button.classList.add("number");
    button.addEventListener("click", () => this.sort(column));
    column.button = button;
    return button;
  }

  sort(column) {
    const { column: before, down } = this.sorted;
    if (before === column && down === !column.number) this.sorted = { column: null, down: false };
    else this.sorted = { column, down: before === column ? !down : Boolean(column.number) };
    this.show(this.found);
  }

  // Show these tensors, as sorted as was asked for.
  show(found) {
    this.found = found;
    this.rows = found;
    const { column, down } = this.sorted;
    for (const each of this.columns) {
      each.button.removeAttribute("aria-sort");
      each.button.textContent = each.name;
    }
    if (column) {
      column.button.setAttribute("aria-sort", down ? "descending" : "ascending");
      column.button.textContent = `${column.name} ${down ? "▾" : "▴"}`;
      const keys = new Map(found.map(i => [i, column.value(i)]));
      const sign = down ? -1 : 1;
      this.rows = [...found].sort((a, b) => order(keys.get(a), keys.get(b), sign) || a - b);
    }
    this.body.style.height = `${this.rows.length * ROW}px`;
    this.drawn = null;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.host.scrollTop / ROW) - BEYOND);
    const last = Math.min(this.rows.length, first + Math.ceil(this.host.clientHeight / ROW) + 2 * BEYOND);
    const drawn = `${first}:${last}`;
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const lines = [];
    for (let n = first; n < last; n++) lines.push(this.line(n));
    if (!this.rows.length) lines.push(element("div", { class: "empty" }, "no tensor is like that"));
    this.body.replaceChildren(...lines);
  }

  line(n) {
    const i = this.rows[n];
    const line = element("div", { class: "tr", role: "row", tabindex: "0", "data-row": i });
    line.style.top = `${n * ROW}px`;
    for (const column of this.columns) {
      const cell = element("span", { role: "cell" });
      if (column.number) cell.classList.add("number");
      if (column.mono) cell.classList.add("mono");
      if (column.cell) cell.append(...column.cell(i)); else cell.textContent = column.text(i);
      line.append(cell);
    }
    line.addEventListener("click", () => this.open(i));
    return line;
  }
}

// What is not there comes last, whichever way.
function order(a, b, sign) {
  if (a == null || b == null) return (a == null) - (b == null);
  return sign * (typeof a === "string" ? names.compare(a, b) : a - b);
}
const names = new Intl.Collator("en", { numeric: true });

function element(tag, attributes = {}, text) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// A histogram as SVG.
function picture(stats, width, height) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "bins");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "histogram");
  const most = Math.max(...stats.bins), step = width / stats.bins.length;
  stats.bins.forEach((count, n) => {
    if (!count) return;
    const high = Math.max(1, count / most * height);
    const bar = document.createElementNS(space, "rect");
    Object.entries({ x: n * step, y: height - high, width: step * .9, height: high })
      .forEach(([name, value]) => bar.setAttribute(name, value.toFixed(2)));
    svg.append(bar);
  });
  return svg;
}
