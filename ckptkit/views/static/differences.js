"use strict";
// How two files differ: by kind, and by layer.

const LAYERS = 40, BLOCKS = 200;

function differences() {
  if (!diff) return;
  const section = by("differences");
  section.hidden = false;
  const sums = new Map(diff.states.map(name => [name, 0]));
  all.forEach(i => sums.set(state(i), sums.get(state(i)) + 1));
  const differ = all.filter(i => !["same", "not compared"].includes(state(i)));
  section.querySelector("p").textContent = (differ.length || diff.entries.count ? "" : "None. ") +
    "A is the first file. Missing tensors are only in B, unexpected tensors only in A." +
    (diff.values ? "" : " Names, shapes and dtypes are compared; without --no-values the values too.") +
    (diff.uncompared.length ? ` Not compared: ${diff.uncompared.join("; ")}.` : "");
  for (const [name, number] of sums) if (number) section.querySelector(".chips").append(stateChip(name, number));
  diff.advice.forEach(text => section.querySelector(".advice").append(advice(text)));
  parts();
  layers(section);
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

// How far each block of the model moved, in the order of the file: a column each.
function parts() {
  const box = by("parts"), bars = box.querySelector(".columns"), { parts: found } = diff;
  const most = Math.max(0, ...found.map(part => part.relative ?? 0));
  box.hidden = !most;
  if (!most) return;
  const start = commonStart(found.map(part => part.label));
  const labeled = Math.max(1, Math.ceil(found.length * 15 / Math.max(1, innerWidth - 80)));
  bars.replaceChildren(...found.map(({ label, pattern, states, relative }, n) => {
    const column = element("button", { type: "button", title: `${label}: ${movedText(relative, states)}` });
    const bar = element("i", { class: relative === 0 ? "plain" : "moved" });
    bar.style.height = relative === 0 ? "2px" : `${Math.max(2, 100 * Math.min(1, (relative ?? most) / most))}%`;
    const space = element("span", { class: "space" });
    space.append(bar);
    column.append(space, element("span", { class: "name" }, n % labeled ? "" : label.slice(start.length) || label));
    column.addEventListener("click", () => look(pattern));
    return column;
  }));
  box.querySelector("p").textContent =
    `The height is the norm of the change divided by the norm in A, of the tensors that changed: at most ${part(most)}. Gray: unchanged.`;
}

// The dotted part with which all labels start, if there is one.
function commonStart(labels) {
  let start = labels[0];
  while (start && !labels.every(label => label.startsWith(start))) start = start.slice(0, start.slice(0, -1).lastIndexOf(".") + 1);
  return start === labels[0] ? "" : start;
}

const part = relative => `${three(100 * relative)}%`;

function movedText(relative, states) {
  if (relative === 0) return "unchanged";
  return relative === null ? states.changed ? "changed" : "" : part(relative);
}

// Layers whose names differ in numbers alone are one line; those that moved furthest come first.
function layers(section) {
  const found = diff.layers;
  const others = diff.states.filter(name => !["same", "changed", "not compared"].includes(name) && found.some(each => each.states[name]));
  const most = Math.max(0, ...found.map(each => each.relative ?? 0));
  const box = section.querySelector("table"), more = section.querySelector(".more");
  const head = element("tr");
  const heads = ["layer", ...(diff.values ? ["change", "", "by block", "changed"] : []), ...others];
  head.append(...heads.map(name => element("th", {}, name)));
  const line = ({ label, pattern, states, relative, blocks }) => {
    const made = element("tr", states.same && Object.keys(states).length === 1 ? { class: "dim" } : {});
    const name = element("button", { type: "button" }, label);
    name.addEventListener("click", () => look(pattern));
    const cells = [[name]];
    if (diff.values) {
      const bar = share(most ? (relative ?? most) / most : 0), all = (states.same ?? 0) + (states.changed ?? 0);
      const text = all ? movedText(relative, states) : "";
      cells.push([text], all && relative !== 0 ? [bar] : [], blocks.length <= BLOCKS && relative ? [spark(blocks)] : []);
      cells.push([all ? `${whole(states.changed ?? 0)} of ${whole(all)}` : ""]);
    }
    cells.push(...others.map(each => [states[each] ? whole(states[each]) : ""]));
    for (const content of cells) {
      const cell = element("td");
      cell.append(...content);
      made.append(cell);
    }
    return made;
  };
  section.querySelector(".scroll").hidden = !found.length;
  const draw = number => {
    box.replaceChildren(head, ...found.slice(0, number).map(line));
    more.hidden = found.length <= number;
    more.textContent = `${whole(found.length - number)} more layers`;
    more.onclick = () => draw(number * 5);
  };
  draw(LAYERS);
}

// The change of each block, in order, as small columns.
function spark(blocks) {
  if (!blocks.length) return "";
  const made = picture({ bins: blocks.map(([, relative]) => relative ?? 0) }, 150, 20);
  made.setAttribute("aria-label", "change of each block");
  const title = document.createElementNS(made.namespaceURI, "title");
  title.textContent = blocks.map(([name, relative]) => `${name}: ${relative === null ? "changed" : part(relative)}`).join("\n");
  made.append(title);
  return made;
}

function look(pattern) {
  view.words = by("search").value = pattern.startsWith(".") ? "" : pattern;
  view.node = tree;
  view.within = null;
  drawMap();
  filter();
  by("tensors").scrollIntoView();
}
