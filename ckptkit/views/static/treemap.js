"use strict";
// The tree of names and its tiles. How tiles are arranged was computed before: this places them, and zooms.

const SMALL = 120, HEADER = 18, MOST_TILES = 2500;

// The branches as {number, label, path, parent, children, row, first, tensors, parameters, nbytes}, the root first.
function treeOf({ label, labels, parent, row }, tensors) {
  const nodes = [], ends = [];
  for (let number = 0; number < label.length; number++) {
    const above = nodes[parent[number]] ?? null, name = labels[label[number]];
    const path = above?.path ? `${above.path}.${name}` : name;
    const node = {
      number, label: name, path, parent: above, children: [], row: row[number],
      first: -1, tensors: 0, parameters: 0, nbytes: 0,
    };
    above?.children.push(node);
    if (node.row >= 0) ends[node.row] = node;
    nodes.push(node);
  }
  for (let i = 0; i < tensors.name.length; i++) {
    for (let node = ends[i]; node; node = node.parent) add(node, tensors, i);
  }
  return nodes;
}

function add(node, tensors, i) {
  node.tensors++;
  node.parameters += tensors.parameters[i];
  node.nbytes += tensors.nbytes[i];
  if (node.first < 0) node.first = i;
}

// A piece of a node as {node, label, value}: a branch, its own tensor, unused bytes, or small branches together.
function pieceOf(code, parent, measure, unused) {
  const more = rest => ({ node: parent, label: `${rest.toLocaleString("en")} more`, rest });
  if (code === -1) return { node: { ...parent, path: "", children: [] }, label: "in no tensor", value: unused, unused: true };
  if (code < 0) return { ...more(-code), value: null };
  const node = nodes[code];
  if (node !== parent) {
    return { node, label: node.path.slice(parent.path ? parent.path.length + 1 : 0), value: node[measure] };
  }
  const own = parent[measure] - parent.children.reduce((sum, child) => sum + child[measure], 0);
  return { node: { ...parent, children: [] }, label: parent.label, value: own };
}

// The strips of a node: [is it a column, its pieces], with the value of small ones from what is left.
function stripsOf(node, measure, unused) {
  const placed = (facts.treemap[measure] ?? facts.treemap.nbytes)[node.number] ?? [];
  const strips = placed.map(([column, ...codes]) => [column, codes.map(code => pieceOf(code, node, measure, unused))]);
  const pieces = strips.flatMap(([, found]) => found);
  const known = pieces.reduce((sum, piece) => sum + (piece.unused ? 0 : piece.value ?? 0), 0);
  for (const piece of pieces) piece.value ??= Math.max(0, node[measure] - known);
  return strips;
}

// The pieces of a node in a rectangle, as [piece, x, y, w, h]; what would be too small for a look is one.
function placed(node, measure, unused, x, y, w, h) {
  const found = [], strips = stripsOf(node, measure, unused);
  let left = strips.flatMap(([, pieces]) => pieces);
  let rest = left.reduce((sum, piece) => sum + piece.value, 0);
  for (const [column, pieces] of strips) {
    if (found.length && left.length > 1 && left[0].value / rest * w * h < SMALL) {
      const count = left.reduce((sum, piece) => sum + (piece.rest ?? 1), 0);
      found.push([{ node, label: `${count.toLocaleString("en")} more`, rest: count, value: rest }, x, y, w, h]);
      break;
    }
    const sum = pieces.reduce((total, piece) => total + piece.value, 0);
    const side = column ? h : w, thick = rest > 0 ? (column ? w : h) * sum / rest : 0;
    let at = 0;
    for (const piece of pieces) {
      const long = sum > 0 ? side * piece.value / sum : 0;
      found.push(column ? [piece, x, y + at, thick, long] : [piece, x + at, y, long, thick]);
      at += long;
    }
    if (column) { x += thick; w -= thick; } else { y += thick; h -= thick; }
    left = left.slice(pieces.length);
    rest -= sum;
  }
  return found;
}

// All tiles of a node in a rectangle: {node, label, x, y, w, h, depth, leaf}, those above others before them.
function tilesOf(root, measure, width, height, unused) {
  const found = [];
  const waiting = [{ node: root, x: 0, y: 0, w: width, h: height, depth: 0 }];
  while (waiting.length && found.length < MOST_TILES) {
    const { node, x, y, w, h, depth } = waiting.shift();
    for (const [piece, left, up, wide, high] of placed(node, measure, unused, x, y, w, h)) {
      const inner = !piece.rest && !piece.unused && piece.node.children.length > 0 && wide > 34 && high > 34;
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
