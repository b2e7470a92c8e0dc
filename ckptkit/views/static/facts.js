"use strict";
// What the page tells, and how it is said. Every text of a file becomes text, never markup.

const facts = JSON.parse(document.getElementById("facts").textContent);
const { files, tensors, diff } = facts;
const all = tensors.name.map((_, i) => i);
const PALETTE = [
  "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#d4ac2b", "#9c755f", "#ff9da7", "#b5cf6b",
];
const GREY = "#8a939d";
const STATE = {
  same: "#6f7a86", missing: "#d64550", unexpected: "#f28e2b", mismatched: "#9467bd", renamed: "#3f83d6",
  changed: "#d4ac2b", "not compared": "#a9b0b8",
};
// Limits of relative changes, their names and colors; unchanged tensors stay gray.
const CHANGES = [
  [.001, "up to 0.1%", "#fbe3b5"], [.003, "up to 0.3%", "#fccb7e"], [.01, "up to 1%", "#fda95a"], [.03, "up to 3%", "#f67c43"],
  [.1, "up to 10%", "#e14b3b"], [.3, "up to 30%", "#b8234e"], [Infinity, "more than 30%", "#7a1058"],
];
const CHANGE_COLOURS = { ...STATE, ...Object.fromEntries(CHANGES.map(([, name, colour]) => [name, colour])) };
const state = i => diff.states[diff.state[i]];
const changeOf = i => {
  const relative = diff.other[i]?.relative;
  return state(i) !== "changed" || relative == null ? state(i) : CHANGES.find(([limit]) => relative <= limit)[1];
};
const full = i => tensors.place[i] ?? tensors.name[i];
const by = id => document.getElementById(id);
const nodes = treeOf(facts.treemap, tensors);
const tree = nodes[0];
const INDEX = /(?<![^.])\d+(?![^.])/g;
const kinds = all.map(i => full(i).replace(INDEX, "*"));  // layers.*.weight
const view = { node: tree, measure: "nbytes", colour: "", words: "", within: null, states: new Set() };

// Numbers for people

const whole = n => n.toLocaleString("en");
const count = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;
const percent = part => {
  if (!(part > 0)) return "";
  return part < .001 ? "<0.1%" : `${(100 * part).toFixed(part >= .1 ? 0 : 1)}%`;
};
const scaled = (n, units) => {
  let step = 0;
  for (; n >= 999.95 && step < units.length - 1; step++) n /= 1000;
  return step ? `${n.toFixed(1)}${units[step]}` : `${n}${units[0]}`;
};
const bytes = n => scaled(n, [" B", " kB", " MB", " GB", " TB", " PB"]);
const short = n => scaled(n, ["", " k", " M", " G", " T", " P"]);
const sized = n => view.measure === "nbytes" ? bytes(n) : short(n);
const three = n => {
  if (n == null) return "";
  if (Number.isInteger(n) && Math.abs(n) < 1e6) return whole(n);
  if (Math.abs(n) >= 1e-3 && Math.abs(n) < 1e6) return `${Number(n.toPrecision(3))}`;
  return n.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
};

const isWithin = i => full(i) === view.within || full(i).startsWith(`${view.within}.`);
const dtype = i => tensors.dtypes[tensors.dtype[i]];
const shape = i => tensors.shapes[tensors.shape[i]];
const device = i => tensors.devices[tensors.device[i]];
const describe = i => `${dtype(i)} ${shape(i)} on ${device(i)}`;

const quoted = text => /^[\w@%+=:,./-]+$/.test(text) && !text.startsWith("-") ? text : `'${text.replaceAll("'", `'"'"'`)}'`;

function command(text) {
  const line = element("div", { class: "command" });
  const code = element("code", {}, text);
  const button = element("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
    }
  });
  line.append(code, button);
  return line;
}

function dot(colour) {
  const made = element("i", { class: "dot" });
  made.style.background = colour;
  return made;
}
