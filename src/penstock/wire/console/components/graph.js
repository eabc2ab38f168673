/**
 * A directed graph as SVG: nodes in columns from left to right, lines between them.
 *
 *   graph([{ name, kind, title, inputs: [names] }], "What flows where")
 *
 * A node stands one column behind the last of its inputs; sinks stand in the last one.
 */
import { html, svg } from "../html.js";

const WIDTH = 190;
const HEIGHT = 46;
const GAP_X = 56;
const GAP_Y = 14;
const LONGEST = 26; // characters of a line of text

const cut = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);

/** The column of each node by its name. Inputs that nobody defines count as none. */
function columnsOf(nodes) {
  const known = new Map(nodes.map((node) => [node.name, node]));
  const columns = new Map();
  const column = (node, path) => {
    if (columns.has(node.name)) return columns.get(node.name);
    const inputs = node.inputs.map((name) => known.get(name)).filter((one) => one && !path.includes(one.name));
    const place = Math.max(-1, ...inputs.map((one) => column(one, [...path, node.name]))) + 1;
    columns.set(node.name, place);
    return place;
  };
  for (const node of nodes) column(node, []);
  const last = Math.max(0, ...columns.values());
  for (const node of nodes) if (node.kind === "sink") columns.set(node.name, Math.max(last, 1));
  return columns;
}

/** Where each node stands: the middle of its column, evenly. */
function placesOf(nodes) {
  const columns = columnsOf(nodes);
  const members = Map.groupBy(nodes, (node) => columns.get(node.name));
  const rows = Math.max(...[...members.values()].map((some) => some.length));
  const height = rows * (HEIGHT + GAP_Y) - GAP_Y;
  const places = new Map();
  for (const [column, some] of members) {
    const top = (height - some.length * (HEIGHT + GAP_Y) + GAP_Y) / 2;
    some.forEach((node, i) => {
      places.set(node.name, { x: column * (WIDTH + GAP_X), y: top + i * (HEIGHT + GAP_Y) });
    });
  }
  const width = (Math.max(...members.keys()) + 1) * (WIDTH + GAP_X) - GAP_X;
  return { places, width, height };
}

function edge(from, to) {
  const [x1, y1, x2, y2] = [from.x + WIDTH, from.y + HEIGHT / 2, to.x, to.y + HEIGHT / 2];
  const middle = (x1 + x2) / 2;
  return svg`<path class="edge" d="M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2 - 6} ${y2}" />
    <path class="tip" d="M${x2 - 7} ${y2 - 4}l7 4l-7 4z" />`;
}

function box(node, { x, y }) {
  const second = node.title && node.title !== node.name ? node.title : node.kind;
  return svg`<g class="node ${node.kind}" transform="translate(${x} ${y})">
    <title>${node.kind} ${node.name} ${node.title}</title>
    <rect width="${WIDTH}" height="${HEIGHT}" rx="6" />
    <text x="10" y="19" class="name">${cut(node.name)}</text>
    <text x="10" y="36">${cut(second)}</text>
  </g>`;
}

export function graph(nodes, label) {
  if (!nodes.length) return "";
  const { places, width, height } = placesOf(nodes);
  const edges = nodes.flatMap((node) =>
    node.inputs.filter((name) => places.has(name)).map((name) => edge(places.get(name), places.get(node.name))),
  );
  const words = nodes.map(
    (node) => `${node.kind} ${node.name}${node.inputs.length ? ` from ${node.inputs.join(", ")}` : ""}`,
  );
  return html`<div class="scroll graph" tabindex="0" role="region" aria-label="${label}">
    <svg
      viewBox="-2 -2 ${width + 4} ${height + 4}"
      width="${width + 4}"
      height="${height + 4}"
      role="img"
      aria-label="${label}: ${words.join("; ")}"
    >
      ${edges}${nodes.map((node) => box(node, places.get(node.name)))}
    </svg>
  </div>`;
}
