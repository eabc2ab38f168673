/**
 * Search for anything by a part of its name, from every page: press / and type. Up and down choose, Enter
 * opens, Escape closes. The broker searches: queues, groups, topics, routes, schedules, pipelines by name,
 * messages by their whole transaction id.
 */
import { get } from "../api.js";
import { each, html, render } from "../html.js";
import { visible } from "./json.js";

const PAUSE_MS = 120; // after the last key, before the broker is asked
const AGAIN_MS = 2000; // until it is asked again: what is searched may have been made just now

const host = () => document.getElementById("search");
let found = [];
let chosen = 0;
let words = "";
let asking = null;
let timer = 0;

function draw() {
  const results = words
    ? found.length
      ? each(
          found,
          (thing) => `${thing.kind} ${thing.path} ${thing.name}`,
          (thing, i) =>
            html`<li role="option" id="found-${i}" aria-selected="${i === chosen ? "true" : "false"}">
              <a href="#${thing.path}" tabindex="-1"
                ><span class="badge">${thing.kind}</span> <span>${visible(thing.name)}</span></a
              >
            </li>`,
        )
      : asking
        ? ""
        : html`<li class="none" role="option" aria-selected="false">No name contains this.</li>`
    : "";
  render(
    host(),
    html`<dialog class="search" aria-label="Search">
      <input
        type="search"
        role="combobox"
        aria-expanded="${found.length ? "true" : "false"}"
        aria-controls="found"
        aria-activedescendant="${found.length ? `found-${chosen}` : null}"
        aria-label="Search queues, topics, groups, routes, schedules, transaction ids"
        placeholder="Queues, topics, groups, routes, schedules, transaction ids"
        autocomplete="off"
        spellcheck="false"
      />
      <ul id="found" role="listbox" aria-label="Results">
        ${results}
      </ul>
    </dialog>`,
  );
}

async function ask(changed = true) {
  asking?.abort();
  asking = new AbortController();
  const mine = asking;
  try {
    const answer = words ? await get("/api/v1/search", { q: words }, mine.signal) : { found: [] };
    if (mine !== asking) return;
    found = answer.found;
    chosen = changed ? 0 : Math.min(chosen, Math.max(found.length - 1, 0));
  } catch (error) {
    if (error.name === "AbortError") return;
    found = [];
  }
  asking = null;
  draw();
  clearTimeout(timer);
  if (words) timer = setTimeout(ask, AGAIN_MS, false);
}

function close() {
  asking?.abort();
  clearTimeout(timer);
  host().querySelector("dialog")?.close();
  render(host(), "");
}

/** Open the search; `go(address)` opens what was chosen. */
export function openSearch(go) {
  [found, chosen, words] = [[], 0, ""];
  draw();
  const dialog = host().querySelector("dialog");
  const input = dialog.querySelector("input");
  const before = document.activeElement;
  dialog.showModal();
  dialog.addEventListener("close", () => before?.focus?.());
  dialog.addEventListener("cancel", (event) => {
    event.preventDefault();
    close();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog || event.target.closest("a")) close();
  });
  input.addEventListener("input", () => {
    words = input.value.trim();
    clearTimeout(timer);
    timer = setTimeout(ask, PAUSE_MS);
  });
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && found.length) {
      event.preventDefault();
      chosen = (chosen + step + found.length) % found.length;
      draw();
      dialog.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter" && found[chosen]) {
      const { path } = found[chosen];
      close();
      go(`#${path}`);
    }
  });
}
