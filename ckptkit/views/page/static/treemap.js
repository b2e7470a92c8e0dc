"use strict";
// The tree of names, and its tiles: squarified (Bruls, Huizing, van Wijk 2000). No more of them than can be seen.

const LEVELS = 32, SMALL = 120, HEADER = 18, MOST_TILES = 2500;

function treeOf(tensors) {
  const root = branch("", "", null);
  for (let i = 0; i < tensors.name.length; i++) {
    const place = tensors.place[i] ?? tensors.name[i];
    let parts = place.split(".");
    if (parts.length > LEVELS) parts = [...parts.slice(0, LEVELS - 1), parts.slice(LEVELS - 1).join(".")];
    let node = root;
    add(node, tensors, i);
    parts.forEach((part, level) => {
      const last = level === parts.length - 1;
      while (last && node.children.get(part)?.row >= 0) part += "'";
      let child = node.children.get(part);
      if (!child) node.children.set(part, child = branch(part, node.path ? `${node.path}.${part}` : part, node));
      add(child, tensors, i);
      if (last) child.row = i;
      node = child;
    });
  }
  return root;
}

function branch(label, path, parent) {
  return { label, path, parent, children: new Map(), row: -1, first: -1, tensors: 0, parameters: 0, nbytes: 0 };
}

function add(node, tensors, i) {
  node.tensors++;
  node.parameters += tensors.parameters[i];
  node.nbytes += tensors.nbytes[i];
  if (node.first < 0) node.first = i;
}

// The descendant that replaces a node with a single child, and the names on the way.
function only(node) {
  let label = node.label;
  while (node.row < 0 && node.children.size === 1) {
    node = node.children.values().next().value;
    label = label ? `${label}.${node.label}` : node.label;
  }
  return { node, label };
}

// Rectangles [node, x, y, w, h] for nodes with a `value`, largest first, in proportion to it.
function squarify(nodes, x, y, w, h) {
  const found = [];
  let rest = nodes.reduce((sum, node) => sum + node.value, 0);
  for (let i = 0; i < nodes.length && rest > 0;) {
    const side = Math.min(w, h), scale = w * h / rest;
    let sum = 0, worst = Infinity, j = i;
    for (; j < nodes.length; j++) {
      const least = nodes[j].value * scale, most = nodes[i].value * scale, both = sum + least;
      const ratio = Math.max(side * side * most / (both * both), both * both / (side * side * least));
      if (ratio > worst) break;
      worst = ratio;
      sum = both;
    }
    const thick = side > 0 ? sum / side : 0;
    let at = 0;
    for (; i < j; i++) {
      const long = sum > 0 ? nodes[i].value * scale / sum * side : 0;
      found.push(w >= h ? [nodes[i], x, y + at, thick, long] : [nodes[i], x + at, y, long, thick]);
      at += long;
      rest -= nodes[i].value;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
  }
  return found;
}

// What is below a node as {node, label, value}, largest first; what would be too small for a look is one.
function pieces(parent, measure, area, extra = []) {
  const below = [...parent.children.values()].filter(node => node[measure] > 0)
    .map(node => ({ ...only(node), value: node[measure] }));
  if (parent.row >= 0 && parent.children.size) {
    const own = parent[measure] - below.reduce((sum, each) => sum + each.value, 0);
    if (own > 0) below.push({ node: { ...parent, children: new Map() }, label: parent.label, value: own });
  }
  below.push(...extra);
  below.sort((a, b) => b.value - a.value);
  const total = below.reduce((sum, each) => sum + each.value, 0);
  const cut = below.findIndex(each => each.value / total * area < SMALL);
  if (cut < 0 || cut === below.length - 1) return below;
  const rest = below.slice(cut);
  return [...below.slice(0, cut), {
    node: parent, label: `${rest.length.toLocaleString("en")} more`, rest: true,
    value: rest.reduce((sum, each) => sum + each.value, 0),
  }].sort((a, b) => b.value - a.value);
}

// All tiles of a node in a rectangle: {node, label, x, y, w, h, depth, leaf}, those above others before them.
function tilesOf(root, measure, width, height, extra) {
  const found = [];
  const waiting = [{ node: root, x: 0, y: 0, w: width, h: height, depth: 0, top: true }];
  while (waiting.length && found.length < MOST_TILES) {
    const { node, x, y, w, h, depth, top } = waiting.shift();
    for (const [piece, left, up, wide, high] of squarify(pieces(node, measure, w * h, top ? extra : []), x, y, w, h)) {
      const inner = !piece.rest && !piece.unused && piece.node.children.size > 0 && wide > 34 && high > 34;
      found.push({ ...piece, x: left, y: up, w: wide, h: high, depth, leaf: !inner });
      if (inner) {
        waiting.push({
          node: piece.node, x: left + 2, y: up + HEADER, w: wide - 4, h: high - HEADER - 2, depth: depth + 1,
        });
      }
    }
  }
  return found;
}
