/**
 * The one table of the Console. Filter and sort are the server's and stand in the address; numbers are
 * right-aligned; a click on a row (or Enter) opens it; up and down move; on a phone rows become cards
 * that show the columns marked `card`.
 *
 *   table({ columns: [{ name, title, number, card, sort, kind, cell: (row) => markup }], rows, key, href, sort })
 *
 * `kind`: text (long words break), whole (in one line) or actions (buttons in one line).
 *
 * Nothing moves under the pointer: while it is over the rows of a list, they stay where they are and only
 * their values change. What came or went meanwhile is shown when the pointer leaves, or after an action.
 */
import { each, html } from "../html.js";

const arrow = (sort, name) => (sort === name ? "↑" : sort === `-${name}` ? "↓" : "");
const next = (sort, name, number) => {
  const first = number ? `-${name}` : name;
  const second = number ? name : `-${name}`;
  return sort === first ? second : first;
};

/** What aria-sort says of a column. */
const sorted = (sort, name) => ({ [name]: "ascending", [`-${name}`]: "descending" })[sort] ?? null;

const shownRows = new Map(); // caption -> the rows as they were drawn last
let held = null; // the caption of the list under the pointer

/** The rows in the order in which they stand under the pointer, with their new values. */
function steady(caption, rows, key) {
  if (held === caption && shownRows.has(caption)) {
    const now = new Map(rows.map((row) => [key(row), row]));
    return shownRows.get(caption).map((row) => now.get(key(row)) ?? row);
  }
  shownRows.set(caption, rows);
  return rows;
}

/** Show every list as it is: something was done, or another view is asked for. */
export function release() {
  held = null;
}

export function table({ columns, rows: given, key, href, sort = "", caption, empty = "" }) {
  if (!given.length) return html`<div class="empty">${empty}</div>`;
  const rows = steady(caption, given, key);
  const shown = columns.filter(Boolean);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="${caption}">
    <table class="list" data-list>
      <caption class="hidden">
        ${caption}
      </caption>
      <thead>
        <tr>
          ${shown.map(
            (column) =>
              html`<th
                scope="col"
                class="${column.number ? "number" : ""} ${column.card ? "card" : ""} ${column.kind ?? ""}"
                aria-sort="${sorted(sort, column.name)}"
              >
                ${
                  column.sort
                    ? html`<button
                        class="plain"
                        data-action="sort"
                        data-sort="${next(sort, column.name, column.number)}"
                      >
                        ${column.title} ${arrow(sort, column.name)}
                      </button>`
                    : (column.label ?? (column.title || html`<span class="hidden">Actions</span>`))
                }
              </th>`,
          )}
        </tr>
      </thead>
      <tbody>
        ${each(
          rows,
          key,
          (row) =>
            html`<tr data-key="${key(row)}" data-href="${href ? href(row) : null}" tabindex="${href ? 0 : null}">
              ${shown.map(
                (column) =>
                  html`<td
                    class="${column.number ? "number" : ""} ${column.card ? "card" : ""} ${column.kind ?? ""}"
                    data-title="${column.title}"
                  >
                    ${column.cell(row)}
                  </td>`,
              )}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** Keyboard, pointer and clicks for all tables below `root`. */
export function followRows(root, go) {
  root.addEventListener("pointermove", (event) => {
    const body = event.target instanceof Element ? event.target.closest("table[data-list] tbody") : null;
    held = body && event.pointerType === "mouse" ? body.parentElement.caption.textContent : null;
  });
  root.addEventListener("pointerleave", release);
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
    if (other) {
      event.preventDefault();
      other.focus();
    }
  });
}
