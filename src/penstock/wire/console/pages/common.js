/** Elements that several pages share. */
import { html } from "../html.js";
import { ago, count, duration, moment } from "../format.js";

export const QUEUE_MODE = "__QUEUE_MODE__";

/** The displayed name of a group; consumers without a group are in queue mode. */
export const groupName = (group) => (group && group !== QUEUE_MODE ? group : "queue mode");

/** A large figure with its name and a note below it. */
export const figure = (name, value, more = "") =>
  html`<div class="figure"><span>${name}</span><b>${value}</b>${more}</div>`;

/** The filter of a list; its text stands in the address. `words` are offered to complete it. */
export const filter = (query, what, name = "filter", words = null) =>
  html`<input
      class="grow"
      type="search"
      data-filter="${name}"
      value="${query[name] ?? ""}"
      placeholder="${what}${name === "filter" ? " ( f )" : ""}"
      aria-label="${what}"
      list="${words ? `words-${name}` : null}"
    />
    ${
      words
        ? html`<datalist id="words-${name}">
            ${[...new Set(words)].map((word) => html`<option value="${word}"></option>`)}
          </datalist>`
        : ""
    }`;

const STATES = {
  running: "good",
  active: "good",
  sending: "good",
  closed: "good",
  direct: "good",
  finished: "good",
  idle: "good",
  paused: "warn",
  draining: "warn",
  half_open: "warn",
  probing: "bad",
  waiting: "warn",
  starting: "warn",
  stopping: "warn",
  maintenance: "warn",
  growing: "",
  open: "bad",
  failing: "bad",
  failed: "bad",
  lost: "bad",
  denied: "bad",
  failover: "bad",
  stopped: "warn",
  blocked: "bad",
};

/** A state as a coloured word. */
export const badge = (state) =>
  html`<span class="badge ${STATES[state] ?? ""}">${state ? String(state).replace("_", "-") : "–"}</span>`;

/** Links to parts of a view; `list` has [name, label] of each. */
export const tabs = (list, current, href, label) =>
  html`<div class="tabs" role="navigation" aria-label="${label}">
    ${list.map(
      ([name, title]) =>
        html`<a class="badge" href="${href(name)}" aria-current="${name === current ? "page" : null}">${title}</a>`,
    )}
  </div>`;

/** The name of a queue or topic, with its namespace if that differs. */
export const named = (name, namespace) =>
  html`${name}${namespace && namespace !== name ? html` <small>${namespace}</small>` : ""}`;

/** Names and values, one under the other. */
export const pairs = (rows) =>
  html`<dl class="pairs">
    ${rows.filter(Boolean).map(
      ([name, value]) =>
        html`<dt>${name}</dt>
          <dd>${value}</dd>`,
    )}
  </dl>`;

/** Relative time with the absolute one on hover. */
export const since = (at) => html`<time title="${moment(at)}">${ago(at)}</time>`;

/** How long the oldest message has waited, or a dash; long waits are marked by colour and text. */
export const age = (seconds, long = 60) =>
  seconds === 0 ? "–" : seconds > long ? html`<span class="warn">${duration(seconds)}</span>` : duration(seconds);

/** A number that is marked as bad unless it is 0. */
export const bad = (value) => (value ? html`<span class="bad">${count(value)}</span>` : count(value));

/** The content of an empty list: a sentence and a command to copy. */
export const teach = (sentence, command) =>
  html`<p>${sentence}</p>
    <pre>${command}</pre>
    <p><button data-action="copy" data-text="${command}">Copy</button></p>`;

/** Links to the pages of a list, by offset. */
export function pager(query, total, shown, context) {
  const offset = Number(query.offset ?? 0);
  if (total <= shown && !offset) return html`<div class="pager">${count(total)} total</div>`;
  const limit = Number(query.limit ?? 50);
  return html`<div class="pager">
    ${count(offset + 1)} to ${count(offset + shown)} of ${count(total)}
    ${offset ? html`<a href="${context.withQuery({ offset: Math.max(0, offset - limit) || "" })}">← previous</a>` : ""}
    ${offset + shown < total ? html`<a href="${context.withQuery({ offset: offset + limit })}">next →</a>` : ""}
  </div>`;
}

/** A button that is disabled, with the reason, if the role does not allow the action. */
export function button(context, role, action, label, { danger = false, primary = false, data = {} } = {}) {
  const allowed = context.may(role);
  return html`<button
    data-action="${action}"
    class="${danger ? "danger" : primary ? "primary" : ""}"
    .dataset="${data}"
    ?disabled="${!allowed}"
    title="${allowed ? null : `Your role (${context.me?.role ?? "unknown"}) does not allow this.`}"
  >
    ${label}
  </button>`;
}
