"use strict";
// How two files differ: by kind, and by layer.

const LAYERS = 40;

function differences() {
  if (!diff) return;
  const section = by("differences");
  section.hidden = false;
  const sums = new Map(diff.states.map(name => [name, 0]));
  all.forEach(i => sums.set(state(i), sums.get(state(i)) + 1));
  const differ = all.filter(i => !["same", "not compared"].includes(state(i)));
  section.querySelector("p").textContent = (differ.length || diff.entries.count ? "" : "None. ") +
    "A is the first file: what is missing is in B alone, what is unexpected in A alone." +
    (diff.values ? "" : " Names, shapes and dtypes are compared; with --values the values too.") +
    (diff.uncompared.length ? ` Not compared: ${diff.uncompared.join("; ")}.` : "");
  for (const [name, number] of sums) if (number) section.querySelector(".chips").append(stateChip(name, number));
  diff.advice.forEach(text => section.querySelector(".advice").append(advice(text)));
  layers(section, differ);
  entries();
}

// Values beside the tensors that differ.
function entries() {
  const { count, rows } = diff.entries, box = by("entries");
  box.hidden = !count;
  box.querySelector("h3").textContent = count > rows.length
    ? `Values that differ: the first ${whole(rows.length)} of ${whole(count)}` : "Values that differ";
  const line = (tag, cells) => {
    const made = element("tr");
    made.append(...cells.map(text => element(tag, {}, text)));
    return made;
  };
  box.querySelector("table").replaceChildren(line("th", ["path", "A", "B"]), ...rows.map(row => line("td", row)));
}

// A sentence that ends in a command.
function advice(text) {
  const at = text.indexOf(": ckptkit ");
  const box = element("div");
  box.append(element("p", {}, at < 0 ? text : text.slice(0, at + 1)));
  if (at >= 0) box.append(command(text.slice(at + 2)));
  return box;
}

function stateChip(name, number) {
  const chip = element("button", { type: "button", "aria-pressed": "false", "data-state": name });
  chip.append(dot(STATE[name]), `${name} ${whole(number)}`);
  chip.addEventListener("click", () => {
    if (!view.states.delete(name)) view.states.add(name);
    chip.setAttribute("aria-pressed", String(view.states.has(name)));
    filter();
  });
  return chip;
}

// Layers whose names differ in numbers alone are one line.
function layers(section, differ) {
  const found = new Map(), shown = diff.states.filter(name => differ.some(i => state(i) === name));
  for (const i of differ) {
    const layer = full(i).slice(0, Math.max(0, full(i).lastIndexOf("."))), kind = layer.replace(INDEX, "*");
    if (!found.has(kind)) found.set(kind, { names: new Set(), counts: Object.fromEntries(shown.map(name => [name, 0])) });
    found.get(kind).names.add(layer);
    found.get(kind).counts[state(i)]++;
  }
  const box = section.querySelector("table"), more = section.querySelector(".more");
  const head = element("tr");
  head.append(...["layer", ...shown].map(name => element("th", {}, name)));
  const lines = [...found].map(([kind, { names, counts }]) => () => {
    const line = element("tr"), cell = element("td"), name = element("button", { type: "button" }, spelled([...names]));
    name.addEventListener("click", () => look(`${kind}.*`));
    cell.append(name);
    line.append(cell, ...shown.map(each => element("td", {}, counts[each] ? whole(counts[each]) : "")));
    return line;
  });
  section.querySelector(".scroll").hidden = !lines.length;
  const draw = number => {
    box.replaceChildren(head, ...lines.slice(0, number).map(line => line()));
    more.hidden = lines.length <= number;
    more.textContent = `${whole(lines.length - number)} more layers`;
    more.onclick = () => draw(number * 5);
  };
  draw(LAYERS);
}

// layers.{0..11}.attn
function spelled(layers) {
  const numbers = layers.map(layer => layer.match(INDEX)?.map(Number) ?? []);
  let place = 0;
  return layers[0].replace(INDEX, () => {
    const values = [...new Set(numbers.map(each => each[place]))].sort((a, b) => a - b);
    place++;
    if (values.length === 1) return values[0];
    const runs = [];
    for (const value of values) {
      if (runs.length && runs.at(-1)[1] === value - 1) runs.at(-1)[1] = value;
      else runs.push([value, value]);
    }
    const texts = runs.slice(0, 8).map(([a, b]) => a === b ? a : `${a}..${b}`);
    return `{${texts.join(",")}${runs.length > 8 ? ",.." : ""}}`;
  }) || "(root)";
}

function look(pattern) {
  view.words = by("search").value = pattern.startsWith(".") ? "" : pattern;
  view.node = tree;
  view.within = null;
  drawMap();
  filter();
  by("tensors").scrollIntoView();
}
