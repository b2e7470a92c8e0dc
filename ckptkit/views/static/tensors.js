"use strict";
// The table of tensors: columns, search, and one tensor by itself.

const statistic = name => ({
  name, width: 66, number: true, value: i => tensors.stats[i]?.[name], text: i => three(tensors.stats[i]?.[name]),
});

const WIDTHS = { shape: 112, dtype: 72, device: 56 };  // of the columns of facts, in pixels

function columns() {
  const largest = tensors.nbytes.reduce((a, b) => Math.max(a, b), 1);
  const table = (name, column, values, width, mono) => ({
    name, width, mono, value: i => values[column[i]], text: i => values[column[i]],
  });
  const found = [
    {
      name: "name", width: 210, mono: true,
      value: i => tensors.name[i], cell: i => [tensors.name[i], ...marks(i)],
    },
    ...Object.entries(tensors.facts).filter(([name]) => name !== "device" || tensors.devices.length > 1)
      .map(([name, title]) => table(title, tensors[name], tensors[`${name}s`], WIDTHS[name] ?? 90, name === "shape")),
    {
      name: "parameters", width: 96, number: true,
      value: i => tensors.parameters[i], text: i => whole(tensors.parameters[i]),
    },
    { name: "size", width: 72, number: true, value: i => tensors.stored[i], text: i => bytes(tensors.stored[i]) },
    { name: "share", width: 84, value: i => -tensors.nbytes[i], cell: i => [share(tensors.nbytes[i] / largest)] },
  ];
  found.find(column => column.name === "shape").value = i => tensors.stored[i];
  if (diff) {
    const cell = i => {
      const relative = diff.other[i]?.relative;
      return [relative == null ? state(i) : part(relative), dot(CHANGE_COLOURS[changeOf(i)])];
    };
    found.splice(1, 0, { name: "difference", width: 104, number: true, value: distance, cell });
    if (diff.values) found.splice(2, 0, other("largest", "largest Δ"));
  }
  if (!tensors.valued) return found;
  found.pop();
  if (diff) found.splice(found.findIndex(column => column.name === "parameters"), 1);
  if (diff) found.push(statistic("norm"), other("norm", "norm B"));
  else found.push(...["mean", "std", "min", "max", "norm"].map(name => statistic(name)));
  found.push({
    name: "histogram", width: 84, value: i => tensors.stats[i]?.std,
    cell: i => tensors.stats[i]?.bins ? [picture(tensors.stats[i], 84, 22)] : [],
  });
  return found;
}

// For sorting: other differences above those of values, of which some have no number.
function distance(i) {
  if (state(i) === "changed") return diff.other[i]?.relative ?? Number.MAX_VALUE / 4;
  return { same: -1, "not compared": -2 }[state(i)] ?? Number.MAX_VALUE;
}

const other = (name, title, text = three) => ({
  name: title, width: 70, number: true, value: i => diff.other[i]?.[name],
  text: i => diff.other[i]?.[name] == null ? "" : text(diff.other[i][name]),
});

function share(part) {
  const bar = element("i", { class: "share" });
  bar.style.width = `${100 * Math.min(1, part)}%`;
  return bar;
}

function marks(i) {
  const said = [];
  const there = diff?.other[i];
  if (there?.name) said.push(`→ ${there.name}`);
  if (there?.shape) said.push(`B: ${there.dtype} ${there.shape}`);
  if (there?.changed < tensors.parameters[i]) said.push(`${count(there.changed, "value")} changed`);
  if (tensors.same[i] !== undefined) said.push(`= ${tensors.name[tensors.same[i]]}`);
  else if (tensors.remark[i]) said.push(tensors.remark[i]);
  const odd = tensors.stats[i];
  if (odd?.nan || odd?.inf) said.push(`${whole(odd.nan)} NaN, ${whole(odd.inf)} inf`);
  return said.map(text => element("span", { class: "mark" }, text));
}

// Words that all must be in name, shape, dtype or device; with a star, a pattern of the name.
function matcher(words) {
  const tests = words.toLowerCase().split(/\s+/).filter(Boolean).map(word => {
    if (!word.includes("*")) return text => text.includes(word);
    const pattern = new RegExp(word.split("*").map(part => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*"));
    return text => pattern.test(text);
  });
  return i => {
    const text = [full(i), shape(i), dtype(i), device(i), diff ? state(i) : ""].join(" ").toLowerCase();
    return tests.every(test => test(text));
  };
}

let table;
function filter() {
  const matches = matcher(view.words), { within, states } = view;
  const found = all.filter(i => (within === null || isWithin(i)) && (!states.size || states.has(state(i))) && matches(i));
  const parameters = found.reduce((sum, i) => sum + tensors.parameters[i], 0);
  const size = found.reduce((sum, i) => sum + tensors.nbytes[i], 0);
  const part = found.length === all.length ? "" : `${whole(found.length)} of `;
  by("found").textContent = `${part}${count(all.length, "tensor")}, ${count(parameters, "parameter")}, ${bytes(size)}`;
  const chip = by("within");
  chip.hidden = within === null;
  if (within !== null) {
    const clear = element("button", { type: "button", "aria-label": "show all" }, "×");
    clear.addEventListener("click", () => go(tree));
    chip.replaceChildren(`in ${within}`, clear);
  }
  by("table").scrollTop = 0;
  table.show(found);
}

function searching() {
  let waiting = 0;
  by("search").addEventListener("input", event => {
    view.words = event.target.value;
    clearTimeout(waiting);
    waiting = setTimeout(filter, all.length > 5000 ? 120 : 0);
  });
}

function detail(i) {
  const box = by("detail"), stats = tensors.stats[i], there = diff?.other[i];
  const close = element("button", { type: "button", class: "close", "aria-label": "close" }, "×");
  close.addEventListener("click", () => box.close());
  const pairs = element("dl", { class: "pairs" });
  const say = (name, value) => {
    if (value || value === 0) pairs.append(element("dt", {}, name), element("dd", {}, value));
  };
  say("place", tensors.place[i]);
  for (const [name, title] of Object.entries(tensors.facts)) say(title, tensors[`${name}s`][tensors[name][i]]);
  const of = percent(tensors.nbytes[i] / (files[0].totals.nbytes || 1)) || "none";
  say("size", `${bytes(tensors.stored[i])}, ${of} of all bytes`);
  say("is the same as", tensors.same[i] !== undefined ? tensors.name[tensors.same[i]] : "");
  say("note", tensors.remark[i]);
  if (diff) say("difference", state(i));
  if (there?.name) say("name in B", `${there.name} (${there.why}, ${percent(there.confidence)} sure)`);
  if (there?.shape) say("in B", `${there.dtype} ${there.shape}`);
  if (there?.changed) say("values changed", `${whole(there.changed)}, by up to ${three(there.largest)}`);
  say("|d|/|a|", three(there?.relative));
  say("cosine", there?.cosine == null ? "" : there.cosine.toFixed(6));
  if (there?.norm != null) say("norm in A and B", `${three(stats?.norm)} and ${three(there.norm)}`);
  if (stats) {
    for (const name of ["mean", "std", "min", "max", "norm"]) say(name, three(stats[name]));
    for (const name of ["zeros", "nan", "inf"]) if (stats[name]) say(name, `${whole(stats[name])} of ${whole(stats.count)}`);
  }
  const parts = [close, element("h3", { class: "mono" }, tensors.name[i]), pairs];
  if (stats?.bins) {
    const most = count(Math.max(...stats.bins), "value");
    const axis = `${three(stats.from)} to ${three(stats.to)}, up to ${most} in a bin`;
    parts.push(picture(stats, 640, 130), element("div", { class: "dim" }, axis));
  }
  const file = diff && state(i) === "missing" ? files[1] : files[0];
  parts.push(command(`ckptkit show ${quoted(file.name)} ${quoted(tensors.name[i])}`));
  box.replaceChildren(...parts);
  box.showModal();
}
