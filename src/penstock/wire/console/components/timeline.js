/** The history of a message: its events, oldest first, each with its cause. */
import { html } from "../html.js";
import { clock, moment, plural, when } from "../format.js";
import { visible } from "./json.js";

const KINDS = {
  "dead letter": "bad",
  failed: "bad",
  waiting: "note",
  trace: "note",
  leased: "note",
  retry: "warn",
  requeued: "warn",
};
const TITLES = { leased: "leased, not acknowledged yet", retry: "waiting for retry" };

/** The details of an event. */
function about(event) {
  const why = event.kind === "requeued" ? died(event.why) : visible(event.why);
  return html`${
    event.who
      ? html`<div>${event.kind === "leased" ? "lease " : "by "}<span class="mono">${visible(event.who)}</span></div>`
      : ""
  }
  ${event.attempts ? html`<div>${plural(event.attempts, "attempt")}</div>` : ""}
  ${why ? html`<div class="${event.kind === "trace" ? "" : "why"}">${why}</div>` : ""}
  ${event.until ? html`<small title="${moment(event.until)}">until ${clock(event.until)}</small>` : ""}`;
}

/** A requeued message had died of something before. */
function died(text) {
  try {
    return `had failed with: ${visible(JSON.parse(text).error)}`;
  } catch {
    return visible(text);
  }
}

/** @param {{at: number|null, kind: string, group: string, who: string, why: string}[]} events */
export function timeline(events) {
  return html`<ol class="timeline" aria-label="History">
    ${events.map(
      (event, i) =>
        html`<li class="${KINDS[event.kind] ?? ""}" data-key="${i}">
          <b>${TITLES[event.kind] ?? event.kind}</b
          >${event.group ? html` <span class="badge">${event.group}</span>` : ""}
          <div><small title="${moment(event.at)}">${event.at ? when(event.at) : "time not recorded"}</small></div>
          ${about(event)}
        </li>`,
    )}
  </ol>`;
}
