/** The frame of every page: navigation, header, the list of keys, and the form for signing in. */
import { count, plural } from "./format.js";
import { html } from "./html.js";
import { live } from "./live.js";
import { hidden, problems } from "./components/problems.js";

// name, title, key after "g", figure of the live state
const NAVIGATION = [
  ["overview", "Overview", "o"],
  ["queues", "Queues", "q", "queues"],
  ["topics", "Topics", "t", "topics"],
  ["dead-letters", "Dead letters", "d", "deadLetters"],
  ["routes", "Routes", "r", "routes"],
  ["buffers", "Buffers", "b"],
  ["pipelines", "Pipelines", "p", "pipelines"],
  ["schedules", "Schedules", "c", "schedules"],
  ["system", "System", "s"],
];

/** The pages that "g" and a key open. */
export const GO = Object.fromEntries(NAVIGATION.map(([name, , key]) => [key, name]));

const KEYS = [
  ["/", "search everything"],
  ["f", "filter this list"],
  ["?", "show these keys"],
  ["↑ ↓ Enter", "move in a list, open a row"],
  ["Esc", "close, leave the filter"],
  ...NAVIGATION.map(([, title, key]) => [`g ${key}`, title.toLowerCase()]),
];

export const keys = () =>
  html`<dl class="keys">
    ${KEYS.map(
      ([key, what]) =>
        html`<dt><kbd>${key}</kbd></dt>
          <dd>${what}</dd>`,
    )}
  </dl>`;

const STATES = {
  live: "live",
  connecting: "connecting",
  paused: "paused",
  refused: "no access",
  away: "broker unreachable, retrying",
};

export function navigation() {
  const counts = live.now?.counts ?? {};
  const current = location.hash.split(/[/?]/)[1] || "overview";
  const link = ([name, title, , figure]) =>
    html`<li>
      <a href="#/${name}" aria-current="${name === current ? "page" : null}"
        >${title}${
          figure && counts[figure]
            ? html` <span class="badge ${figure === "deadLetters" ? "bad" : ""}">${count(counts[figure])}</span>`
            : ""
        }</a
      >
    </li>`;
  return html`<nav aria-label="Views">
    <a class="brand" href="#/overview"><img src="icon.svg" alt="" width="20" height="20" /> Penstock</a>
    <ul>
      ${NAVIGATION.map(link)}
    </ul>
  </nav>`;
}

const tool = (action, label, sign) =>
  html`<button class="plain" data-action="${action}" aria-label="${label}" title="${label}">${sign}</button>`;

export function header(crumbs, me) {
  const who = me?.authentication ? `${me.subject ?? "someone"} (${me.role.replace("_", " ")})` : "";
  const list = live.now?.problems;
  const quiet = hidden(list ?? []);
  return html`<header>
      <div class="crumbs">${crumbs}</div>
      ${
        quiet
          ? html`<button class="plain" data-action="show-acknowledged" title="Show the problems that were acknowledged">
              ! ${plural(quiet, "acknowledged problem")}
            </button>`
          : ""
      }
      <span class="state ${live.state}" title="since ${new Date(live.since).toLocaleString()}"
        >● ${STATES[live.state]}</span
      >
      ${tool("search", "Search ( / )", "⌕")}${tool("theme", "Light or dark", "☾")}${tool("keys", "Keys ( ? )", "?")}
      ${who ? html`<button class="plain" data-action="sign-out" title="Sign out">${who}</button>` : ""}
    </header>
    ${problems(list)}`;
}

export const signInForm = (problem) =>
  html`<main class="sign-in" id="main">
    <h1><img src="icon.svg" alt="" width="28" height="28" /> Penstock</h1>
    <form data-form="sign-in">
      <label>Token <input name="token" type="password" autocomplete="off" required autofocus /></label>
      <p class="problem" role="alert">${problem}</p>
      <button class="primary">Sign in</button>
      <p><small>This broker requires a token (JWT). It is kept in this tab only.</small></p>
    </form>
  </main>`;
