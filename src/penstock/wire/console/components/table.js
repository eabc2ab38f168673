/**
 * The one table of the Console. Filter and sort are the server's and stand in the address; numbers are
 * right-aligned; a click on a row (or Enter) opens it; up and down move; on a phone rows become cards
 * that show the columns marked `card`.
 *
 *   table({ columns: [{ name, title, number, card, sort, kind, cell: (row) => markup }], rows, key, href, sort })
 *
 * `kind`: text (long words break), whole (in one line) or actions (buttons in one line).
 */
import { html } from "../html.js";

const arrow = (sort, name) => (sort === name ? "↑" : sort === `-${name}` ? "↓" : "");
const next = (sort, name, number) => {
  const first = number ? `-${name}` : name;
  const second = number ? name : `-${name}`;
  return sort === first ? second : first;
};

export function table({ columns, rows, key, href, sort = "", caption, empty = "", select = null }) {
  if (!rows.length) return html`<div class="empty">${empty}</div>`;
  const shown = columns.filter(Boolean);
  return html`<div class="scroll"><table class="list" data-list><caption class="hidden">${caption}</caption><thead><tr>
    ${select ? html`<th class="select"><input type="checkbox" data-action="select-page" aria-label="Select all on this page"></th>` : ""}
    ${shown.map((column) => html`<th scope="col" class="${column.number ? "number" : ""} ${column.card ? "card" : ""}"
      ${sort && sort.replace("-", "") === column.name ? html`aria-sort="${sort.startsWith("-") ? "descending" : "ascending"}"` : ""}>
      ${column.sort ? html`<button class="plain" data-action="sort" data-sort="${next(sort, column.name, column.number)}"
        >${column.title} ${arrow(sort, column.name)}</button>` : column.title || html`<span class="hidden">Actions</span>`}</th>`)}
  </tr></thead><tbody>${rows.map((row) => html`<tr data-key="${key(row)}" ${href ? html`data-href="${href(row)}" tabindex="0"` : ""}>
    ${select ? html`<td class="select"><input type="checkbox" data-action="select" data-key-of="${key(row)}"
      aria-label="Select ${key(row)}" ${select.has(key(row)) ? html`checked` : ""}></td>` : ""}
    ${shown.map((column) => html`<td class="${column.number ? "number" : ""} ${column.card ? "card" : ""} ${column.kind ?? ""}"
      data-title="${column.title}">${column.cell(row)}</td>`)}
  </tr>`)}</tbody></table></div>`;
}

/** Keyboard and clicks for all tables below `root`. */
export function followRows(root, go) {
  root.addEventListener("click", (event) => {
    const target = event.target;
    if (!(target instanceof Element) || target.closest("a, button, input, select, textarea, summary")) return;
    const row = target.closest("tr[data-href]");
    if (row && !String(getSelection())) go(row.dataset.href);
  });
  root.addEventListener("keydown", (event) => {
    const row = event.target instanceof Element ? event.target.closest("tr[data-href]") : null;
    if (!row || event.target !== row) return;
    if (event.key === "Enter") go(row.dataset.href);
    const other = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
    if (other) { event.preventDefault(); other.focus(); }
  });
}
