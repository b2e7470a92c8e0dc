"use strict";
// The treemap on the page: colors and zooming.

const colourings = {
  kind: { text: i => kinds[i] },
  dtype: { text: dtype },
  device: { text: device },
  use: { text: i => tensors.roles[tensors.role[i]] },
};
if (diff) colourings.difference = { text: state, fixed: STATE };
if (diff?.values) colourings.change = { text: changeOf, fixed: CHANGE_COLOURS };

// The colors of tiles: one for each of the largest groups, gray for the rest.
function paint() {
  const { text, fixed } = colourings[view.colour];
  const sums = new Map();
  for (const i of all) {
    if (view.within === null || isWithin(i)) sums.set(text(i), (sums.get(text(i)) ?? 0) + tensors[view.measure][i]);
  }
  const ordered = [...sums].filter(([, sum]) => sum).sort((a, b) => b[1] - a[1]);
  if (fixed) ordered.sort(([a], [b]) => Object.keys(fixed).indexOf(a) - Object.keys(fixed).indexOf(b));
  const shown = fixed ? ordered : ordered.slice(0, PALETTE.length);
  const colours = new Map(shown.map(([name], n) => [name, fixed?.[name] ?? PALETTE[n]]));
  const others = ordered.slice(shown.length).reduce((sum, [, value]) => sum + value, 0);
  const legend = shown.map(([name, value]) => [colours.get(name), name, value]);
  if (others) legend.push([GREY, count(ordered.length - shown.length, "other"), others]);
  return { of: tile => colours.get(text(tile.node.first)) ?? GREY, legend };
}

// Black or white, whichever is easier to read.
function ink(colour) {
  const [r, g, b] = [1, 3, 5].map(at => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return .2126 * r + .7152 * g + .0722 * b > .24 ? "#0d1116" : "#ffffff";
}

function drawMap() {
  const host = by("treemap");
  const { width, height } = host.getBoundingClientRect();
  const colours = paint();
  const tiles = tilesOf(view.node, view.measure, width, height, files[0].totals.unused_nbytes);
  host.replaceChildren(...tiles.map(tile => drawTile(tile, colours)));
  if (!tiles.length) host.append(element("p", { class: "empty" }, "nothing here has any"));
  crumbs();
  by("legend").replaceChildren(...colours.legend.map(([colour, name, value]) => {
    const item = element("span");
    item.append(dot(colour), name, element("i", { class: "dim" }, sized(value)));
    return item;
  }));
}

function drawTile(tile, colours) {
  const kind = tile.unused ? "unused" : tile.leaf ? "leaf" : "group";
  const made = element("button", { type: "button", class: `tile ${kind}`, "data-path": tile.rest ? "" : tile.node.path });
  const box = { left: tile.x, top: tile.y, width: Math.max(0, tile.w - 1), height: Math.max(0, tile.h - 1) };
  for (const [side, value] of Object.entries(box)) made.style[side] = `${value}px`;
  if (kind === "leaf") {
    const colour = tile.rest ? GREY : colours.of(tile);
    made.style.background = colour;
    made.style.color = ink(colour);
  }
  const label = tile.label || "(empty)";
  const value = sized(tile.value);
  if (tile.w > 26 && tile.h > 15) made.append(element("span", {}, tile.leaf ? label : `${label}  ${value}`));
  if (tile.leaf && tile.w > 44 && tile.h > 34) made.append(element("span", { class: "amount" }, value));
  made.setAttribute("aria-label", `${label}: ${value}`);
  made.addEventListener("click", () => enter(tile));
  made.addEventListener("pointermove", event => tip(event, tile));
  made.addEventListener("pointerleave", () => { by("tip").hidden = true; });
  return made;
}

function tip(event, tile) {
  const { node } = tile, own = tile.rest || tile.unused;
  const total = view.node[view.measure];
  const lines = [own ? tile.label : node.path];
  if (own) lines.push(sized(tile.value));
  else {
    lines.push(`${count(node.parameters, "parameter")}, ${bytes(node.nbytes)}, ${percent(tile.value / total)} of this view`);
    lines.push(node.row >= 0 && !node.children.length ? describe(node.row) : count(node.tensors, "tensor"));
    if (diff && node.row >= 0) lines.push(state(node.row));
  }
  const box = by("tip");
  box.replaceChildren(...lines.map((line, n) => element(n ? "div" : "strong", {}, line)));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  box.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}

function enter(tile) {
  by("tip").hidden = true;
  if (tile.rest || tile.unused) return;
  if (tile.node.row >= 0 && !tile.node.children.length) detail(tile.node.row);
  else go(tile.node);
}

function go(node) {
  view.node = node;
  view.within = node === tree ? null : node.path;
  drawMap();
  filter();
}

function crumbs() {
  const way = [];
  for (let node = view.node; node; node = node.parent) way.unshift(node);
  by("crumbs").replaceChildren(...way.flatMap((node, n) => {
    const name = node === tree ? "everything" : node.label;
    if (n === way.length - 1) return [element("strong", {}, name), `  ${sized(node[view.measure])}`];
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => go(node));
    return [button, " / "];
  }));
}

function choices() {
  for (const [measure, name] of [["nbytes", "bytes"], ["parameters", "parameters"]]) {
    const button = element("button", { type: "button", "aria-pressed": String(view.measure === measure) }, name);
    button.addEventListener("click", () => {
      view.measure = measure;
      for (const each of by("measure").children) each.setAttribute("aria-pressed", String(each === button));
      drawMap();
    });
    by("measure").append(button);
  }
  view.colour = diff?.values ? "change" : diff ? "difference" : "kind";
  for (const name of Object.keys(colourings)) by("colours").append(element("option", { value: name }, name));
  by("colours").value = view.colour;
  by("colours").addEventListener("change", event => { view.colour = event.target.value; drawMap(); });
  by("map").addEventListener("keydown", event => {
    if (event.key === "Escape" && view.node.parent) go(view.node.parent);
  });
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(drawMap); });
}
