"use strict";
// The rest of the page, and all of it in order.

function heading() {
  document.title = `${files.map(file => file.name).join(" and ")} - ckptkit`;
  by("title").textContent = files.map(file => file.name).join("  ↔  ");
  by("subtitle").textContent = files.map(file => {
    const where = file.weights === null ? "no weights" : file.weights === "" ? "" : `weights at ${file.weights}`;
    return [file.format, bytes(file.size), where].filter(Boolean).join(", ");
  }).join("  ↔  ");
  const [ours, theirs] = files.map(cards);
  ours.forEach(([name, value, more], n) => {
    const card = element("div");
    card.append(element("dt", {}, name), element("dd", {}, value));
    const said = theirs ? `B: ${theirs[n][1]}` : more;
    if (said && said !== value) card.lastChild.append(element("small", {}, said));
    by("totals").append(card);
  });
  document.querySelector("footer").textContent = `Made by ckptkit ${facts.ckptkit}` +
    (tensors.valued ? "." : " from the headers alone: with --values it has statistics and histograms too.");
}

function cards({ totals, optimizer, tied }) {
  const found = [
    ["parameters", short(totals.parameters), whole(totals.parameters)],
    ["tensors", whole(totals.tensors), tied ? `${count(tied, "tie")}: stored once` : ""],
    ["bytes of tensors", bytes(totals.nbytes), whole(totals.nbytes)],
    ["bytes of storages", bytes(totals.storage_nbytes),
      totals.unused_nbytes ? `${bytes(totals.unused_nbytes)} in no tensor` : "all in use"],
  ];
  if (files.some(file => file.optimizer)) {
    found.push(["optimizer", percent(optimizer / totals.storage_nbytes) || "none", bytes(optimizer)]);
  }
  return found;
}

// What two files have in common is said once, with a command for each.
function diagnosis() {
  const host = by("diagnosis").querySelector("div"), found = new Map();
  for (const file of files) {
    for (const cause of [...file.causes, ...file.warnings.map(title => ({ level: "warning", title }))]) {
      const key = [cause.level, cause.title].join("\n");
      if (!found.has(key)) found.set(key, { ...cause, names: [], fixes: [] });
      found.get(key).names.push(file.name);
      if (cause.command) found.get(key).fixes.push(cause.command);
    }
  }
  for (const { level, title, explanation, names, fixes } of found.values()) {
    const cause = element("div", { class: `cause ${level}` });
    cause.append(element("span", { class: "kind" }, level), element("strong", {}, title));
    if (files.length > 1) cause.append(element("div", { class: "dim mono" }, names.join(", ")));
    if (explanation) cause.append(element("p", { class: "dim" }, explanation));
    cause.append(...fixes.map(command));
    host.append(cause);
  }
  by("diagnosis").hidden = !host.childElementCount;
  if (diff) by("others").before(by("diagnosis"));  // which are about each file, not about the difference
}

function shares() {
  const sides = [["dtype", "dtypes"], ["device", "devices"], ["role", "roles"]];
  for (const [column, table] of sides) {
    const sums = new Map();
    for (const i of all) {
      if (diff && state(i) === "missing") continue;
      const name = tensors[table][tensors[column][i]];
      sums.set(name, (sums.get(name) ?? 0) + tensors.nbytes[i]);
    }
    const unused = files[0].totals.unused_nbytes;
    if (column === "role" && unused) sums.set("in no tensor", unused);
    by("make").querySelector(".shares").append(stack({ dtype: "dtype", device: "device", role: "use" }[column], sums));
  }
  by("make").hidden = !all.length;
}

function stack(title, sums) {
  const box = element("div"), bar = element("div", { class: "stack" }), rows = element("div", { class: "rows" });
  const total = [...sums.values()].reduce((a, b) => a + b, 0) || 1;
  [...sums].sort((a, b) => b[1] - a[1]).forEach(([name, value], n) => {
    const colour = name === "in no tensor" ? GREY : PALETTE[n] ?? GREY;
    const part = element("div", { title: name });
    part.style.background = colour;
    part.style.flex = `${value / total} 0 0`;
    bar.append(part);
    const label = element("span");
    label.append(dot(colour), name);
    rows.append(label, element("span", {}, bytes(value)), element("span", {}, percent(value / total)));
  });
  box.append(element("h3", {}, title), bar, rows);
  return box;
}

function others() {
  const host = by("others").querySelector("div");
  for (const file of files) {
    for (const name of ["values", "objects", "metadata"]) {
      const { count: number, rows } = file[name];
      if (!number) continue;
      const box = element("details"), pairs = element("dl", { class: "pairs mono" });
      box.append(element("summary", {}, `${files.length > 1 ? `${file.name}: ` : ""}${name} (${whole(number)})`), pairs);
      for (const [key, value] of rows) pairs.append(element("dt", {}, key), element("dd", {}, value));
      if (number > rows.length) pairs.append(element("dt", {}, `and ${whole(number - rows.length)} more`), element("dd"));
      host.append(box);
    }
  }
  by("others").hidden = !host.childElementCount;
}

by("page").hidden = false;
heading();
diagnosis();
choices();
shares();
table = new TensorTable(by("table"), columns(), detail);
if (diff?.values) table.sorted = { column: table.columns.find(column => column.name === "difference"), down: true };
differences();
others();
searching();
drawMap();
filter();
